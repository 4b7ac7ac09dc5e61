"""Chat templates that come with frugal, and the choice of one: the tokenizer's own, a named one, or a Jinja file."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frugal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """A template as text, and the special tokens that it cannot do without."""

    source: str
    needs: tuple[str, ...] = ()
    summary: str = ""


_FOLD_SYSTEM = """{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}
{%- set turns = messages[1:] if system else messages -%}
"""

_CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}
{%- else -%}
{{- message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

_LLAMA3 = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] | trim + '<|eot_id|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

_GEMMA = (
    "{{- bos_token -}}\n"
    + _FOLD_SYSTEM
    + """{%- for message in turns -%}
{%- if message['role'] == 'assistant' -%}
{{- '<start_of_turn>model\\n' -}}
{%- generation -%}{{- message['content'] | trim + '<end_of_turn>' -}}{%- endgeneration -%}{{- '\\n' -}}
{%- else -%}
{{- '<start_of_turn>' + message['role'] + '\\n' -}}
{{- (system | trim + '\\n\\n' if system and loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""
)

_MISTRAL = (
    "{{- bos_token -}}\n"
    + _FOLD_SYSTEM
    + """{%- for message in turns -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- ' ' + message['content'] | trim + eos_token -}}{%- endgeneration -%}
{%- elif message['role'] == 'user' -%}
{{- '[INST] ' + (system + '\\n\\n' if system and loop.first else '') + message['content'] + ' [/INST]' -}}
{%- else -%}
{{- raise_exception('mistral knows the roles system (first), user and assistant, got ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}"""
)

_PHI3 = """{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}{{- '\\n' -}}
{%- else -%}
{{- message['content'] + '<|end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""

_ZEPHYR = """{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}{{- '\\n' -}}
{%- else -%}
{{- message['content'] + eos_token + '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""

_ALPACA = (
    "{{- bos_token -}}\n"
    + _FOLD_SYSTEM
    + """{{- (system if system else 'Below is an instruction that describes a task. ' ~
'Write a response that appropriately completes the request.') + '\\n\\n' -}}
{%- for message in turns -%}
{%- if message['role'] == 'assistant' -%}
{{- '### Response:\\n' -}}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}{{- '\\n\\n' -}}
{%- elif message['role'] == 'user' -%}
{{- '### Instruction:\\n' + message['content'] + '\\n\\n' -}}
{%- else -%}
{{- raise_exception('alpaca knows the roles system (first), user and assistant, got ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### Response:\\n' -}}{%- endif -%}"""
)

_PLAIN = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{%- endfor -%}"""

PLAIN = "plain"
"""Texts joined as they are: also what prompt/completion rows are without a chat template."""

TEMPLATES: dict[str, NamedTemplate] = {
    "alpaca": NamedTemplate(_ALPACA, (), "### Instruction / ### Response, ends with the tokenizer's end token"),
    "chatml": NamedTemplate(_CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_start|>role ... <|im_end|> (Qwen, SmolLM)"),
    "gemma": NamedTemplate(_GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<start_of_turn>role ... <end_of_turn>"),
    "llama3": NamedTemplate(
        _LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|start_header_id|>role ... <|eot_id|>"
    ),
    "mistral": NamedTemplate(_MISTRAL, (), "[INST] user [/INST] answer, ends with the tokenizer's end token"),
    "phi3": NamedTemplate(_PHI3, ("<|user|>", "<|assistant|>", "<|end|>"), "<|role|> ... <|end|>"),
    PLAIN: NamedTemplate(_PLAIN, (), "texts joined as they are, ends answers with the tokenizer's end token"),
    "zephyr": NamedTemplate(_ZEPHYR, (), "<|role|> ..., ends with the tokenizer's end token"),
}


@dataclass(frozen=True, slots=True)
class ChosenTemplate:
    """The template of a run."""

    source: str
    name: str
    """For messages: `the tokenizer's own`, a name, or the file as the user wrote it."""


def choose_template(asked: str | None, tokenizer: Any, *, all_alpaca: bool = False) -> ChosenTemplate:
    """The template to render conversations with.

    ``asked`` is `data.chat_template`. ``all_alpaca``: every conversation comes from alpaca rows, so a tokenizer
    without a template gets the template named alpaca. Raises ConfigError when there is none or it cannot work with
    this tokenizer.
    """
    if asked is None:
        own = tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get("default") or next(iter(own.values()))
        if own:
            return ChosenTemplate(own, "the tokenizer's own")
        if not all_alpaca:
            raise ConfigError(
                "The tokenizer has no chat template, and the data are conversations. Set data.chat_template to "
                f"{_names()}, or to the path of a Jinja file."
            )
        asked = "alpaca"
    if asked in TEMPLATES:
        named = TEMPLATES[asked]
        known = tokenizer.get_vocab()
        missing = [token for token in named.needs if token not in known]
        if missing:
            raise ConfigError(
                f"data.chat_template: {asked} needs the tokens {', '.join(missing)}, which this tokenizer does not "
                f"have. Add them (model.add_tokens: [{', '.join(map(repr, missing))}]), or choose another template."
            )
        if "eos_token" in named.source and not tokenizer.eos_token:
            raise ConfigError(
                f"data.chat_template: {asked} ends answers with the tokenizer's end token, and it has none. "
                "Choose another template."
            )
        return ChosenTemplate(named.source, asked)
    path = Path(asked).expanduser()
    if path.is_file():
        try:
            return ChosenTemplate(path.read_text(encoding="utf-8"), asked)
        except (OSError, UnicodeDecodeError) as fault:
            raise ConfigError(f"data.chat_template: {asked} cannot be read as UTF-8 text: {fault}") from None
    near = difflib.get_close_matches(asked, TEMPLATES, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"data.chat_template: {asked!r} is neither a file nor a name. Known names: {_names()}.{hint} "
        "Leave it out to use the tokenizer's own template."
    )


def portable(source: str) -> str:
    """A template of frugal's own without its `{% generation %}` tags, which programs other than transformers may not
    know.

    It prints the same text: the tags trim white space on both sides, and so do their neighbours. Other templates are
    returned as they are.
    """
    if any(source == named.source for named in TEMPLATES.values()):
        return source.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    return source


def _names() -> str:
    return ", ".join(sorted(TEMPLATES))
