"""Keys of other tools (axolotl, LLaMA-Factory, Unsloth, TRL, transformers, PEFT, torchtune) and their names here."""

from __future__ import annotations

import difflib

from pydantic import BaseModel

from frugal.config.models import Config, DataSection, SourceSection

COUNTERPART: dict[str, str] = {
    # model
    **dict.fromkeys(
        ["base_model", "model_name_or_path", "model_name", "model_path", "model_id", "pretrained_model_name_or_path"],
        "model.base",
    ),
    **dict.fromkeys(["revision_of_model", "model_revision", "base_model_revision"], "model.revision"),
    **dict.fromkeys(["bnb_4bit_quant_type", "quantization", "quantization_type"], "model.quantize"),
    **dict.fromkeys(["double_quantization", "use_double_quant", "double_quant"], "model.bnb_4bit_use_double_quant"),
    **dict.fromkeys(["torch_dtype", "bnb_4bit_compute_dtype", "compute_dtype", "precision"], "model.dtype"),
    **dict.fromkeys(
        ["tokens", "additional_special_tokens", "add_special_tokens", "new_special_tokens"], "model.add_tokens"
    ),
    # adapters
    **dict.fromkeys(["lora_r", "lora_rank", "rank", "peft_r", "lora_dim"], "lora.r"),
    **dict.fromkeys(["alpha", "loraalpha"], "lora.lora_alpha"),
    **dict.fromkeys(
        ["lora_target", "lora_target_modules", "lora_target_linear", "lora_attn_modules", "targets"],
        "lora.target_modules",
    ),
    **dict.fromkeys(["additional_target", "lora_modules_to_save", "trainable_modules"], "lora.modules_to_save"),
    **dict.fromkeys(["peft_use_dora"], "lora.use_dora"),
    **dict.fromkeys(["peft_use_rslora", "rslora"], "lora.use_rslora"),
    **dict.fromkeys(["dropout"], "lora.lora_dropout"),
    **dict.fromkeys(["peft_init_lora_weights", "init_lora", "loftq_config"], "lora.init_lora_weights"),
    # data
    **dict.fromkeys(
        [
            "dataset",
            "datasets",
            "dataset_name",
            "dataset_dir",
            "train_file",
            "train_dataset",
            "dataset_path",
            "data_path",
        ],
        "data.train",
    ),
    **dict.fromkeys(["test_datasets", "eval_dataset", "validation_file", "eval_file", "val_dataset"], "data.eval"),
    **dict.fromkeys(["val_set_size", "val_size", "validation_split_percentage", "test_size"], "data.eval_split"),
    **dict.fromkeys(
        ["sequence_len", "cutoff_len", "max_seq_length", "max_seq_len", "model_max_length", "block_size", "seq_length"],
        "data.max_length",
    ),
    **dict.fromkeys(
        ["sample_packing", "pack", "packed", "multipack", "packing_strategy", "eval_sample_packing", "eval_packing"],
        "data.packing",
    ),
    **dict.fromkeys(["template", "chat_template_path", "chat_template_jinja", "prompt_template"], "data.chat_template"),
    **dict.fromkeys(["default_system", "system", "system_message"], "data.system_prompt"),
    **dict.fromkeys(
        ["train_on_inputs", "train_on_prompt", "assistant_only_loss", "completion_only_loss"], "data.train_on"
    ),
    **dict.fromkeys(["mask_history", "roles_to_train", "train_on_responses_only"], "data.train_on"),
    **dict.fromkeys(["dataset_num_proc", "preprocessing_num_workers", "dataset_processes"], "data.num_proc"),
    **dict.fromkeys(["excess_length_strategy", "truncation_mode"], "data.on_overflow"),
    **dict.fromkeys(["data_files", "file", "file_name", "filename"], "data.train[].path"),
    **dict.fromkeys(["max_samples", "num_samples", "max_train_samples"], "data.train[].max_rows"),
    **dict.fromkeys(["field_instruction", "formatting", "conversation", "type"], "data.train[].format"),
    **dict.fromkeys(["interleave_probs", "probability", "mix_weight"], "data.train[].weight"),
    **dict.fromkeys(["subset", "dataset_config"], "data.train[].name"),
    **dict.fromkeys(
        ["column_map", "field_messages", "message_property_mappings", "dataset_text_field"], "data.train[].columns"
    ),
    # training
    **dict.fromkeys(
        ["num_epochs", "epochs", "n_epochs", "max_epochs", "num_train_epoch", "num_epoch"], "train.num_train_epochs"
    ),
    **dict.fromkeys(["total_steps", "max_iters", "max_train_steps", "max_steps_per_epoch"], "train.max_steps"),
    **dict.fromkeys(
        ["micro_batch_size", "batch_size", "per_device_batch_size", "train_batch_size", "per_gpu_train_batch_size"],
        "train.per_device_train_batch_size",
    ),
    **dict.fromkeys(["eval_batch_size", "per_gpu_eval_batch_size"], "train.per_device_eval_batch_size"),
    **dict.fromkeys(["grad_accum", "gradient_accumulation", "accumulation_steps"], "train.gradient_accumulation_steps"),
    **dict.fromkeys(["lr", "learning_rates", "max_lr"], "train.learning_rate"),
    **dict.fromkeys(["lr_scheduler", "scheduler", "lr_schedule"], "train.lr_scheduler_type"),
    **dict.fromkeys(["cosine_min_lr_ratio", "min_lr_rate", "min_lr"], "train.min_lr_ratio"),
    **dict.fromkeys(["num_warmup_steps"], "train.warmup_steps"),
    **dict.fromkeys(["warmup", "warmup_fraction"], "train.warmup_ratio"),
    **dict.fromkeys(["optimizer", "optimizer_type"], "train.optim"),
    **dict.fromkeys(["beta1"], "train.adam_beta1"),
    **dict.fromkeys(["beta2"], "train.adam_beta2"),
    **dict.fromkeys(["adam_eps", "eps"], "train.adam_epsilon"),
    **dict.fromkeys(["gradient_clipping", "grad_clip", "clip_grad_norm", "max_gradient_norm"], "train.max_grad_norm"),
    **dict.fromkeys(["label_smoothing_factor"], "train.label_smoothing"),
    **dict.fromkeys(["loraplus_ratio", "lora_plus_ratio"], "train.loraplus_lr_ratio"),
    **dict.fromkeys(["log_every_n_steps", "log_steps", "log_interval"], "train.logging_steps"),
    **dict.fromkeys(["eval_interval", "evaluation_steps"], "train.eval_steps"),
    **dict.fromkeys(["random_state", "random_seed", "data_seed"], "train.seed"),
    **dict.fromkeys(["metric_logger", "wandb_project", "use_wandb", "with_tracking"], "train.report_to"),
    # memory
    **dict.fromkeys(
        [
            "gradient_checkpointing",
            "gradient_checkpointing_kwargs",
            "use_gradient_checkpointing",
            "enable_activation_checkpointing",
            "enable_activation_offloading",
            "activation_offloading",
        ],
        "memory.checkpoint",
    ),
    # output
    **dict.fromkeys(["output_dir", "out_dir", "save_dir", "checkpoint_dir"], "output.dir"),
    **dict.fromkeys(["save_interval", "checkpointing_steps", "save_every"], "output.save_steps"),
    **dict.fromkeys(["load_best_model_at_end", "metric_for_best_model"], "output.keep_best"),
}
"""The key somewhere else -> the key here."""

