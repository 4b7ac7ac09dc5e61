"""Writing a GGUF file tensor by tensor, and reading it back.

Memory: one block of rows, or one whole tensor where rows change place. Types are those that the `gguf` package makes;
llama.cpp's k-quants are made of an f16 file by llama.cpp's own program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

from frugal.errors import ConfigError, UnsupportedError
from frugal.exports.gguf_families import Names, to_halves, to_interleaved

Kind = gguf.GGMLQuantizationType
KINDS = {"f32": Kind.F32, "f16": Kind.F16, "bf16": Kind.BF16, "q8_0": Kind.Q8_0}
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
_MADE_BY_LLAMA_CPP = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q4_1", "q5_0", "q5_1", "iq", "tq", "mxfp4")


def check_type(name: str, allowed: Iterable[str] = KINDS) -> str:
    """``name`` in small letters.

    Raises:
        UnsupportedError: a type that llama.cpp makes; the message holds its commands.
        ConfigError: no type at all.
    """
    small = name.lower()
    if small in allowed:
        return small
    shown = ", ".join(allowed)
    if small in KINDS or not small.startswith(_MADE_BY_LLAMA_CPP):
        raise ConfigError(f"--type {name}: must be one of {shown}.")
    raise UnsupportedError(
        f"--type {name} is not made here ({shown} are). llama.cpp makes it of an f16 file:\n"
        "  frugal export RUN --to gguf --type f16 --out DIR\n"
        f"  llama-quantize DIR/model-f16.gguf DIR/model-{small}.gguf {small.upper()}"
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write: blocks of its rows are made when its turn comes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    """A `Kind`."""
    make: Callable[[], Iterable[torch.Tensor]]
    heads: int | None = None
    """Rows change place head by head (`Names.heads`)."""
    shift: float = 0.0

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return int(prod(self.shape) // block * size)


def kind_of(shape: tuple[int, ...], asked: str) -> int:
    """The type of one tensor: vectors stay float32, and rows that 8-bit blocks do not divide are float16."""
    if len(shape) < 2:
        return int(Kind.F32)
    kind = KINDS[asked]
    return int(Kind.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind)


def start(path: Path, arch: gguf.MODEL_ARCH, kind: str, general_type: str) -> gguf.GGUFWriter:
    """A writer with the general keys."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type(general_type)
    writer.add_file_type(int(_FILE_TYPES[kind]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return writer


def finish(writer: gguf.GGUFWriter, entries: list[Entry]) -> int:
    """Write header and tensors and flush them to the disk. Returns the size of the file."""
    for entry in entries:
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.n_bytes, raw_dtype=Kind(entry.kind))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        handle = writer.fout[0]
        for entry in entries:
            writer.write_padding(handle, handle.tell())
            written = sum(handle.write(block) for block in _encoded(entry))
            if written != entry.n_bytes:
                raise ValueError(
                    f"{entry.name}: {written} bytes made where its shape {entry.shape} needs {entry.n_bytes}"
                )
        writer.write_padding(handle, handle.tell())
        handle.flush()
        os.fsync(handle.fileno())
        return int(handle.tell())
    finally:
        writer.close()


def _encoded(entry: Entry) -> Iterator[bytes]:
    blocks = entry.make()
    if entry.heads is not None:
        blocks = [to_interleaved(torch.cat(list(blocks)), entry.heads)]
    for block in blocks:
        yield encode(block.float() + entry.shift if entry.shift else block.float(), entry.kind, entry.name)


def encode(values: torch.Tensor, kind: int, name: str = "a tensor") -> bytes:
    """Float32 rows as the file holds them.

    Raises:
        UnsupportedError: values that float16 cannot hold.
    """
    if not bool(torch.isfinite(values).all()):
        raise UnsupportedError(f"{name} has values that are no numbers; the merged model is broken.")
    if kind == Kind.BF16:
        return values.bfloat16().contiguous().view(torch.uint8).numpy().tobytes()
    if kind == Kind.F16 and float(values.abs().max()) > torch.finfo(torch.float16).max:
        raise UnsupportedError(f"{name} has values that float16 cannot hold. Use --type bf16.")
    return bytes(quantize(values.contiguous().numpy(), Kind(kind)).tobytes())


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Names and float32 values of a file's tensors."""
    reader = gguf.GGUFReader(path)
    return {
        tensor.name: torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        for tensor in reader.tensors
    }


def fill(model: torch.nn.Module, path: Path, names: Names) -> None:
    """Put a file's tensors into transformers' model, turned back.

    Raises:
        UnsupportedError: a parameter has no tensor, or one of another shape.
    """
    found, used = read_tensors(path), set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = names(name)
            if key not in found:
                raise UnsupportedError(f"{path.name} holds no {key}, which {name} needs.")
            values, heads = found[key] - names.shift(name), names.heads(name)
            parameter.copy_(values if heads is None else to_halves(values, heads))
            used.add(key)
    if left := sorted(set(found) - used - {"rope_freqs.weight"}):
        raise UnsupportedError(f"{path.name} holds tensors that the model has no place for: {', '.join(left[:8])}.")
