"""What the host knows of a device tensor's values, so that nothing waits for the device to read them back.

A read drains the device's queue: the host, which should be queueing the next layers, waits for all that is queued. A
micro-batch is made on the host, so what it is asked for later (offsets of documents, ids of an embedding table that
waits on the host) is there already; it only has to be found by the tensor that was made of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_KNOWN = WeakTensorKeyDictionary()


def remember(moved: Tensor, host: Tensor) -> Tensor:
    """Note that ``moved`` holds the values of ``host``, a tensor on the host that nobody changes; returns ``moved``."""
    if moved is not host:  # else the table would hold its own key
        _KNOWN[moved] = (moved._version, host)
    return moved


def known(tensor: Tensor) -> Tensor | None:
    """The values of ``tensor`` on the host, where they were remembered and the tensor has not been changed since."""
    found = _KNOWN.get(tensor)
    if found is None or found[0] != tensor._version:
        return None
    host: Tensor = found[1]
    return host


def on_host(tensor: Tensor) -> Tensor:
    """The values of ``tensor`` on the host: as remembered, else a copy, for which the device is waited for."""
    host = known(tensor)
    return tensor.cpu() if host is None else host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on ``device``, where the host goes on knowing it.

    To a GPU through pinned memory: from elsewhere a copy waits for what is queued before it.
    """
    if device.type != "cuda":
        return remember(host.to(device), host)
    return remember(host.pin_memory().to(device, non_blocking=True), host)
