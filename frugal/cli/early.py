"""What a command can refuse before torch and transformers are imported, which takes seconds.

The command itself asks all of it again.
"""

from __future__ import annotations

import os
from pathlib import Path

from frugal.assets import is_known
from frugal.checkpoints.resume import finished, starting_point
from frugal.config import Config
from frugal.models.resolve import check_name, hub_configuration


def before_training(config: Config, resume: str | Path | None) -> bool:
    """Refuse a base that is not there, and an output folder that is in use or does not fit. Returns whether there is
    anything to train: False for a finished run that was to be resumed, which is said."""
    base = config.model.base
    if not check_name(base, config.model.revision).is_dir() and not is_known(base):
        hub_configuration(base, config.model.revision)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # the first process may have begun to write there already
        return True
    run_dir = Path(config.output.dir)
    start = starting_point(run_dir, config.model_dump(mode="json"), resume, lambda _: None, hashes=False)
    done = finished(run_dir, start)
    if done is None:
        return True
    print(
        f"{run_dir} is finished: all {done['step']} steps are done and the adapter is saved. Nothing is left to train."
    )
    return False
