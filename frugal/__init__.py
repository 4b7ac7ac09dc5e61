"""frugal: memory-frugal LoRA and QLoRA fine-tuning."""
