"""From the `data` section and a tokenizer to rows for training: read, render, mask, tokenise, fit, pack, cache,
report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from frugal.config import DataSection
from frugal.data import cache
from frugal.data.answer_ends import TemplateReport, template_report, untrained_warning
from frugal.data.chat.sandbox import TemplateLimit
from frugal.data.chat.templates import PLAIN, portable
from frugal.data.dataset import DatasetCounts, TokenDataset, build_dataset, report_counts, where
from frugal.data.encode import EncodedRow, RowEncoder, chat_renderer
from frugal.data.pairs import EncodedPair, build_judged, build_pairs, encode_pairs
from frugal.data.report import DataReport
from frugal.data.rows import Example
from frugal.data.sources.mixing import keep_apart, load_train_eval
from frugal.data.tokenizer import TextEncoder
from frugal.errors import ConfigError, DataError

Say = Callable[[str], None]
TRAIN_PAIRS = "To train on pairs (or with orpo, simpo), write\nobjective:\n  name: dpo\n  beta: 0.1"
TRAIN_JUDGED = "To train on them, write\nobjective:\n  name: kto\n  beta: 0.1"
_LOOK_AT = 1000
"""Documents among which one is looked for."""
_CHUNK = 256
"""Examples tokenised together."""


@dataclass(slots=True)
class PreparedData:
    """Everything that training needs to know about its data."""

    train: TokenDataset
    eval: TokenDataset | None
    """Held-out rows; None when there are none."""
    report: DataReport
    template_report: TemplateReport
    train_sources: list[str] = field(default_factory=list)
    """`file:line` of each training example; `TokenRow.origin` counts in this list."""
    eval_sources: list[str] = field(default_factory=list)
    chat_template: str | None = None
    """Jinja text that conversations were rendered with; None when no row is one. It must travel with the adapter."""
    clock: str | None = None
    """Time that the template printed, in ISO's form; None where it prints none. Goes into manifest and checkpoints."""
    sample: tuple[Example, list[int]] | None = None
    """A trained conversation (or pair of texts) and its ids, to compare with what is asked later."""
    cache_hits: int = 0
    """Parts (train, eval) that came from the cache."""

    @property
    def parts(self) -> dict[str, TokenDataset]:
        """`train` and, where there are rows, `eval`."""
        return {"train": self.train} | ({"eval": self.eval} if self.eval is not None and len(self.eval) else {})

    def untrained_token_warnings(self, tokenizer: Any, zero_rows: Collection[int]) -> list[str]:
        """Warnings about tokens of the training rows whose embedding row is all zero, for callers that load the model
        after the data. ``zero_rows``: ids of such rows."""
        found = first_rows_with(self.train, self.train_sources, zero_rows)
        stops = self.template_report.stop_ids
        names = {token_id: tokenizer.convert_ids_to_tokens(token_id) for token_id in found}
        return [untrained_warning(names[token_id], token_id, found[token_id], stops) for token_id in sorted(found)]


def build(
    data: DataSection,
    tokenizer: Any,
    *,
    seed: int,
    vocab_size: int,
    cache_dir: Path | None = None,
    zero_rows: Collection[int] = (),
    say: Say | None = None,
    clock: datetime | None = None,
    objective: str = "sft",
) -> PreparedData:
    """Prepare the data of a run.

    Args:
        data: the `data` section.
        tokenizer: a fast transformers tokenizer.
        seed: chooses held-out rows and the rows of fractional weights.
        vocab_size: rows of the embedding table; an id at or above it is refused.
        cache_dir: where tokenised data are kept; None: the user's cache folder. Unused when `data.cache` is false.
        zero_rows: ids whose embedding row is all zero, for the warning about tokens that were never trained.
        say: takes one-line messages for the user (the same lines are notes of the report).
        clock: the time for chat templates that print it; a run keeps one for its whole life. None: now.
        objective: name of the objective: pairs are for others than sft, and nothing else is.

    Raises:
        DataError: data that cannot be read or rendered, ids outside the table, or no row left to train on.
        ConfigError: no chat template, or one that does not fit; rows that are not what the objective trains on.
        UnsupportedError: a tokenizer without offsets.
    """
    train, held_out, report = load_train_eval(data, seed=seed)
    return build_from(
        train,
        held_out,
        report,
        data,
        tokenizer,
        vocab_size=vocab_size,
        cache_dir=cache_dir,
        zero_rows=zero_rows,
        say=say,
        clock=clock,
        objective=objective,
    )


