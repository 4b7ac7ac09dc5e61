"""Write `checkpoint-N/`: whole or absent. Written beside, flushed, renamed; a marker lists every file with its hash."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch.optim import Optimizer

from frugal.adapters import save_adapter
from frugal.checkpoints.complete import FORMAT, MARKER, why_incomplete
from frugal.checkpoints.rotation import aside, free_bytes, leftovers, rotate
from frugal.checkpoints.side_files import save_side_files
from frugal.config import Config, OutputSection, dump_yaml
from frugal.console import say
from frugal.distributed import group as ranks
from frugal.distributed.optimizer_state import OptimizerState
from frugal.distributed.strategy import Strategy
from frugal.errors import CheckpointError
from frugal.files import fsync_file, fsync_folder, read_json, sha256_file, write_json, write_text
from frugal.tensor_files import write_tensors
from frugal.training.setup import LoopState, rng_state
from frugal.units import disk_size


@dataclass
class CheckpointParts:
    """What one checkpoint holds."""

    write_adapter: Callable[[Path], None]
    """Writes adapter_model.safetensors and adapter_config.json into the folder it is given."""
    optimizer: OptimizerState
    rng: dict[str, torch.Tensor]
    """`<rank>.<generator>` -> uint8 state."""
    state: dict[str, Any]
    """trainer_state.json."""


@dataclass(kw_only=True)
class CheckpointWriter:
    """Writes the checkpoints of one run. Every rank calls `save`, rank 0 writes, all meet the same outcome."""

    run_dir: Path
    strategy: Strategy
    model: PeftModel
    optimizer: Optimizer
    output: OutputSection
    identity: dict[str, Any]
    """What a resumed run is compared with: `run_identity`."""
    side_files: Callable[[Path], None]
    """Writes what a checkpoint needs to be used without its run; see `side_files`."""
    base_fingerprint: str | None = None

    def save(self, state: LoopState) -> None:
        """Write `checkpoint-<step>`, then delete what `save_total_limit` has no room for."""
        adapter, parts = self._gather(state)
        ranks.on_first(lambda: self._write(state, adapter, parts))

    def rehearse(self, state: LoopState) -> None:
        """Write a checkpoint as `save` does, into a folder beside where it would lie, and remove it.

        What does not fit (device, host or disk) shows before the first step.
        """
        _, parts = self._gather(state)
        ranks.on_first(lambda: self._write_and_remove(state.step, parts))

    def _write_and_remove(self, step: int, parts: CheckpointParts) -> None:
        folder = aside(self.run_dir, step, "tmp")
        try:
            save_checkpoint(folder, step, parts)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _gather(self, state: LoopState) -> tuple[dict[str, torch.Tensor], CheckpointParts]:
        """The whole adapter and all else that a checkpoint holds; on every rank, with tensors on the first."""
        generators = ranks.gather({key: tensor.cpu() for key, tensor in rng_state(self.strategy.device).items()})
        adapter = self.strategy.full_adapter(self.model)
        optimizer = self.strategy.full_optimizer_state(self.optimizer)
        rng = {f"{rank}.{key}": tensor for rank, found in enumerate(generators) for key, tensor in found.items()}
        content = {**self.identity, "world_size": ranks.world_size(), "loop": asdict(state)}
        return adapter, CheckpointParts(lambda folder: self._write_adapter(folder, adapter), optimizer, rng, content)

    def _write(self, state: LoopState, adapter: dict[str, torch.Tensor], parts: CheckpointParts) -> None:
        try:
            save_checkpoint(self.run_dir, state.step, parts)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self._rescue(state.step, adapter)}") from error
        best = state.best_step if self.output.keep_best else None
        rotate(self.run_dir, limit=self.output.save_total_limit, best_step=best, ours=self._is_ours)

    def _is_ours(self, folder: Path) -> bool:
        """Whether a folder is a complete checkpoint of this run: of the same rows and steps."""
        if why_incomplete(folder, hashes=False) is not None:
            return False
        try:
            saved = read_json(folder / "trainer_state.json")
            return bool(saved["data_fingerprint"] == self.identity["data_fingerprint"] and saved["plan"] == self._plan)
        except (ValueError, KeyError, TypeError, OSError):
            return False

    @property
    def _plan(self) -> Any:
        return json.loads(json.dumps(self.identity["plan"]))  # as it is read from a file

    def _write_adapter(self, folder: Path, adapter: dict[str, torch.Tensor]) -> None:
        save_adapter(self.model, folder, tensors=adapter, base_fingerprint=self.base_fingerprint)
        self.side_files(folder)

    def _rescue(self, step: int, adapter: dict[str, torch.Tensor]) -> str:
        """Save the adapter in the system's temporary folder, so that its training is not lost. Returns a sentence."""
        folder = Path(tempfile.mkdtemp(prefix=f"frugal-{self.run_dir.name}-step-{step}-"))
        try:
            save_adapter(self.model, folder, tensors=adapter)
        except Exception as error:  # whatever it is, the first error is the one to report
            return f"The adapter of step {step} could not be saved in {folder} either ({error})."
        return f"The adapter of step {step} (without optimizer state) was saved in {folder}."


