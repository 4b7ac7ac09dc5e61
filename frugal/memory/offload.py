"""Where a checkpointed layer's input waits for backward: on the device, in host memory, or in a scratch file.

A store's ``put`` takes the tensor and returns a slot; the slot's ``get`` gives a tensor with the same bits, once. Slots
return their space when they are dropped, so that a forward without a backward leaks nothing.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch

from frugal.memory.scratch import ScratchFile
from frugal.memory.space import Regions, is_out_of_memory, refuse_when_host_is_full
from frugal.ops.simulated import is_fake


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


SLAB_BYTES = 64 << 20
"""Of pinned memory taken at once. A power of two: torch's allocator of pinned memory rounds up to one."""


class HostStore(Store):
    """Host memory. From CUDA: pinned, filled on a side stream while the next layer computes; in backward the layer
    before is fetched while this one computes, so two device buffers are live at a time.

    Pinned memory is taken in slabs and kept for the next step; inputs lie in it one after the other, across slabs, so
    the host holds what was stored and less than one slab more, whatever the sizes.

    For tensors that are on the CPU already this is a plain copy: it saves nothing there and exists so that the same
    path can be tested without a GPU (``slab_bytes``: in slabs there too).
    """

    def __init__(self, slab_bytes: int | None = None) -> None:
        self._slab_bytes = slab_bytes
        self._arenas: dict[bool, HostArena] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._latest: weakref.ref[HostSlot] | None = None
        self._latest_fake: weakref.ref[FakeSlot] | None = None

    def put(self, tensor: torch.Tensor) -> Slot:
        if is_fake(tensor) and tensor.device.type != "cpu":
            fake = FakeSlot(tensor, self._latest_fake)
            self._latest_fake = weakref.ref(fake)
            return fake
        on_cuda = tensor.device.type == "cuda"
        if not on_cuda and self._slab_bytes is None:
            return CopySlot(tensor)
        slot = HostSlot(self, self._arena(on_cuda), tensor, self._latest)
        self._latest = weakref.ref(slot)
        return slot

    def close(self) -> None:
        self._arenas.clear()

    @property
    def host_bytes(self) -> int:
        """Taken from the host in slabs."""
        return sum(arena.nbytes for arena in self._arenas.values())

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream for copies from and to ``device``."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _arena(self, pinned: bool) -> HostArena:
        if pinned not in self._arenas:
            self._arenas[pinned] = HostArena(self._slab_bytes or SLAB_BYTES, pinned)
        return self._arenas[pinned]


class HostArena:
    """Slabs of host memory, read as one long space."""

    def __init__(self, slab_bytes: int, pinned: bool) -> None:
        self.slab_bytes, self.pinned = slab_bytes, pinned
        self._slabs: list[torch.Tensor] = []
        self._regions = Regions()

    @property
    def nbytes(self) -> int:
        """Of all slabs."""
        return len(self._slabs) * self.slab_bytes

    def take(self, nbytes: int) -> int:
        """Offset of a region of ``nbytes``. Raises OutOfHostMemory when the host has no room for another slab."""
        offset = self._regions.take(nbytes)
        try:
            while self._regions.top > self.nbytes:
                self._slabs.append(self._slab())
        except BaseException:
            self._regions.give_back(offset, nbytes)
            raise
        return offset

    def _slab(self) -> torch.Tensor:
        refuse_when_host_is_full(self.slab_bytes)
        if self.pinned:
            try:
                return torch.empty(self.slab_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                # What may be pinned is often less than what there is (half of it under WSL). Copies from and to
                # ordinary memory are right too, since the driver copies through a buffer of its own; they are slower.
                self.pinned = False
                warnings.warn(
                    f"no more memory can be pinned ({error}): layer inputs go to ordinary host memory, which is slower",
                    stacklevel=2,
                )
        return torch.empty(self.slab_bytes, dtype=torch.uint8)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return a region."""
        self._regions.give_back(offset, nbytes)

    def pieces(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first byte, last byte + 1, those bytes) of a region, a piece in each slab that it lies in."""
        done = 0
        while done < nbytes:
            slab, start = divmod(offset + done, self.slab_bytes)
            size = min(nbytes - done, self.slab_bytes - start)
            yield done, done + size, self._slabs[slab][start : start + size]
            done += size


class CopySlot(Slot):
    """A copy of one tensor that is on the host already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.copy: torch.Tensor | None = tensor.detach().clone(memory_format=torch.contiguous_format)

    def get(self) -> torch.Tensor:
        copy, self.copy = self.copy, None
        if copy is None:
            raise RuntimeError(_USED_UP)
        return copy

    def release(self) -> None:
        self.copy = None


class HostSlot(Slot):
    """One tensor in an arena of host memory."""

    def __init__(
        self, store: HostStore, arena: HostArena, tensor: torch.Tensor, previous: weakref.ref[HostSlot] | None
    ) -> None:
        self.store, self.arena = store, arena
        self.device, self.dtype, self.shape = tensor.device, tensor.dtype, tensor.shape
        self.previous = previous
        self.nbytes = tensor.numel() * tensor.element_size()
        self.offset: int | None = None
        self.fetched: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        self.offset = arena.take(self.nbytes)
        source = tensor.detach().contiguous()
        if not self.on_cuda:
            self._copy(source, to_host=True)
            return
        side = store.stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._copy(source, to_host=True)
        source.record_stream(side)  # its memory may be reused only after the copy

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def _copy(self, tensor: torch.Tensor, *, to_host: bool) -> None:
        if self.offset is None:
            raise RuntimeError(_USED_UP)
        flat = tensor.view(-1).view(torch.uint8)
        for start, stop, piece in self.arena.pieces(self.offset, self.nbytes):
            here, there = (piece, flat[start:stop]) if to_host else (flat[start:stop], piece)
            here.copy_(there, non_blocking=self.on_cuda)

    def prefetch(self) -> None:
        """Start the copy back to the device."""
        if self.fetched is not None or self.offset is None or not self.on_cuda:
            return
        side = self.store.stream(self.device)
        with torch.cuda.device(self.device):
            self.fetched = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            # The buffer's memory may still be in use by work queued before; the copy also follows its own offload.
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                self._copy(self.fetched, to_host=False)
                self.arrived = torch.cuda.Event()
                self.arrived.record(side)

    def get(self) -> torch.Tensor:
        if not self.on_cuda:
            out = torch.empty(self.shape, dtype=self.dtype)
            self._copy(out, to_host=False)
            return out
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
        if self.offset is None:
            return
        if self.fetched is not None:  # fetched and never asked for: the side stream may still write to it
            self.fetched.record_stream(self.store.stream(self.device))
        # No wait: whoever takes the region next writes to it on the same side stream.
        self.arena.give_back(self.offset, self.nbytes)
        self.offset = self.fetched = None

    def __del__(self) -> None:
        self.release()


# ---- disk ------------------------------------------------------------------------------------------------------------


class DiskStore(Store):
    """A scratch file, written after each layer and read back in backward. What the operating system keeps of it in its
    page cache is memory it takes back when somebody needs it."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.file = ScratchFile(folder)

    def put(self, tensor: torch.Tensor) -> Slot:
        return FakeSlot(tensor) if is_fake(tensor) else DiskSlot(self.file, tensor)

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
