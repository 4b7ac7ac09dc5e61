"""Where a checkpointed layer's input waits for backward: on the device, in host memory, or in a scratch file.

A store's ``put`` takes the tensor and returns a slot; the slot's ``get`` gives a tensor with the same bits, once. Slots
return their space when they are dropped, so that a forward without a backward leaks nothing.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor

from frugal.memory.pressure import refuse_when_host_is_full
from frugal.memory.scratch import ScratchFile


class Slot(ABC):
    """One stored tensor."""

    @abstractmethod
    def get(self) -> torch.Tensor:
        """The tensor, bit for bit, on the device it came from."""

    def release(self) -> None:  # noqa: B027  (a slot without space of its own has nothing to do)
        """Give the space back; ``get`` is no longer possible."""


class Store(ABC):
    """A place for layer inputs."""

    @abstractmethod
    def put(self, tensor: torch.Tensor) -> Slot:
        """Store a tensor's values."""

    @abstractmethod
    def close(self) -> None:
        """Give all space back."""


class FakeSlot(Slot):
    """Stands for a tensor that was moved away while planning: only its shape is kept.

    ``previous``: the slot that is fetched ahead when this one is, as `HostSlot` does on a GPU.
    """

    def __init__(self, tensor: torch.Tensor, previous: weakref.ref[FakeSlot] | None = None) -> None:
        self.like = (tensor.shape, tensor.dtype, tensor.device)
        self.previous = previous
        self.fetched: torch.Tensor | None = None

    def prefetch(self) -> None:
        """Allocate what the copy back will fill."""
        if self.fetched is None:
            shape, dtype, device = self.like
            self.fetched = torch.empty(shape, dtype=dtype, device=device)

    def get(self) -> torch.Tensor:
        self.prefetch()
        fetched, self.fetched = self.fetched, None
        before = self.previous() if self.previous is not None else None
        if before is not None:
            before.prefetch()
        assert fetched is not None
        return fetched


# ---- host ------------------------------------------------------------------------------------------------------------


class HostStore(Store):
    """Host memory. From CUDA: pinned buffers, filled on a side stream while the next layer computes; in backward the
    layer before is fetched while this one computes, so two device buffers are live at a time.

    For tensors that are on the CPU already this is a plain copy: it saves nothing there and exists so that the same
    path can be tested without a GPU.
    """

    def __init__(self) -> None:
        self._free: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._latest: weakref.ref[HostSlot] | None = None
        self._latest_fake: weakref.ref[FakeSlot] | None = None

    def put(self, tensor: torch.Tensor) -> Slot:
        if isinstance(tensor, FakeTensor) and tensor.device.type != "cpu":
            fake = FakeSlot(tensor, self._latest_fake)
            self._latest_fake = weakref.ref(fake)
            return fake
        slot = HostSlot(self, tensor, self._latest)
        self._latest = weakref.ref(slot)
        return slot

    def close(self) -> None:
        self._free = {True: [], False: []}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream for copies from and to ``device``."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def take(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """A host buffer of at least ``nbytes`` bytes: the smallest free one that is large enough, else a new one in
        place of the largest that is too small."""
        free = sorted(self._free[pinned], key=torch.Tensor.numel)
        fitting = [buffer for buffer in free if buffer.numel() >= nbytes]
        if fitting or free:
            chosen = fitting[0] if fitting else free[-1]
            self._free[pinned] = [buffer for buffer in free if buffer is not chosen]
            if fitting:
                return chosen
            del chosen
        refuse_when_host_is_full(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool."""
        self._free[buffer.is_pinned() if torch.cuda.is_available() else False].append(buffer)


class HostSlot(Slot):
    """One tensor in host memory."""

    def __init__(self, store: HostStore, tensor: torch.Tensor, previous: weakref.ref[HostSlot] | None) -> None:
        self.store, self.device, self.dtype, self.shape = store, tensor.device, tensor.dtype, tensor.shape
        self.previous = previous
        self.nbytes = tensor.numel() * tensor.element_size()
        self.buffer: torch.Tensor | None = store.take(self.nbytes, self.on_cuda)
        self.fetched: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        source = tensor.detach().contiguous()
        if not self.on_cuda:
            self._host().copy_(source)
            return
        side = store.stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._host().copy_(source, non_blocking=True)
        source.record_stream(side)  # its memory may be reused only after the copy

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def _host(self) -> torch.Tensor:
        if self.buffer is None:
            raise RuntimeError(_USED_UP)
        return self.buffer[: self.nbytes].view(self.dtype).view(self.shape)

    def prefetch(self) -> None:
        """Start the copy back to the device."""
        if self.fetched is not None or self.buffer is None or not self.on_cuda:
            return
        side = self.store.stream(self.device)
        with torch.cuda.device(self.device):
            self.fetched = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            # The buffer's memory may still be in use by work queued before; the copy also follows its own offload.
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                self.fetched.copy_(self._host(), non_blocking=True)
                self.arrived = torch.cuda.Event()
                self.arrived.record(side)

    def get(self) -> torch.Tensor:
        if not self.on_cuda:
            return self._host().clone()
        self.prefetch()
        fetched, arrived = self.fetched, self.arrived
        if fetched is None or arrived is None:
            raise RuntimeError(_USED_UP)
        torch.cuda.current_stream(self.device).wait_event(arrived)
        before = self.previous() if self.previous is not None else None
        if before is not None:
            before.prefetch()
        self.fetched = None
        return fetched

    def release(self) -> None:
        if self.buffer is None:
            return
        if self.fetched is not None:  # fetched and never asked for: the side stream may still write to it
            self.fetched.record_stream(self.store.stream(self.device))
        # No wait: whoever takes the buffer next writes to it on the same side stream.
        self.store.give_back(self.buffer)
        self.buffer = self.fetched = None

    def __del__(self) -> None:
        self.release()


# ---- disk ------------------------------------------------------------------------------------------------------------


class DiskStore(Store):
    """A scratch file, written after each layer and read back in backward. What the operating system keeps of it in its
    page cache is memory it takes back when somebody needs it."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.file = ScratchFile(folder)

    def put(self, tensor: torch.Tensor) -> Slot:
        return FakeSlot(tensor) if isinstance(tensor, FakeTensor) else DiskSlot(self.file, tensor)

    def close(self) -> None:
        self.file.close()


class DiskSlot(Slot):
    """One tensor in the scratch file."""

    def __init__(self, file: ScratchFile, tensor: torch.Tensor) -> None:
        self.file, self.device, self.dtype, self.shape = file, tensor.device, tensor.dtype, tensor.shape
        self.nbytes = tensor.numel() * tensor.element_size()
        self.offset: int | None = file.take(self.nbytes)
        file.write(self.offset, tensor.detach().contiguous().cpu())

    def get(self) -> torch.Tensor:
        if self.offset is None:
            raise RuntimeError(_USED_UP)
        out = torch.empty(self.shape, dtype=self.dtype)
        self.file.read(self.offset, out)
        return out.to(self.device)

    def release(self) -> None:
        if self.offset is not None:
            self.file.give_back(self.offset, self.nbytes)
            self.offset = None

    def __del__(self) -> None:
        self.release()


_USED_UP = (
    "backward ran a second time through a layer whose input was offloaded: it is read back once. "
    "Use memory.checkpoint: recompute to go through a graph twice."
)