def side_files(tokenizer: Any, *, base: Path, config: Config) -> Callable[[Path], None]:
    """Writes tokenizer, chat template, stop ids and config.yaml: a checkpoint alone can be chatted with and merged."""

    def write(folder: Path) -> None:
        try:
            save_side_files(folder, tokenizer, base=base)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):  # told as any other file of the checkpoint that cannot be written
                raise error.__cause__ from None
            raise
        write_text(folder / "config.yaml", dump_yaml(config))

    return write


def save_checkpoint(run_dir: Path, step: int, parts: CheckpointParts) -> Path:
    """Write `checkpoint-N`; replaces one of the same number. Returns its folder.

    Raises CheckpointError when it cannot be written (disk full, quota, read-only): nothing of it stays then, and
    earlier checkpoints are as they were.
    """
    run_dir = Path(run_dir)
    final, beside = run_dir / f"checkpoint-{step}", aside(run_dir, step, "tmp")
    try:
        beside.mkdir(parents=True)
        _write_parts(beside, step, parts)
        _swap_in(beside, final, step)
    except (OSError, SafetensorError) as error:  # PEFT's own writer reports a full disk as SafetensorError
        need = sum(path.stat().st_size for path in beside.rglob("*") if path.is_file()) if beside.exists() else 0
        raise CheckpointError(_cannot_write(final, need, error)) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return final


def recover(run_dir: Path, say: Callable[[str], None] = print) -> None:
    """Tidy up after a killed process; only for the holder of the run's lock.

    A checkpoint that was being replaced goes back under its name if its replacement did not arrive.
    """
    for path, name, kind in leftovers(run_dir):
        final = Path(run_dir) / name
        if kind == "old" and not final.exists() and why_incomplete(path) is None:
            path.rename(final)
            say(f"restored {final}, which was being replaced when the run was killed")
        else:
            shutil.rmtree(path)


def _write_parts(folder: Path, step: int, parts: CheckpointParts) -> None:
    parts.write_adapter(folder)
    write_tensors(folder / "optimizer.safetensors", parts.optimizer.tensors, parts.optimizer.meta)
    write_tensors(folder / "rng.safetensors", parts.rng)
    write_json(folder / "trainer_state.json", {"format": FORMAT, **parts.state, "step": step})
    listed = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            fsync_file(path)
            name = path.relative_to(folder).as_posix()
            listed[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    write_json(folder / MARKER, {"format": FORMAT, "step": step, "files": listed})
    fsync_folder(folder)


def _swap_in(beside: Path, final: Path, step: int) -> None:
    """Give a finished folder its name. Between the two renames a kill leaves the former one as `.old`: see recover."""
    old = aside(final.parent, step, "old")
    if final.is_symlink() or (final.exists() and not (final / MARKER).is_file()):
        kept = final.with_name(f"{final.name}.{old.name.split('.')[2]}.kept")
        final.rename(kept)  # somebody else's: a checkpoint gets its name when it is whole
        say(f"{final} was no checkpoint of frugal: it is {kept.name} now, with all that is in it")
    replaced = final.exists()
    if replaced:
        final.rename(old)
    try:
        beside.rename(final)
    except OSError:
        if replaced:
            old.rename(final)
        raise
    fsync_folder(final.parent)
    if replaced:
        shutil.rmtree(old)


def _cannot_write(final: Path, written: int, error: Exception) -> str:
    free = free_bytes(final.parent)
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or str(error)
    full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(f"os error {n}" in reason for n in (28, 27, 122))
    advice = "Free some space there" if full else "Make the folder writable"
    return (
        f"cannot write {final} ({disk_size(written)} were written, {disk_size(free)} = {free:,} bytes are free there): "
        f"{reason}. The unfinished folder was removed, earlier checkpoints are whole. "
        f"{advice}, then go on with --resume."
    )
