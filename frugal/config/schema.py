"""The configuration's sections. Leaf names are those of `peft.LoraConfig`, `transformers.TrainingArguments` and
`BitsAndBytesConfig`, which users know. The string under each field is its documentation (`frugal schema` prints it)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from frugal.config.fields import (
    AutoFlag,
    Excluded,
    Flag,
    FrozenBias,
    Name,
    Names,
    Number,
    Sentences,
    Table,
    Targets,
    Text,
    Whole,
    Wholes,
    one_or_more,
    read_sources,
    read_trackers,
)
from frugal.units import parse_size


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are frozen after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_empty(cls, value: Any) -> Any:
        """`train:` with every key commented out is an empty section."""
        if value is None:
            return {}
        if not isinstance(value, (dict, BaseModel)):
            raise ValueError(f"must be a section with keys ({', '.join(list(cls.model_fields)[:3])}, ...) below it")
        return value


class ModelSection(Section):
    base: Name
    """The base model: a name known to `frugal fetch`, a local folder, or a hub id."""
    revision: Text | None = None
    """Branch, tag or commit of a hub id."""
    quantize: Literal["nf4", "none"] = "nf4"
    """Storage of the frozen linear layers: 4-bit NF4 (QLoRA), or as in the checkpoint (LoRA)."""
    bnb_4bit_use_double_quant: Flag = True
    """Quantise the NF4 scales too: 4.127 instead of 4.5 bits a parameter."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute dtype. auto: bfloat16 where a GPU has it, else float16 with loss scaling; float32 on CPUs."""
    trust_remote_code: Flag = False
    """Run Python code that comes with the model. Off unless you ask for it; never inherited by a resumed run."""
    add_tokens: Names = Field(default_factory=list)
    """Special tokens to add to the tokenizer; their embedding rows are trained and saved with the adapter."""


class LoraSection(Section):
    r: Whole = Field(default=16, ge=1)
    """Rank of the update."""
    lora_alpha: Number = Field(default=32.0, gt=0)
    """Scale: the update is multiplied by lora_alpha / r (or / sqrt(r) with use_rslora)."""
    lora_dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input."""
    target_modules: Targets = "all-linear"
    """`all-linear`, or names of modules (`q_proj`, a dotted tail, or a regular expression as one string)."""
    exclude_modules: Excluded = Field(default_factory=list)
    """Of target_modules, what gets no adapter: names, or a regular expression as one string, as in PEFT."""
    layers_to_transform: Wholes = Field(default_factory=list)
    """Numbers of the decoder layers that get adapters, counted from 0: a list, or one. Empty: all layers."""
    bias: FrozenBias = "none"
    """Biases of the base stay as they are: `none` is the only value."""
    modules_to_save: Names = Field(default_factory=list)
    """Modules trained whole and saved with the adapter (for example `lm_head`)."""
    use_rslora: Flag = False
    """Rank-stabilised scale, lora_alpha / sqrt(r)."""
    use_dora: Flag = False
    """DoRA: magnitude and direction trained apart. Slower."""
    init_lora_weights: Literal["default", "gaussian", "pissa", "loftq"] = "default"
    """How A and B start. pissa and loftq need `model.quantize: none`; loftq also needs a CUDA device."""
    rank_pattern: Table[Whole] = Field(default_factory=dict)
    """Other ranks for modules whose name matches a pattern."""
    alpha_pattern: Table[Number] = Field(default_factory=dict)
    """Other alphas for modules whose name matches a pattern."""


class SourceSection(Section):
    path: Name
    """A file, a folder, a name known to `frugal fetch`, or a `datasets` hub id."""
    format: Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text", "preference", "judged"] = (
        "auto"
    )
    """How rows are written. auto looks at the first rows' keys."""
    weight: Number = Field(default=1.0, gt=0)
    """How often each row is seen in an epoch: 0.5 takes half of them, 2 takes each twice."""
    split: Text | None = None
    """Split of a `datasets` hub id or folder. Default: train."""
    name: Text | None = None
    """Configuration name of a `datasets` hub id."""
    columns: Table[Text] = Field(default_factory=dict)
    """Names of columns in your file for the format's own names, for example {prompt: question, completion: answer}."""
    ignore_columns: Names = Field(default_factory=list)
    """Columns left out though their name means something, for example a `label` that names a topic."""
    max_rows: Whole | None = Field(default=None, ge=1)
    """Take only the first rows."""


Sources = Annotated[list[SourceSection], one_or_more(str | SourceSection, read_sources)]