def build_from(
    train: list[Example],
    held_out: list[Example],
    report: DataReport,
    data: DataSection,
    tokenizer: Any,
    *,
    vocab_size: int,
    cache_dir: Path | None = None,
    zero_rows: Collection[int] = (),
    say: Say | None = None,
    clock: datetime | None = None,
    objective: str = "sft",
) -> PreparedData:
    """`build` for examples that were read already; arguments and errors are the same."""
    check_kinds([*train, *held_out], objective)
    train = keep_apart(train, held_out, report)
    row_encoder = make_encoder(data, tokenizer, [*train, *held_out], report, clock=clock)
    hits = 0
    sets: list[tuple[TokenDataset, DatasetCounts]] = []
    parts: tuple[tuple[Literal["train", "eval"], list[Example]], ...] = (("train", train), ("eval", held_out))
    for part, examples in parts:
        if part == "eval" and not examples:
            continue
        dataset, count, hit = _prepared(examples, row_encoder, data, cache_dir, report, say)
        hits += hit
        check_ids(dataset, examples, vocab_size, row_encoder.encoder)
        report_counts(count, dataset, examples, report, data, part)
        _note_unknown(dataset, examples, row_encoder.encoder, report, part)
        sets.append((dataset, count))
    ends = template_report(
        sets[0][1].ends,
        row_encoder.encoder,
        row_encoder.renderer,
        zero_rows=zero_rows,
        first_with=first_rows_with(sets[0][0], [where(example) for example in train], zero_rows),
    )
    return PreparedData(
        train=sets[0][0],
        eval=sets[1][0] if len(sets) > 1 else None,
        report=report,
        template_report=ends,
        train_sources=[where(example) for example in train],
        eval_sources=[where(example) for example in held_out],
        chat_template=portable(row_encoder.renderer.template.source) if row_encoder.renderer is not None else None,
        clock=_printed_clock(row_encoder),
        sample=_sample(sets[0][0], train, row_encoder),
        cache_hits=hits,
    )


def _printed_clock(made: RowEncoder) -> str | None:
    renderer = made.renderer
    if renderer is None or renderer.template.clock is None or not renderer.dated:
        return None
    return renderer.template.clock.isoformat(timespec="seconds")


def _sample(dataset: TokenDataset, examples: Sequence[Example], made: RowEncoder) -> tuple[Example, list[int]] | None:
    """The first document that ends with an answer, as it is trained. Pairs whose prompt is rendered text are not asked
    through the template and left out."""
    for document, origin in enumerate(dataset.origins[:_LOOK_AT]):
        example = examples[int(origin)]
        pair = example.kind == "prompt_completion" and (made.renderer is None or made.as_turns(example))
        if pair or (
            example.kind == "messages" and len(example.messages) > 1 and example.messages[-1].role == "assistant"
        ):
            ids = dataset.input_ids[int(dataset.doc_starts[document]) : int(dataset.doc_starts[document + 1])]
            return example, [int(token_id) for token_id in ids]
    return None


def make_encoder(
    data: DataSection,
    tokenizer: Any,
    examples: Sequence[Example],
    report: DataReport,
    *,
    keep_text: bool = False,
    clock: datetime | None = None,
) -> RowEncoder:
    """The row encoder for these examples; it has a chat template only when a row needs one, or when rows of prompt and
    completion will be asked through one."""
    encoder = TextEncoder.from_tokenizer(tokenizer)
    kinds = {example.kind for example in examples}
    renderer = None
    asks_with_template = data.chat_template is not None or bool(tokenizer.chat_template)
    turns = "messages" in kinds or any(example.kind == "preference" and not example.prompt for example in examples)
    if turns or (kinds & {"prompt_completion", "preference"} and asks_with_template):
        formats = {source.format for source in report.sources if source.format not in ("prompt_completion", "text")}
        # One time for all rows: a template may print minutes.
        clock = clock if clock is not None else datetime.now()
        renderer = chat_renderer(tokenizer, data.chat_template, all_alpaca=formats == {"alpaca"}, clock=clock)
    made = RowEncoder(encoder, renderer, train_on=data.train_on, system_prompt=data.system_prompt, keep_text=keep_text)
    with contextlib.suppress(TemplateLimit):  # the first row that is rendered meets it too, and says so
        _note_forms(made, examples, report)
    return made


