"""Where a base model comes from: a name that `frugal fetch` knows, a local folder, or a hub id. Reads no weights."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import errors as hub

from frugal.assets import CATALOGUE, fetch, is_known
from frugal.errors import ConfigError, ModelError, UnsupportedError
from frugal.files import inside, read_json
from frugal.hub import reachable
from frugal.models.quantised_base import refuse_quantised, refuse_said_quantised

if TYPE_CHECKING:
    from frugal.tensor_files import StoredTensor

# torch and transformers are imported where they are used: a wrong model.base is told before those seconds.

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

# What is taken from a hub: weights as safetensors, and text. Never pickles (*.bin, *.pt), never copies in subfolders.
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt"]
_HUB_IGNORE = ["original/*", "onnx/*", "gguf/*", "*/*.safetensors"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


@dataclass(frozen=True)
class ResolvedModel:
    """A base model on this machine: its folder holds config, tokenizer and safetensors."""

    name: str
    """As the user wrote it."""
    path: Path
    """Absolute folder."""
    kind: Literal["catalogue", "folder", "hub", "configuration"]
    """configuration: there is nothing but `configuration`, for a forecast."""
    revision: str | None
    """Commit of a hub model, version of a catalogue entry, None for a folder."""
    trust_remote_code: bool = False
    """Whether Python code of the folder may run. Only ever True when asked for in this run's configuration."""

    configuration: Any = None
    """A transformers configuration in place of the folder's."""

    @property
    def reference(self) -> str:
        """What an adapter names as its base: the hub id, else the folder."""
        return self.name if self.kind in ("hub", "configuration") else str(self.path)

    def config(self) -> Any:
        """The model's transformers configuration."""
        if self.configuration is not None:
            return self.configuration
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)


def resolve_base(base: str, revision: str | None = None, *, trust_remote_code: bool = False) -> ResolvedModel:
    """Find ``base`` and make sure its folder is complete; fetches or downloads it where needed.

    Raises:
        ModelError: it cannot be found, had or used; the message says what to do.
        UnsupportedError: its format or code is not accepted.
    """
    folder = check_name(base, revision)
    if is_known(base):
        return ResolvedModel(base, fetch(base), "catalogue", CATALOGUE[base].version)
    if folder.is_dir():
        _check_code(base, read_json(folder / "config.json"), trust_remote_code)
        return ResolvedModel(base, folder.resolve(), "folder", None, trust_remote_code)
    return _from_hub(base, revision, trust_remote_code)


def check_name(base: str, revision: str | None = None) -> Path:
    """What can be told of ``base`` without a network or a heavy import. Returns it as a folder, which need not exist.

    Raises as `resolve_base` does.
    """
    folder = Path(base).expanduser()
    if revision is not None and (is_known(base) or folder.exists()):
        raise ConfigError(f"model.revision is for hub ids; {base} is none. Remove it.")
    if is_known(base):
        if CATALOGUE[base].kind != "model":
            raise ConfigError(f"model.base: {base} is a data set. {_near(base).strip()}")
        return folder
    if folder.is_dir():
        check_folder(folder)
        refuse_quantised(base, folder, read_json(folder / "config.json"), weight_files(folder))
        return folder
    if folder.exists():
        raise ModelError(f"model.base is the file {base}; it must be a folder, a hub id, or a name that fetch knows.")
    if not may_be_hub_id(base):
        raise ModelError(f"model.base: there is no folder {base} (looked in {Path.cwd()}).{_near(base)}")
    if "/" not in base and difflib.get_close_matches(base.lower(), CATALOGUE, n=1, cutoff=0.8):
        raise ModelError(f"model.base: there is no folder {base!r} and no such name.{_near(base)}")
    return folder


def may_be_hub_id(base: str) -> bool:
    """Whether a hub could know the name; otherwise it is a path."""
    return _HUB_ID.fullmatch(base) is not None


def _near(base: str) -> str:
    close = difflib.get_close_matches(base.lower(), CATALOGUE, n=1)
    known = ", ".join(name for name, entry in CATALOGUE.items() if entry.kind == "model")
    return f" Did you mean {close[0]}?" if close else f" Names that `frugal fetch` knows: {known}."