_PLACED = "has no counterpart: weights are loaded one by one straight to the device"
_FUSED = "here it is memory.fused, on by default"
REASON: dict[str, str] = {
    **dict.fromkeys(["load_in_4bit", "quantization_bit"], "write model.quantize: nf4 (or none)"),
    "load_in_8bit": "8-bit storage is not built; write model.quantize: nf4, or none for 16 bit",
    **dict.fromkeys(
        ["finetuning_type", "adapter"], "always LoRA here; model.quantize: nf4 makes it QLoRA, none plain LoRA"
    ),
    **dict.fromkeys(
        ["bf16", "pure_bf16"], "write model.dtype: bfloat16; auto, the default, takes it where the device has it"
    ),
    "fp16": "write model.dtype: float16; auto, the default, takes it on GPUs without bfloat16",
    "tf32": "has no counterpart: matmul precision is left as torch has it",
    **dict.fromkeys(
        ["stage", "do_train", "do_eval", "do_predict"], "has no counterpart: the command says what is done"
    ),
    **dict.fromkeys(
        ["resume_from_checkpoint", "auto_resume_from_checkpoints"], "not a config key: `frugal train CONFIG --resume`"
    ),
    **dict.fromkeys(
        ["overwrite_output_dir", "overwrite_cache"], "has no counterpart: nothing is overwritten; remove it yourself"
    ),
    **dict.fromkeys(
        [
            "flash_attention",
            "flash_attn",
            "flash_attention_2",
            "attn_implementation",
            "xformers_attention",
            "sdp_attention",
            "use_flash_attention_2",
        ],
        "here it is memory.attention; auto, the default, takes the best that the device can run",
    ),
    **dict.fromkeys(
        ["padding_side", "pad_to_sequence_len", "pad_to_multiple_of"],
        "has no counterpart: padding is chosen, and changes no number",
    ),
    **dict.fromkeys(
        ["eval_strategy", "evaluation_strategy", "eval_per_epoch", "evals_per_epoch"],
        "set train.eval_steps; unset evaluates at the end of each epoch",
    ),
    **dict.fromkeys(
        ["save_strategy", "saves_per_epoch"], "set output.save_steps; unset saves at the end of each epoch"
    ),
    "logging_strategy": "set train.logging_steps",
    **dict.fromkeys(
        ["special_tokens", "pad_token"],
        "has no counterpart: the pad token is chosen so that it never hides an end of turn",
    ),
    **dict.fromkeys(["lora_bias", "bias"], "has no counterpart: biases stay frozen"),
    **dict.fromkeys(["run_name", "wandb_name"], "has no counterpart: a run is named by output.dir"),
    "task_type": "has no counterpart: causal language models only",
    **dict.fromkeys(["peft_type", "use_peft"], "has no counterpart: always LoRA"),
    **dict.fromkeys(["target_parameters"], "is not built: expert weights stored as one parameter stay frozen"),
    **dict.fromkeys(["layers_to_transform", "layers_pattern"], "write a regular expression in lora.target_modules"),
    **dict.fromkeys(
        ["strict", "is_llama_derived_model", "model_type", "tokenizer_type"],
        "has no counterpart: read from the model's folder",
    ),
    "deepspeed": "write distributed.strategy: zero2 or zero3, and start with accelerate launch",
    **dict.fromkeys(["fsdp", "fsdp_config"], "write distributed.strategy: fsdp2, and start with accelerate launch"),
    **dict.fromkeys(
        ["world_size", "num_gpus", "devices"], "not a config key: start with `accelerate launch -m frugal train CONFIG`"
    ),
    "device": "has no counterpart: the GPU when there is one, else the CPU",
    **dict.fromkeys(["hub_model_id", "push_to_hub", "hub_token"], "is not built: upload the run's folder yourself"),
    **dict.fromkeys(
        ["rl", "trainer_type", "loss_type", "rl_beta"], "preference training is TRL's, on a model from frugal.load"
    ),
    **dict.fromkeys(
        ["dataset_prepared_path", "cache_dir"],
        "has no counterpart: data.cache keeps tokenised data in the user's cache folder",
    ),
    **dict.fromkeys(
        ["remove_unused_columns", "dataloader_num_workers", "dataloader_pin_memory"],
        "has no counterpart: not needed here",
    ),
    **dict.fromkeys(["device_map", "low_cpu_mem_usage", "max_memory", "gpu_memory_limit"], _PLACED),
    **dict.fromkeys(["use_unsloth", "enable_liger_kernel", "use_liger_kernel", "lora_mlp_kernel"], _FUSED),
    **dict.fromkeys(["lora_qkv_kernel", "lora_o_kernel"], _FUSED),
    **dict.fromkeys(["use_cache", "fan_in_fan_out", "lora_fan_in_fan_out", "save_safetensors"], "has no counterpart"),
    **dict.fromkeys(["ddp_timeout", "ddp_find_unused_parameters", "full_determinism"], "has no counterpart"),
    **dict.fromkeys(["disable_tqdm", "include_num_input_tokens_seen", "logging_dir"], "has no counterpart"),
    "plot_loss": "has no counterpart: report.html in the run's folder shows the loss",
    "save_only_model": "has no counterpart: checkpoints hold the optimizer, so that a run can go on",
    "auto_find_batch_size": "set train.per_device_train_batch_size; the loss does not depend on it",
    **dict.fromkeys(
        ["global_batch_size", "effective_batch_size", "total_batch_size"],
        "it is train.per_device_train_batch_size times train.gradient_accumulation_steps; set these",
    ),
    **dict.fromkeys(
        ["shuffle", "shuffle_merged_datasets", "shuffle_buffer_size"],
        "has no counterpart: the order depends on train.seed alone",
    ),
    **dict.fromkeys(["streaming", "ds_type"], "has no counterpart: files are read whole, their kind is recognised"),
    **dict.fromkeys(["early_stopping_patience", "lr_scheduler_kwargs", "lr_groups"], "is not built"),
    **dict.fromkeys(
        ["resize_token_embeddings_to_32x", "rope_scaling"], "has no counterpart: the base's own tables and positions"
    ),
    **dict.fromkeys(["compile", "torch_compile"], "has no counterpart: memory.fused replaces modules instead"),
    "neftune_noise_alpha": "is not built",
    **dict.fromkeys(
        ["unfrozen_parameters", "freeze_trainable_layers"], "is not built: only adapters and lora.modules_to_save train"
    ),
}
"""The key somewhere else -> what to do instead, where no single key takes its place."""