class DataSection(Section):
    train: Sources
    """What to train on: a path, a list of paths, or a list of sources with weights."""
    eval: Sources = Field(default_factory=list)
    """What to evaluate on. Empty: a part of the training rows, see eval_split."""
    eval_split: Number = Field(default=0.0, ge=0)
    """Held-out part of the training rows when `eval` is empty: a fraction below 1, or a number of rows."""
    chat_template: Name | None = None
    """None: the tokenizer's own. Else a name (`frugal configs templates`), or the path of a Jinja file."""
    system_prompt: Text | None = None
    """System message put before conversations that have none."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which text is trained: every assistant turn, only the last, or all tokens."""
    max_length: Whole = Field(default=2048, ge=8)
    """Longest row in tokens."""
    on_overflow: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to longer rows. A row that truncation leaves without a trained token is dropped and counted."""
    on_empty: Literal["drop", "error"] = "drop"
    """What happens to rows with nothing to train. When no row is left the run stops either way."""
    on_bad_row: Literal["error", "drop"] = "error"
    """What happens to rows that cannot be read as their format says. drop counts them by reason."""
    packing: Flag = False
    """Join short rows into rows of max_length; documents never see each other, the result is exact.
    Refused where a layer carries something from one row into the next: Mamba, convolution, linear attention, chunks."""
    cache: Flag = True
    """Keep tokenised data in the user's cache folder, keyed by content."""
    num_proc: Whole = Field(default=1, ge=1)
    """Accepted, not used any more: the tokenizer uses all cores by itself; reading and rendering take one."""


Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class ObjectiveSection(Section):
    name: Literal["sft", "dpo", "orpo", "simpo", "kto"] = "sft"
    """What is trained for. sft: the answers of the rows. dpo, orpo, simpo: a chosen answer above a rejected one, from
    rows of the format `preference`. kto: good answers up, bad ones down, from rows of the format `judged`. dpo and kto
    compare with the base as it was (the adapter switched off)."""
    beta: Number | None = Field(default=None, gt=0)
    """dpo, kto: how far the adapter may go from the base, less is farther. orpo: weight of the odds ratio. simpo: scale
    of the mean log-probabilities. Unset: 0.1, for simpo 2."""
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """The loss of dpo: that of its paper, IPO (by token, as in TRL), or the hinge of SLiC."""
    label_smoothing: Number = Field(default=0.0, ge=0, lt=0.5)
    """Part of the pairs that are taken to be the wrong way round (conservative DPO); dpo with sigmoid, and simpo."""
    simpo_gamma: Number = Field(default=0.5, ge=0)
    """Margin by which simpo wants the chosen answer to be better. Not multiplied by beta."""
    desirable_weight: Number = Field(default=1.0, gt=0)
    """kto: weight of the losses of good answers. Where there are more of one kind, the other's should be larger."""
    undesirable_weight: Number = Field(default=1.0, gt=0)
    """kto: weight of the losses of bad answers."""
    precompute_reference: bool = False
    """dpo, kto: the base's log-probabilities of all rows once when a run starts, instead of in every step: saves time
    from the second pass over the data on."""


