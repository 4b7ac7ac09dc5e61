"""A plan as text: the verdict first, then phases, what fills the peak, the longest sequence, host and disk."""

from __future__ import annotations

from frugal.assets import weights_note
from frugal.memory.device_memory import used_by_others
from frugal.planning.forecast import Plan
from frugal.planning.sweep import Measure, SweepRow
from frugal.units import disk_size, gib, nominal_gib

_NAMES = {
    "load": "load", "first_step": "first step", "steady_step": "later steps", "evaluation": "evaluation",
    "save": "save", "merge": "merge (host only)",
}  # fmt: skip


def verdict(plan: Plan) -> str:
    """One line: fits or not, and by how much."""
    rows = f"{plan.shape.rows} x {plan.shape.length:,} tokens"
    if not plan.fits_device:
        over = plan.peak.bytes - plan.budget_bytes
        return f"DOES NOT FIT: {rows} need {gib(over)} more than {plan.device.name} has ({_NAMES[plan.peak_phase]})"
    if not plan.fits_host:
        over = plan.host_bytes - plan.device.host_bytes
        return f"DOES NOT FIT: the host needs {gib(plan.host_bytes)}, {gib(over)} more than it has"
    return f"FITS: {rows} on {plan.device.name}, {gib(plan.budget_bytes - plan.peak.bytes)} to spare"


def lines(plan: Plan) -> list[str]:
    """The whole plan."""
    shown = [verdict(plan), ""]
    method = f"{plan.policy} (chosen)" if plan.asked_policy == "auto" else plan.policy
    shown.append(
        f"{plan.base}{weights_note(plan.base)}: {plan.parameters / 1e9:.2f} B parameters, "
        f"{plan.trained / 1e6:.1f} M trained, compute {plan.compute}, checkpoint: {method}"
    )
    shown.append("")
    shown.append(f"{'device':<28}{'tensors':>10}")
    for name, peak in plan.phases.items():
        mark = "  <- highest" if name == plan.peak_phase else ""
        shown.append(f"  {_NAMES[name]:<26}{gib(peak.bytes):>10}{mark}")
    shown.append(
        f"  {'not simulated (allowance)':<26}{gib(sum(plan.allowance.values())):>10}  {', '.join(plan.allowance)}"
    )
    if in_use := used_by_others(plan.device.others_bytes, plan.device.total_bytes):
        shown.append(f"  {in_use}")
    peak = plan.peak
    parts = ", ".join(f"{name} {gib(count)}" for name, count in sorted(peak.by_category.items(), key=lambda x: -x[1]))
    shown.append(f"at the highest: {parts}")
    where = peak.module.removeprefix("model.base_model.model.")
    shown.append(f"  while in {where or 'no module'} ({peak.op})")
    best = plan.best
    if best is not None and best.tokens:
        each = f" = {plan.shape.rows} rows of {best.tokens // plan.shape.rows:,}" if plan.shape.rows > 1 else ""
        shown.append(f"longest: {best.tokens:,} tokens in a micro-batch{each}, checkpoint: {best.policy}")
        shown.append(f"  {best.bytes_per_token / 1000:.1f} kB a token, {gib(best.fixed_bytes)} fixed")
        if plan.max_positions and best.tokens // plan.shape.rows > plan.max_positions:
            shown.append(f"  the model ends at {plan.max_positions:,} positions a row, whatever memory holds")
        others = [f"{row.policy} {row.tokens:,}" for row in plan.longest.values() if row is not best]
        if others:
            shown.append(f"  with the others: {', '.join(others)}")
        if best.held_by == "host":
            shown.append(f"  where the host's {gib(plan.device.host_bytes)} end")
    if plan.tried:
        tried = ", ".join(f"{policy} {gib(count)}" for policy, count in plan.tried.items())
        shown.append(f"a step with checkpoint: {tried}")
    shown += _shared_lines(plan)
    host = ", ".join(f"{name} {gib(count)}" for name, count in plan.host.items() if count)
    if plan.ranks_per_host > 1:
        host = f"{plan.ranks_per_host} ranks, each: {host}"
    shown.append(
        f"host: {gib(plan.host_bytes)} ({host})" if host else "host: no more than the device's line (a CPU run)"
    )
    disk = ", ".join(f"{name} {disk_size(count)}" for name, count in plan.disk.items() if count)
    shown.append(f"disk: {disk}")
    return shown


def _shared_lines(plan: Plan) -> list[str]:
    """How several ranks share the run, and what that sends."""
    sharing, network = plan.sharing, plan.network
    if sharing is None or network is None:
        return []
    cut = ", base cut" if sharing.shard_base else ", base whole on each"
    shown = [f"each of {sharing.world_size} ranks, {sharing.strategy}{cut} ({plan.strategy_reason})"]
    shown.append(f"  holds {', '.join(f'{name} {gib(count)}' for name, count in sharing.held().items() if count)}")
    gathered = {name: count for name, count in sharing.gathered().items() if count}
    if gathered:
        shown.append(f"  whole for a while: {', '.join(f'{name} {gib(count)}' for name, count in gathered.items())}")
    sent = ", ".join(f"{kind} {disk_size(count)}" for kind, count in network.sent.items())
    shown.append(f"  sends {disk_size(network.sent_bytes)} a step: {sent}")
    return shown


def sweep_lines(rows: list[SweepRow], base: str, policy: str) -> list[str]:
    """A table of device sizes."""
    shown = [f"{base}, checkpoint: {policy}, one row a micro-batch", f"{'memory':>8}{'longest row':>14}{'host':>12}"]
    for row in rows:
        size = f"{nominal_gib(row.total_bytes):>8}"
        found = f"{row.max_tokens:>14,}{gib(row.host_bytes):>12}" if row.max_tokens else f"{'does not fit':>14}"
        shown.append(size + found)
    return shown


def measure_lines(measures: list[Measure]) -> list[str]:
    """What was tried, in order, and what to write into the configuration."""
    shown = []
    for measure in measures:
        settings = " ".join(f"{key}={value}" for key, value in measure.settings.items())
        verdict_ = "fits" if measure.fits else "does not fit"
        shown.append(f"{verdict_:<13}{gib(measure.peak_bytes):>10}  host {gib(measure.host_bytes):>10}  {settings}")
    last = measures[-1]
    if last.fits:
        settings = " ".join(f"{key}={value}" for key, value in last.settings.items())
        shown.append(f"write: {settings} (costs {last.costs})")
    else:
        shown.append("nothing fits: a shorter data.max_length (see `frugal plan --sweep`), a smaller model or rank")
    return shown