THE_KEYS = "; its keys are "
"""What the list of a section's keys begins with; a message gives each list once."""


def leaves() -> dict[str, list[str]]:
    """Every key of the configuration: its last word -> the places where it lives, sections included."""
    places: dict[str, list[str]] = {}
    for name, info in Config.model_fields.items():
        places.setdefault(name, []).append(name)
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            for leaf in section.model_fields:
                places.setdefault(leaf, []).append(f"{name}.{leaf}")
    for leaf in SourceSection.model_fields:
        places.setdefault(leaf, []).append(f"data.train[].{leaf}")
    return places


def explain_unknown(section_path: str, key: str, model: type[BaseModel]) -> str:
    """What to write instead of `key`, which `model` (the section at `section_path`) does not have."""
    where = f"in {section_path}" if section_path else "at the top level"
    known = list(model.model_fields)
    word = key.replace("-", "_").strip().lower()
    places = leaves()
    if word in known:
        return f"unknown key {where}; write {word}"
    if word in Config.model_fields:
        return f"unknown key {where}; it is a section of its own, at the top level"
    if word in places:
        return f"unknown key {where}; it belongs in {_belongs(places[word])}"
    if model is DataSection and word in SourceSection.model_fields:
        return f"unknown key {where}; it belongs in a source, data.train[].{word}"
    if word in COUNTERPART:
        return f"unknown key {where}; here it is called {COUNTERPART[word]}"
    if word in REASON:
        return f"unknown key {where}; {REASON[word]}"
    near_here = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    near_any = difflib.get_close_matches(word, [*places, *COUNTERPART, *REASON], n=1, cutoff=0.8)
    if near_here and (not near_any or _like(word, near_here[0]) >= _like(word, near_any[0])):
        return f"unknown key {where}; did you mean {near_here[0]}?"
    if near_any:
        near = near_any[0]
        if near in places:
            return f"unknown key {where}; did you mean {_belongs(places[near])}?"
        return f"unknown key {where}; did you mean {near}? " + (
            f"Here that is called {COUNTERPART[near]}" if near in COUNTERPART else f"({REASON[near]})"
        )
    if not section_path:
        return f"unknown key {where}; the sections are {', '.join(known)} (keys that start with x- are left alone)"
    return f"unknown key {where}{THE_KEYS}{', '.join(known)}"


def _like(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def _belongs(places: list[str]) -> str:
    section = places[0].split(".")[0]
    return f"{section}: {places[0]}" if len(places) == 1 and "." in places[0] else " or ".join(places)