def check_folder(folder: Path) -> None:
    """Make sure a local folder has config, tokenizer and all its safetensors.

    Raises:
        ModelError: something is missing; UnsupportedError: it holds another format.
    """
    names = {path.name for path in folder.iterdir()}
    if "adapter_config.json" in names and "config.json" not in names:
        raise ModelError(
            f"{folder} holds an adapter, not a base model. Put its base into model.base "
            "(`base_model_name_or_path` in adapter_config.json names it)."
        )
    weights = missing_weights(folder)
    if weights:
        _refuse_other_formats(folder, names)
        raise ModelError(f"{folder} is incomplete: missing {', '.join(weights)}.")
    missing = []
    if "config.json" not in names:
        missing.append("config.json")
    if not names.intersection(_TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if missing:
        raise ModelError(
            f"{folder} is incomplete: missing {' and '.join(missing)}. Copy it from where the model is from."
        )


def missing_weights(folder: Path) -> list[str]:
    """Weight files that the folder should have and has not."""
    if (folder / WEIGHTS).is_file():
        inside(folder, WEIGHTS, named_in="the folder")
        return []
    if not (folder / WEIGHTS_INDEX).is_file():
        return [f"{WEIGHTS} (or {WEIGHTS_INDEX})"]
    return sorted(path.name for path in _shards(folder) if not path.is_file())


def _shards(folder: Path) -> list[Path]:
    """The files that a folder's index names, in order. Raises ModelError for names that lead out of the folder."""
    index = inside(folder, WEIGHTS_INDEX, named_in="the folder")
    try:
        names = set(read_json(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is damaged: it has no weight_map of names. Download it again.") from error
    return sorted(inside(folder, name, named_in=str(index)) for name in names)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checked folder, in order."""
    if (folder / WEIGHTS_INDEX).is_file() and not (folder / WEIGHTS).is_file():
        return _shards(folder)
    return [folder / WEIGHTS]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model folder by name, from the headers alone, in the order of the files.

    Raises:
        ModelError: weights are missing or a file is damaged.
    """
    from frugal.tensor_files import read_headers

    if missing := missing_weights(folder):
        raise ModelError(f"{folder} is incomplete: missing {', '.join(missing)}.")
    return read_headers(weight_files(folder))


_PIECE = 64  # bytes
_PIECES = 4  # a tensor


def base_fingerprint(folder: Path) -> str:
    """SHA-256 over every tensor's name, type and shape and 256 bytes sampled from it; hex.

    Names a base's weights, to notice an adapter on another base (same shapes, other numbers). Takes milliseconds for
    any size, reads no whole tensor, and does not depend on how the weights are cut into files. Weights stored in
    another dtype have another fingerprint.
    """
    entries = stored_tensors(folder)
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        files = {entry.file for entry in entries.values()}
        handles = {path: stack.enter_context(open(path, "rb", buffering=0)) for path in files}
        for name in sorted(entries):
            entry = entries[name]
            digest.update(f"{name}\0{entry.dtype_name}\0{entry.shape}\0".encode())
            for piece in range(_PIECES):
                start = max(0, entry.n_bytes - _PIECE) * piece // (_PIECES - 1)
                handles[entry.file].seek(entry.begin + start)
                digest.update(handles[entry.file].read(min(_PIECE, entry.n_bytes)))
    return digest.hexdigest()


def _refuse_other_formats(folder: Path, names: set[str]) -> None:
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        raise UnsupportedError(
            f"{folder} holds GGUF weights ({ggufs[0]}). Convert them once: "
            f"`python -m frugal.models.from_gguf {folder / ggufs[0]} OUT_FOLDER`, then put OUT_FOLDER into model.base. "
            "Weights that were never quantised train better."
        )
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if pickles:
        raise UnsupportedError(
            f"{folder} holds weights as pickles ({pickles[0]}), which can run code when they are read; frugal never "
            "reads them. Use a safetensors version of the model, or convert it where you trust it: "
            "`AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)` in transformers."
        )


def _check_code(base: str, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse a model that needs its own Python code, unless asked for. One that transformers knows needs none."""
    if trust_remote_code or "auto_map" not in config:
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type", "")
    if model_type in CONFIG_MAPPING and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return  # transformers' own class is used; the folder's code is never looked at
    raise UnsupportedError(
        f"{base} brings its own Python code (auto_map in config.json) and transformers has no class for "
        f"{model_type or 'it'}. Running it means trusting its authors with this machine: read the code, then write "
        "`model.trust_remote_code: true`."
    )


def hub_configuration(base: str, revision: str | None) -> Path:
    """The config.json of a hub id, from the hub or its cache. Raises ModelError naming what is wrong."""
    with _hub_faults(base, revision):
        found = Path(
            huggingface_hub.hf_hub_download(base, "config.json", revision=revision, local_files_only=not reachable())
        )
    refuse_said_quantised(base, read_json(found))
    return found


def _from_hub(base: str, revision: str | None, trust_remote_code: bool) -> ResolvedModel:
    local = not reachable()
    with _hub_faults(base, revision):
        config = Path(huggingface_hub.hf_hub_download(base, "config.json", revision=revision, local_files_only=local))
        _check_code(base, read_json(config), trust_remote_code)
        patterns = [*_HUB_PATTERNS, "*.py"] if trust_remote_code else _HUB_PATTERNS
        path = Path(
            huggingface_hub.snapshot_download(
                base,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_HUB_IGNORE,
                local_files_only=local,
            )
        )
    missing = missing_weights(path)
    if missing:
        raise UnsupportedError(
            f"{base} has no safetensors weights on the hub ({', '.join(missing)} missing); pickles are never read. "
            "Look for a safetensors version or revision of it."
        )
    refuse_quantised(base, path, read_json(path / "config.json"), weight_files(path))
    return ResolvedModel(base, path, "hub", path.name, trust_remote_code)


@contextlib.contextmanager
def _hub_faults(base: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub library as one message each."""
    try:
        yield
    except hub.GatedRepoError as error:
        raise ModelError(
            f"{base} is gated: accept its licence on its hub page, then `hf auth login` (or set HF_TOKEN)."
        ) from error
    except hub.RevisionNotFoundError as error:
        raise ModelError(f"{base} has no revision {revision!r} on the hub: correct model.revision.") from error
    except hub.RepositoryNotFoundError as error:
        raise ModelError(
            f"model.base: {base!r} is no local folder and the hub has no model of this name (or it is private: "
            f"`hf auth login`).{_near(base)}"
        ) from error
    except hub.RemoteEntryNotFoundError as error:
        raise ModelError(f"{base} has no config.json on the hub: it is not a transformers model.") from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ModelError(
            f"model.base: {base!r} is no local folder, is not in the hub cache, and {reason}. Download it where there "
            f"is a network (`hf download {base}`), or give a local folder.{_near(base)}"
        ) from error
    except (hub.HfHubHTTPError, OSError) as error:
        raise ModelError(f"Cannot get {base} from the hub: {error}") from error