def _note_forms(made: RowEncoder, examples: Sequence[Example], report: DataReport) -> None:
    """Notes about what a template or its absence makes of rows, so that nobody is surprised by what is trained."""
    renderer = made.renderer
    if renderer is not None:
        if any(example.tools for example in examples) and not renderer.knows_tools:
            report.note(
                f"the chat template ({renderer.name}) knows no tools: they are written into the system text, calls as "
                "JSON in <tool_call></tool_call>"
            )
        if not renderer.knows_system and (
            made.system_prompt is not None
            or any(example.tools or any(turn.role == "system" for turn in example.messages) for example in examples)
        ):
            report.note(
                f"the chat template ({renderer.name}) has no system turn: system text (data.system_prompt, a row's "
                "own, tools) stands before the first user's text, in training and when frugal asks"
            )
        if renderer.dated and renderer.template.clock is not None:
            report.note(
                f"the chat template ({renderer.name}) prints the time: rows hold "
                f"{renderer.template.clock:%Y-%m-%d %H:%M}, the same for the whole run and its resume"
            )
    pairs = [example for example in examples if example.kind == "prompt_completion"]
    turns = sum(made.as_turns(example) for example in pairs)
    plain = renderer is not None and renderer.name == PLAIN
    if turns and not plain:
        report.note(
            f"{turns:,} rows of prompt and completion are turns of the chat template, as chat asks; "
            f"data.chat_template: {PLAIN} joins the texts as they are, in training and when frugal asks"
        )
    joined = [example for example in pairs if plain or not made.as_turns(example)]
    touching = [one for one in joined if not one.prompt[-1:].isspace() and not one.completion[:1].isspace()]
    touching = [one for one in touching if one.prompt and one.completion]
    if touching:
        report.note(
            f"{len(touching):,} rows have no white space between prompt and completion (first: {where(touching[0])}): "
            "the texts are joined as they are"
        )


def check_kinds(examples: Sequence[Example], objective: str) -> None:
    """Raises ConfigError, with the lines to write, when a row is not of the kind that ``objective`` trains on."""
    pairs = objective != "sft"
    for example in examples:
        judged = example.good is not None
        if judged and objective != "kto":
            raise ConfigError(
                f"{where(example)} says whether its answer is good (`label`), and objective.name is {objective}, which "
                f"does not read that. {TRAIN_JUDGED}\nTo learn the good answers alone, keep those rows and take the "
                "key out; if it says nothing about the answer, name it: `ignore_columns: [label]` beside the source's "
                "path."
            )
        if objective == "kto":
            if not judged:
                sft = "To learn every answer, write\nobjective:\n  name: sft"
                raise ConfigError(
                    f"{where(example)} does not say whether its answer is good, and objective.name is kto, which reads "
                    "rows of `prompt`, `completion` and `label` (true or false). "
                    + (TRAIN_PAIRS if example.kind == "preference" else sft)
                )
            continue
        if pairs and example.kind != "preference":
            raise ConfigError(
                f"{where(example)} is no preference row, and objective.name is {objective}, which compares a `chosen` "
                "with a `rejected` answer in every row. Name a file of such rows in data.train and data.eval, or, to "
                "learn single answers, write\nobjective:\n  name: sft"
            )
        if not pairs and example.kind == "preference":
            raise ConfigError(
                f"{where(example)} is a preference row (chosen and rejected), and objective.name is sft, which learns "
                f"single answers. {TRAIN_PAIRS}\nTo learn the chosen answers alone, write them as `messages` rows."
            )


def check_ids(dataset: TokenDataset, examples: Sequence[Example], vocab_size: int, encoder: TextEncoder) -> None:
    """Raises DataError with row and id when an id lies outside the embedding table."""
    if not dataset.tokens or int(dataset.input_ids.max()) < vocab_size:
        return
    at = int(np.argmax(np.asarray(dataset.input_ids) >= vocab_size))
    document = int(np.searchsorted(dataset.doc_starts, at, side="right")) - 1
    token_id = int(dataset.input_ids[at])
    raise DataError(
        f"{where(examples[int(dataset.origins[document])])}: token id {token_id} ({encoder.token(token_id)}) lies "
        f"outside the model's embedding table of {vocab_size:,} rows. The tokenizer and the model do not belong "
        "together, or tokens were added to the tokenizer alone: name them in model.add_tokens, which grows the table."
    )


