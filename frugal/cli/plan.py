"""`frugal plan`: what a run will need, before anything is downloaded."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from frugal.cli.options import Overrides, imported, takes_file, writing
from frugal.config import Config
from frugal.errors import ConfigError, FrugalError


def plan(
    source: Annotated[
        str,
        typer.Argument(metavar="CONFIG|MODEL", help="YAML file, a model's folder, a public model's name, a hub id."),
    ],
    overrides: Overrides = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Plan for this GPU, for example 'RTX 3060'.")] = None,
    vram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Plan for a GPU of this size, for example 12GB.")
    ] = None,
    host_ram: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of that machine.")] = None,
    tokens: Annotated[int | None, typer.Option(min=8, help="Length of a row instead of data.max_length.")] = None,
    world_size: Annotated[int, typer.Option(min=1, help="GPUs that share the run; the plan is that of one.")] = 1,
    strategy: Annotated[
        Literal["auto", "ddp", "fsdp2", "zero1", "zero2", "zero3"],
        typer.Option(help="How they share it. auto: copies where the base fits each GPU, else fsdp2 with all cut."),
    ] = "auto",
    shard_base: Annotated[
        Literal["auto", "true", "false"],
        typer.Option(help="Cut the frozen base too (fsdp2). auto: where it does not fit each GPU."),
    ] = "auto",
    offload: Annotated[
        bool, typer.Option("--offload", help="Shards and optimizer state rest in host memory (fsdp2, zero).")
    ] = False,
    gpus_per_host: Annotated[
        int | None, typer.Option(min=1, help="GPUs of one machine. Unset: all, up to eight.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Longest row for GPUs of 8 to 80 GiB.")] = False,
    solve: Annotated[bool, typer.Option("--solve", help="The cheapest settings that fit.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg|FILE.html", help="Draw device memory by what it is against the length."),
    ] = None,
) -> None:
    """Say what a run will need in memory, and whether it fits, before anything is downloaded."""
    if picture is not None and picture.suffix.lower() not in (".svg", ".html"):
        raise ConfigError(f"--picture {picture}: expected a file name that ends in .svg or .html.")
    if picture is not None:
        takes_file(picture, "--picture")
    if sweep and solve:
        raise ConfigError("--sweep and --solve are two questions: give one of them.")
    _refuse(world_size, strategy, shard_base, offload, gpus_per_host)
    config = imported("frugal.planning.source", "as_config")(source, overrides or ())
    imported("frugal.planning.source", "configuration_folder")(config.model.base, config.model.revision)
    planner = imported("frugal.planning", "make_planner")(
        config,
        gpu=gpu,
        vram=vram,
        host_ram=host_ram,
        tokens=tokens,
        world_size=world_size,
        strategy=None if strategy == "auto" else strategy,
        shard_base=None if shard_base == "auto" else shard_base == "true",
        offload=offload,
        gpus_per_host=gpus_per_host,
    )
    configured = planner.config.distributed.strategy
    if world_size == 1 and configured not in ("auto", "ddp"):
        print(
            f"note: distributed.strategy is {configured}, and this plans one process. Add --world-size N.",
            file=sys.stderr,
        )
    values, text, fits = _answer(planner, sweep=sweep, solve=solve)
    print(json.dumps(values, indent=2) if as_json else "\n".join(text))
    if picture is not None:
        with writing(picture, "--picture"):
            imported("frugal.planning.picture", "draw")(planner, picture)
    if not fits:
        raise typer.Exit(1)


def _refuse(world_size: int, strategy: str, shard_base: str, offload: bool, gpus_per_host: int | None) -> None:
    """Raise ConfigError for options without effect, or that exclude each other: `frugal train` refuses them too."""
    given = {
        f"--strategy {strategy}": strategy not in ("auto", "ddp"),
        f"--shard-base {shard_base}": shard_base != "auto",
        "--offload": offload,
        f"--gpus-per-host {gpus_per_host}": gpus_per_host is not None,
    }
    shared = [option for option, is_given in given.items() if is_given]
    if shared and world_size == 1:
        raise ConfigError(
            f"{' '.join(shared)}: for a run that several GPUs share, and --world-size is 1. Add --world-size 2 (or "
            f"more), or leave {'it' if len(shared) == 1 else 'them'} out."
        )
    if shard_base == "true" and strategy in ("ddp", "zero1", "zero2"):
        raise ConfigError(f"--shard-base true: {strategy} keeps the base whole. Use --strategy fsdp2 or zero3.")
    if shard_base == "false" and strategy == "zero3":
        raise ConfigError("--shard-base false: zero3 cuts everything. Use --strategy zero2 or fsdp2.")
    if offload and strategy == "ddp":
        raise ConfigError("--offload: ddp keeps everything on its device. Use --strategy fsdp2, zero2 or zero3.")


def _answer(planner: Any, *, sweep: bool, solve: bool) -> tuple[Any, list[str], bool]:
    """The answer as plain values and as lines, and whether something fits."""
    show, sweeps = import_module("frugal.planning.show"), import_module("frugal.planning.sweep")
    if sweep:
        asked = planner.config.memory.checkpoint
        policy = ("disk" if planner.device.kind == "cpu" else "offload") if asked == "auto" else asked
        rows = sweeps.sweep(planner, policy)
        return [row.to_json() for row in rows], show.sweep_lines(rows, planner.config.model.base, policy), True
    if solve:
        measures = sweeps.solve(planner)
        return [measure.to_json() for measure in measures], show.measure_lines(measures), measures[-1].fits
    found = planner.plan()
    return found.to_json(), show.lines(found), found.fits


def as_comments(config: Config) -> list[str]:
    """The plan for the device found here, as lines of YAML comments; a base that cannot be had is said, no error."""
    try:
        imported("frugal.planning.source", "configuration_folder")(config.model.base, config.model.revision)
        # what `frugal train` forecasts too; `frugal plan` has the longest sequence and every phase
        found = imported("frugal.planning", "make_planner")(config).plan(
            with_line=False, simulated=("steady_step", "evaluation")
        )
        text: list[str] = imported("frugal.planning.show", "lines")(found)
    except FrugalError as error:
        text = [f"no plan: {error}"]
    return [f"# {line}".rstrip() for line in text]
