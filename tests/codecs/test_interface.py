"""Every codec behind one interface: bytes, experts, rows into a buffer, shards, and the base of a merge."""

from __future__ import annotations

import pytest
import torch

from frugal.codecs import CODECS, Codec, EncodedWeight, NF4Codec, NF4Linear, encoded_parts, quantize_nf4

KINDS = [("nf4", True), ("nf4", False), ("none", True)]
SHAPES = [(192, 128), (5, 96, 64), (3, 64, 192), (2, 5, 7)]


def codec_of(kind: tuple[str, bool]) -> Codec:
    return CODECS[kind[0]](torch.float32, kind[1])


def same_bytes(one: EncodedWeight, other: EncodedWeight) -> bool:
    ours, theirs = one.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_known_before(kind: tuple[str, bool], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codec = codec_of(kind)
    encoded = codec.encode(torch.randn(shape).to(dtype))
    assert encoded.shape == shape
    assert encoded.nbytes == codec.nbytes(shape, dtype)
    assert encoded.codec == codec.name == kind[0]


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(5, 96, 64), (3, 24, 192), (2, 5, 7)])
def test_an_expert_has_the_bits_of_a_matrix_of_its_own(shape: tuple[int, ...], double: bool) -> None:
    weight = torch.randn(shape, dtype=torch.bfloat16) * torch.arange(1, shape[0] + 1)[:, None, None]
    stacked = NF4Codec(double).encode(weight)
    for index in range(shape[0]):
        alone = quantize_nf4(weight[index], double)
        assert same_bytes(stacked.expert(index), alone)
        rows = stacked.expert(index).dequantize_rows(1, 4, torch.float32)
        assert torch.equal(rows, alone.dequantize_rows(1, 4, torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [64, 96])
def test_rows_into_a_buffer(kind: tuple[str, bool], dtype: torch.dtype, columns: int) -> None:
    encoded = codec_of(kind).encode(torch.randn(40, columns))
    for start, stop in ((0, 40), (3, 17), (39, 40)):
        buffer = torch.full((stop - start, columns), torch.nan, dtype=dtype)
        assert encoded.dequantize_rows(start, stop, dtype, buffer) is buffer
        assert torch.equal(buffer, encoded.dequantize_rows(start, stop, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_gathered_shards_have_the_same_bytes(kind: tuple[str, bool], shape: tuple[int, ...], world: int) -> None:
    codec = codec_of(kind)
    encoded = codec.encode(torch.randn(shape))
    shards = [encoded.shard(rank, world) for rank in range(world)]
    assert same_bytes(codec.gather(shards, shape), encoded)
    first = next(iter(encoded.tensors()))
    assert shards[0][first].shape[0] == -(shape[0] // -world)


def test_what_cannot_be_done_is_refused() -> None:
    stacked = NF4Codec().encode(torch.randn(2, 4, 64))
    with pytest.raises(ValueError, match="take an expert first"):
        stacked.dequantize_rows(0, 2, torch.float32)
    with pytest.raises(ValueError, match="has no experts"):
        stacked.expert(0).expert(0)
    with pytest.raises(ValueError, match="no whole blocks"):
        quantize_nf4(torch.randn(4, 96)).shard(0, 2)


def test_a_merge_starts_from_what_was_trained_over() -> None:
    weight = torch.randn(8, 64, dtype=torch.bfloat16)
    nf4 = codec_of(("nf4", True)).merge_source(weight)
    assert torch.equal(
        nf4.dequantize_rows(0, 8, torch.float32), quantize_nf4(weight).dequantize_rows(0, 8, torch.float32)
    )
    dense = codec_of(("none", True)).merge_source(weight)
    assert torch.equal(dense.dequantize_rows(0, 8, torch.float32), weight.float())


def test_a_module_names_what_it_stores() -> None:
    layer = NF4Linear(64, 8, bias=True)
    named = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    assert set(encoded_parts(layer)["weight"]) == named.keys() - {"bias"}
    assert encoded_parts(torch.nn.Linear(2, 2)) == {}
