"""Three parts of the tests, by what was measured in CPU seconds on two cores.

`make test-quick` (under 2 minutes) leaves out what is SLOW: whole runs, processes, compilers. `make test` (under 15)
leaves out what is LONG: several ranks as launchers start them, the interpreter of kernels, runs that are stopped and
resumed at every point. `make test-long` runs that; what lands has passed all of it. Tests with the marker `model`, or
marked `slow` themselves, count as slow.
"""

from pathlib import Path

TESTS = Path(__file__).parents[1]

SLOW = (
    "adapters/test_in_other_peoples_code.py",
    "adapters/test_narrowed_targets.py",
    "benchmarks/",
    "checkpoints/test_checkpoint_alone.py",
    "checkpoints/test_disk_full.py",
    "checkpoints/test_killed_while_saving.py",
    "checkpoints/test_lock.py",
    "checkpoints/test_only_this_runs.py",
    "checkpoints/test_optimizer_state.py",
    "codecs/test_sharding.py",
    "convergence/",
    "data/test_cache.py",
    "distributed/",
    "docs/test_architecture.py",
    "docs/test_benchmarks.py",
    "docs/test_docs.py",
    "docs/test_notebook.py",
    "exports/test_gguf.py",
    "inference/",
    "kernels/interpreted/",
    "kernels/test_attention_compile.py",
    "kernels/test_kernels_compile.py",
    "models/test_host_embedding.py",
    "models/test_layer_by_layer.py",
    "models/test_load_base.py",
    "models/test_quantised_base.py",
    "models/test_replace_attention.py",
    "models/test_replace_modules.py",
    "objectives/test_equal_to_trl.py",
    "ops/test_sdpa.py",
    "planning/test_load_forecast.py",
    "planning/test_picture.py",
    "planning/test_plan.py",
    "run/test_bf16_on_a_gpu_without_it.py",
    "run/test_learning_rate_after_resume.py",
    "run/test_no_device_before_training.py",
    "run/test_positions.py",
    "run/test_preference.py",
    "run/test_preference_sharded.py",
    "run/test_resume_loads_the_adapter.py",
    "run/test_rows_apart.py",
    "run/test_setup.py",
    "run/test_trackers.py",
    "run/test_train.py",
    "run/test_used_output_folder.py",
    "training/test_accumulation.py",
    "training/test_evaluation_memory.py",
    "training/test_in_backward.py",
    "training/test_label_smoothing.py",
    "training/test_oom_fallback.py",
    "training/test_signals.py",
    "training/test_warmup_step_save.py",
    "verification/test_doctor.py",
    "verification/test_verify.py",
)

LONG = (
    "benchmarks/test_gpu.py",
    "convergence/test_stock_60_lines.py",
    "distributed/test_fsdp2.py",
    "distributed/test_launchers.py",
    "distributed/test_load_ranks.py",
    "distributed/test_plan_ranks_live.py",
    "distributed/test_preference.py",
    "distributed/test_quickstart_shared.py",
    "distributed/test_ranks_lost.py",
    "distributed/test_resume.py",
    "distributed/test_saved_whole.py",
    "distributed/test_two_hosts.py",
    "distributed/test_two_ranks_ddp.py",
    "distributed/test_zero.py",
    "exports/test_merge_memory.py",
    "exports/test_tokens_and_template_travel.py",
    "kernels/test_kernels_interpreted.py",
    "planning/test_forecast.py",
    "planning/test_ranks.py",
    "run/test_resume_exact.py",
    "run/test_spawned_processes_and_paths.py",
    "run/test_training_again_in_one_process.py",
)


def is_slow(path: Path) -> bool:
    """Whether a test file is in the list SLOW, or in LONG."""
    return path.relative_to(TESTS).as_posix().startswith((*SLOW, *LONG))


def is_long(path: Path) -> bool:
    """Whether a test file is in the list LONG."""
    return path.relative_to(TESTS).as_posix().startswith(LONG)