class TrainSection(Section):
    num_train_epochs: Number = Field(default=1.0, gt=0)
    """Passes over the data; max_steps wins when it is set."""
    max_steps: Whole | None = Field(default=None, ge=1)
    """Number of optimizer steps."""
    per_device_train_batch_size: Whole = Field(default=2, ge=1)
    """Rows of one micro-batch."""
    per_device_eval_batch_size: Whole = Field(default=2, ge=1)
    """Rows of one evaluation batch."""
    gradient_accumulation_steps: Whole = Field(default=8, ge=1)
    """Micro-batches of one optimizer step. The loss is the mean over all trained tokens of the step."""
    learning_rate: Number = Field(default=2e-4, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr"] = "cosine"
    """Schedule of the learning rate, as in transformers."""
    warmup_ratio: Number = Field(default=0.03, ge=0, lt=1)
    """Part of all steps spent on warming up, unless warmup_steps is set."""
    warmup_steps: Whole | None = Field(default=None, ge=0)
    """Number of warm-up steps."""
    min_lr_ratio: Number = Field(default=0.1, ge=0, le=1)
    """Floor of cosine_with_min_lr, as part of learning_rate."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with fp32 state, or with block-wise 8-bit state."""
    adam_beta1: Number = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: Number = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    adam_epsilon: Number = Field(default=1e-8, gt=0)
    """Added to the denominator of the update."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Decoupled weight decay on adapter matrices."""
    loraplus_lr_ratio: Number | None = Field(default=None, gt=0)
    """LoRA+: learning rate of B as a multiple of that of A."""
    max_grad_norm: Number = Field(default=1.0, ge=0)
    """Clip the global gradient norm; 0 turns it off."""
    label_smoothing: Number = Field(default=0.0, ge=0, lt=1)
    """Part of each target's probability that is spread evenly over the vocabulary, in training; 0 turns it off."""
    group_by_length: Flag = True
    """Put rows of like length into one batch when not packing."""
    eval_steps: Whole | None = Field(default=None, ge=1)
    """Evaluate every so many steps. Unset: at the end of each epoch when there are evaluation rows."""
    logging_steps: Whole = Field(default=1, ge=1)
    """Log every so many steps."""
    report_to: Annotated[list[Tracker], one_or_more(Tracker, read_trackers)] = Field(default_factory=list)
    """Trackers, through accelerate."""
    seed: Whole = Field(default=42, ge=0)
    """Seed of adapter initialisation, dropout and row order."""


class MemorySection(Section):
    checkpoint: Literal["none", "recompute", "offload", "disk", "auto"] = "auto"
    """What is kept of each decoder layer for backward. auto: the plan decides, the fastest that fits the budget."""
    budget: Text = Field(default="auto", pattern=r"^(auto|\s*[0-9]+(\.[0-9]+)?\s*([kKmMgGtT][iI]?[bB]?|[bB])\s*)$")
    """Device memory that the run may take, for example 6GB. auto: what the device has."""
    scratch_dir: Name | None = None
    """Folder of the scratch file of `checkpoint: disk`. Unset: the run's folder (a `/tmp` is often kept in memory)."""
    attention: Literal["auto", "triton", "sdpa", "flash_attn"] = "auto"
    """How attention is computed. auto: the best that the device can run (`frugal doctor` shows it). A name that the
    device or the model cannot have is an error, never replaced silently."""
    fused: Flag = True
    """Use frugal's fused operations where they are proven equal to the stock module."""
    optimizer_in_backward: AutoFlag = "auto"
    """Update each adapter matrix inside backward and free its gradient at once. auto: where nothing needs all gradients
    together: one micro-batch a step, max_grad_norm 0, one process, no loss scaling. true where that does not hold is an
    error."""
    embedding: Literal["auto", "device", "host"] = "auto"
    """Where the embedding table waits. host: in host memory, only the rows of a micro-batch are copied to the device,
    with the same result. auto: host on a GPU where the table is neither trained nor tied to the head."""
    loss_chunk_tokens: Whole | None = Field(default=None, ge=1)
    """Tokens of one chunk of the loss. Unset: chosen so that a chunk of logits stays small."""
    mlp_chunk_tokens: Whole | None = Field(default=None, ge=1)
    """Tokens of one tile of the MLP. Unset: chosen by size."""

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None for auto."""
        return None if self.budget == "auto" else parse_size(self.budget, "memory.budget")


class DistributedSection(Section):
    strategy: Literal["auto", "ddp", "fsdp2", "zero1", "zero2", "zero3"] = "auto"
    """How several processes share the work. auto: what the launcher was started for; else ddp where the base fits each
    GPU, and fsdp2 where it does not."""
    shard_base: AutoFlag = "auto"
    """fsdp2: cut the frozen base too (true), or only adapters and optimizer state (false, 8 to 25 times less traffic).
    auto: false where the base fits each GPU."""
    offload: AutoFlag = "auto"
    """Shards and optimizer state rest in host memory (fsdp2, zero2, zero3). Slow. auto: what the launcher says."""
    ddp_timeout: Number = Field(default=600.0, gt=0)
    """Seconds that one exchange between processes may take before the run is given up. Preparing data, loading and
    saving do not count: there a process is waited for as long as it lives."""


class OutputSection(Section):
    dir: Name
    """The run's folder."""
    save_steps: Whole | None = Field(default=None, ge=1)
    """Write a checkpoint every so many steps. Unset: at the end of each epoch."""
    save_total_limit: Whole | None = Field(default=2, ge=1)
    """Checkpoints kept; the oldest by number goes first."""
    keep_best: Flag = False
    """Keep the checkpoint with the lowest evaluation loss too, and end with its adapter."""
    sample_prompts: Sentences = Field(default_factory=list)
    """Questions answered before and after training, shown side by side."""
    sample_max_new_tokens: Whole = Field(default=48, ge=1)
    """Longest answer to a sample prompt."""


class Config(Section):
    """One training run."""

    model: ModelSection
    lora: LoraSection = Field(default_factory=LoraSection)
    data: DataSection
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection)
    train: TrainSection = Field(default_factory=TrainSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    distributed: DistributedSection = Field(default_factory=DistributedSection)
    output: OutputSection


def sections() -> dict[str, type[Section]]:
    """The sections by name: model, lora, data, ..."""
    found = {name: info.annotation for name, info in Config.model_fields.items()}
    return {name: section for name, section in found.items() if isinstance(section, type)}
