"""Keeps held-out rows out of training: the same content is never on both sides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from frugal.data.account import Account
from frugal.data.types import Example


def content_key(example: Example) -> bytes:
    """Digest of what a row says, wherever it comes from."""
    content = asdict(example)
    del content["source"], content["line"]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).digest()


def keep_apart(train: Sequence[Example], held_out: Sequence[Example], account: Account) -> list[Example]:
    """The training examples without those whose content is held out; counted in the account."""
    if not held_out:
        return list(train)
    keys = {content_key(example) for example in held_out}
    kept: list[Example] = []
    for example in train:
        if content_key(example) in keys:
            account.drop("the same row is held out", f"{example.source}:{example.line}")
        else:
            kept.append(example)
    return kept
