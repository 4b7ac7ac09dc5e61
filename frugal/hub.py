"""The model hub: whether it answers, and what it calls a folder of this machine. Imports no torch: wrong names are told
before it."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from pathlib import Path

from huggingface_hub import constants

from frugal.assets import CATALOGUE
from frugal.files import read_json


def reachable() -> bool:
    """Whether the hub answers. Asked once: a download would try six times for half a minute, printing each failure."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=10).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:  # a certificate that only the hub library accepts: let it try
        return not isinstance(error.reason, socket.gaierror | ConnectionError | TimeoutError)
    except TimeoutError:
        return False
    return True


def public_base(name: str) -> str:
    """The name by which others can load a base: the hub id of a folder in the hub's cache or of `frugal fetch`.

    Other folders, which exist on this machine alone, and hub ids stay as they are.
    """
    folder = Path(name).expanduser()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    source = folder / "source.json"
    if folder.is_absolute() and source.is_file():
        content = read_json(source)
        entry = CATALOGUE.get(str(content.get("name"))) if isinstance(content, dict) else None
        if entry is not None and entry.hub_id:
            return entry.hub_id
    entry = CATALOGUE.get(name)
    return entry.hub_id if entry is not None and entry.hub_id else name


def fetched_as(hub_id: str) -> str | None:
    """The name of `frugal fetch` whose original ``hub_id`` is."""
    return next((name for name, entry in CATALOGUE.items() if entry.hub_id == hub_id), None)