def _note_unknown(
    dataset: TokenDataset, examples: Sequence[Example], encoder: TextEncoder, report: DataReport, part: str
) -> None:
    """A note on text that the tokenizer has no tokens for: the model cannot learn what it says."""
    unknown = encoder.unknown_id
    if unknown is None or not dataset.tokens:
        return
    count = int(np.count_nonzero(np.asarray(dataset.input_ids) == unknown))
    if count:
        first = first_rows_with(dataset, [where(example) for example in examples], [unknown])[unknown]
        report.note(
            f"{part}: {count:,} of {dataset.tokens:,} tokens are {encoder.token(unknown)}: text that the tokenizer has "
            f"no tokens for, which the model cannot learn (first: {first})"
        )


def first_rows_with(dataset: TokenDataset, sources: Sequence[str], ids: Collection[int]) -> dict[int, str]:
    """Of ``ids``, those that occur, with `file:line` of the first row that has them."""
    found: dict[int, str] = {}
    if not ids or not dataset.tokens:
        return found
    hits = np.flatnonzero(np.isin(dataset.input_ids, np.array(sorted(ids), dtype=np.int64)))
    values, first = np.unique(np.asarray(dataset.input_ids)[hits], return_index=True)
    for value, place in zip(values.tolist(), hits[first].tolist(), strict=True):
        document = int(np.searchsorted(dataset.doc_starts, place, side="right")) - 1
        found[value] = sources[int(dataset.origins[document])]
    return found


def _prepared(
    examples: list[Example],
    row_encoder: RowEncoder,
    data: DataSection,
    cache_dir: Path | None,
    report: DataReport,
    say: Say | None,
) -> tuple[TokenDataset, DatasetCounts, bool]:
    """(rows, counts, came from the cache)."""

    def tell(text: str) -> None:
        report.note(text)
        if say is not None:
            say(text)

    if not data.cache:
        return *_tokenised(examples, row_encoder, data, tell), False
    folder = cache_dir if cache_dir is not None else cache.default_folder()
    key = cache.cache_key(examples, row_encoder, data)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(cache.locked(folder, key))
        except OSError as fault:
            tell(f"the cache folder {folder} cannot be used ({fault.strerror or fault}): data are tokenised every time")
            return *_tokenised(examples, row_encoder, data, tell), False
        known = cache.load(folder, key)
        if known is not None:
            return *known, True
        dataset, count = _tokenised(examples, row_encoder, data, tell)
        try:
            cache.store(folder, key, dataset, count)
        except OSError as fault:
            tell(f"tokenised data could not be kept in {folder}: {fault.strerror or fault}")
        return dataset, count, False


def _tokenised(
    examples: list[Example], row_encoder: RowEncoder, data: DataSection, tell: Say
) -> tuple[TokenDataset, DatasetCounts]:
    unique = list({id(example): example for example in examples}.values())  # a weight repeats the same object
    if data.num_proc > 1:
        tell(f"data.num_proc: {data.num_proc} is not used: the tokenizer uses all cores by itself")
    if examples and examples[0].kind == "preference":  # then all are
        pairs: dict[int, EncodedPair] = {}
        for at in range(0, len(unique), _CHUNK):
            chunk = unique[at : at + _CHUNK]
            pairs.update(zip(map(id, chunk), encode_pairs(row_encoder, chunk, data), strict=True))
        encoded = [pairs[id(example)] for example in examples]
        if examples[0].good is not None:
            return build_judged(encoded, [bool(example.good) for example in examples], data)
        return build_pairs(encoded, data)
    rows: dict[int, EncodedRow] = {}
    for at in range(0, len(unique), _CHUNK):
        chunk = unique[at : at + _CHUNK]
        rows.update(zip(map(id, chunk), row_encoder.encode(chunk), strict=True))
    return build_dataset([rows[id(example)] for example in examples], [example.kind for example in examples], data)
