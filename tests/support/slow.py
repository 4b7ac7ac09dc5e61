"""Tests that `make test-quick` leaves out: they start whole runs, processes, compilers or the interpreter of kernels.

One list, by what was measured in CPU seconds: the quick part is to stay under 2 minutes on two cores. Tests with the
marker `model`, or marked `slow` themselves, are left out too.
"""

from pathlib import Path

TESTS = Path(__file__).parents[1]

SLOW = (
    "benchmarks/",
    "checkpoints/test_checkpoint_alone.py",
    "checkpoints/test_disk_full.py",
    "checkpoints/test_killed_while_saving.py",
    "checkpoints/test_optimizer_state.py",
    "codecs/test_sharding.py",
    "convergence/",
    "distributed/",
    "docs/test_notebook.py",
    "exports/test_merge_memory.py",
    "exports/test_tokens_and_template_travel.py",
    "inference/",
    "kernels/interpreted/",
    "kernels/test_attention_compile.py",
    "kernels/test_kernels_compile.py",
    "kernels/test_kernels_interpreted.py",
    "models/test_layer_by_layer.py",
    "models/test_replace_attention.py",
    "models/test_replace_modules.py",
    "planning/test_forecast.py",
    "planning/test_load_forecast.py",
    "planning/test_plan.py",
    "planning/test_ranks.py",
    "run/test_bf16_on_a_gpu_without_it.py",
    "run/test_learning_rate_after_resume.py",
    "run/test_no_device_before_training.py",
    "run/test_resume_exact.py",
    "run/test_resume_loads_the_adapter.py",
    "run/test_setup.py",
    "run/test_spawned_processes_and_paths.py",
    "run/test_train.py",
    "run/test_training_again_in_one_process.py",
    "run/test_used_output_folder.py",
    "training/test_accumulation.py",
    "training/test_evaluation_memory.py",
    "training/test_in_backward.py",
    "training/test_label_smoothing.py",
    "training/test_oom_fallback.py",
    "training/test_signals.py",
    "training/test_warmup_step_save.py",
    "verification/test_doctor.py",
)


def is_slow(path: Path) -> bool:
    """Whether a test file is in the list."""
    return path.relative_to(TESTS).as_posix().startswith(SLOW)
