"""`frugal plan`: what a run will need, before anything is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from frugal.cli_parts import Overrides, imported, writing
from frugal.errors import ConfigError


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
    sweep: Annotated[bool, typer.Option("--sweep", help="Longest row for GPUs of 8 to 80 GB.")] = False,
    solve: Annotated[bool, typer.Option("--solve", help="The cheapest settings that fit.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg|FILE.html", help="Draw device memory by what it is against the length."),
    ] = None,
) -> None:
    """Say what a run will need in memory, and whether it fits, before anything is downloaded."""
    if picture is not None and picture.suffix.lower() not in (".svg", ".html"):
        raise ConfigError(f"--picture {picture}: pictures are written as .svg or .html. Name the file so.")
    planner = imported("frugal.plan", "make_planner")(
        source,
        overrides or (),
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
    fits: bool = imported("frugal.plan.command", "run")(planner, as_json=as_json, sweep=sweep, solve=solve)
    if picture is not None:
        with writing(picture, "--picture"):
            imported("frugal.plan.picture", "draw")(planner, picture)
    if not fits:
        raise typer.Exit(1)
