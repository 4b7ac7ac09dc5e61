"""The tokenizer of a base model: loaded, given a pad token inside the embedding table, added tokens, a template."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from frugal.decision import Decision
from frugal.errors import ConfigError, ModelError, UnsupportedError
from frugal.models.resolve import ResolvedModel

log = logging.getLogger("frugal.models")

# Names under which models carry tokens that nothing uses; those made for padding come first.
_SPARE = (re.compile(r"pad", re.I), re.compile(r"reserved|unused|extra_id|dummy", re.I))


def load_tokenizer(
    source: ResolvedModel,
    *,
    chat_template: str | None = None,
    add_tokens: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """The fast tokenizer of ``source``, ready for training.

    ``chat_template`` is Jinja text that replaces the tokenizer's own. ``add_tokens`` become special tokens: the model's
    table must have a row for each (`load_base(vocab_size=...)`), and `new_token_ids` gives their ids. A pad token
    inside the table is chosen where there is none (`choose_pad`).

    Raises:
        ModelError: the tokenizer cannot be loaded; UnsupportedError: it is not a fast one, or needs its own code.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=trust_remote_code, use_fast=True)
    except (ValueError, OSError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedError(
                f"The tokenizer of {source.name} brings its own Python code. Read it, then write "
                "`model.trust_remote_code: true`."
            ) from error
        raise ModelError(f"The tokenizer in {source.path} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise UnsupportedError(
            f"The tokenizer of {source.name} has no fast form (tokenizer.json). Offsets of tokens in the text are "
            "needed to know which tokens are trained."
        )
    choice = choose_pad(tokenizer, table_rows(source.config()))
    if tokenizer.pad_token != choice.value:
        tokenizer.pad_token = choice.value
    log.info("pad token %s (id %d): %s", choice.value, tokenizer.pad_token_id, choice.reason)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    _add(tokenizer, add_tokens)
    return tokenizer


def table_rows(config: Any) -> int:
    """Rows of the embedding table that a configuration declares."""
    return int(config.get_text_config().vocab_size)


def _add(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    blank = [token for token in tokens if not token.strip()]
    if blank or len(set(tokens)) != len(tokens):
        raise ConfigError("model.add_tokens: every token must be a text of its own, not blank and not given twice.")
    if tokens:
        tokenizer.add_tokens(
            [AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True
        )


def new_token_ids(tokenizer: PreTrainedTokenizerBase, add_tokens: Sequence[str]) -> list[int]:
    """Ids of ``add_tokens`` after `load_tokenizer`: the rows to train."""
    return [int(tokenizer.convert_tokens_to_ids(token)) for token in add_tokens]


def rows_needed(tokenizer: PreTrainedTokenizerBase, config: Any) -> int:
    """Rows the embedding table must have: those it has (a padded table stays so), or one per token if that is more."""
    highest = max(tokenizer.get_vocab().values(), default=-1)
    return max(table_rows(config), highest + 1)


def choose_pad(tokenizer: PreTrainedTokenizerBase, rows: int) -> Decision[str]:
    """A pad token whose id lies inside a table of ``rows`` rows.

    The tokenizer's own if it does; else a spare token of the vocabulary that the chat template does not use; else the
    end token, which is safe because masks come from lengths and never from ids.
    """
    own = tokenizer.pad_token
    if own is not None and tokenizer.pad_token_id is not None and tokenizer.pad_token_id < rows:
        return Decision("pad token", own, "the tokenizer's own")
    why = "the tokenizer has none" if own is None else f"its own ({own}) has no row in the table of {rows}"
    template = str(tokenizer.chat_template or "")
    taken = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, own}
    added = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
    for pattern in _SPARE:
        for token, id_ in sorted(added.items(), key=lambda item: item[1]):
            if pattern.search(token) and id_ < rows and token not in taken and token not in template:
                return Decision("pad token", token, f"{why}; a spare token of the vocabulary")
    if tokenizer.eos_token is None or tokenizer.eos_token_id is None or tokenizer.eos_token_id >= rows:
        raise ModelError(f"The tokenizer has no pad and no end token inside the table of {rows} rows.")
    return Decision("pad token", tokenizer.eos_token, f"{why}; the end token, masked by length")


@torch.no_grad()
def zero_embedding_rows(model: torch.nn.Module, chunk_rows: int = 8192) -> list[int]:
    """Ids whose input-embedding row is all zero or not finite: never trained, so data should not use them.

    Reads the table in blocks of rows; no copy of it is made.
    """
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    bad: list[int] = []
    for start in range(0, weight.shape[0], chunk_rows):
        largest = weight[start : start + chunk_rows].abs().amax(dim=1)
        rows = torch.nonzero((largest == 0) | ~torch.isfinite(largest)).flatten()
        bad.extend((rows + start).tolist())
    return bad
