"""The load phase: what is there already, what the tensor being read takes beside its place, and the proofs after it.

Reading is arithmetic. The proofs (attention on two short rows, a replaced MLP on five tokens) are run like a step, on
tensors without memory. `tests/memory/test_plan_load.py` holds the result against measured loads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from frugal.memory.meter import LiveBytesMeter
from frugal.memory.meter_report import TEMPORARIES
from frugal.model_structure import decoder_layers
from frugal.models.equivalence import PROBE_ROWS, PROBE_TOKENS, PROOF_TOKENS
from frugal.ops.planned import planning_for
from frugal.planning.allocation_sites import Peak
from frugal.planning.sharding import Sharing
from frugal.planning.simulate import MemorySimulator
from frugal.planning.simulated_model import SimulatedModel


def load_peak(sim: MemorySimulator) -> Peak:
    """Peak on one rank's device.

    The tensor that takes most beside its place is, at worst, the last. A base that is cut arrives layer by layer: of
    earlier ones a rank has its part, embedding and head are whole until the last layer is there.
    """
    adapted = sim.base_at_rest()
    bare = adapted - 4 * sim.numbers()[1]
    if sim.sharing is not None and sim.sharing.shard_base:
        bare = adapted = _cut(sim.sharing)
    reading = max(0, max((part.read_bytes + part.scratch_bytes - part.kept_bytes for part in sim.parts()), default=0))
    of_attention, of_mlp = proofs(sim)
    extra = max(bare + max(reading, of_attention), adapted + of_mlp) - adapted
    return Peak(adapted + extra, {"at rest": adapted, TEMPORARIES: extra}, "", "loading")


def _cut(sharing: Sharing) -> int:
    units = sharing.units
    others = round((units.layers - 1) * units.layer * sharing.base_part)
    return others + units.layer + units.embedding + units.head + units.root + units.buffers


def proofs(sim: MemorySimulator) -> tuple[int, int]:
    """Bytes that exist while attention is proven, before adapters are there, and while an MLP's replacement is."""
    stock = sim.stock().built(sim.counts[0])
    rows, length = PROBE_ROWS, PROBE_TOKENS
    vocab = stock.fake.base.config.get_text_config().vocab_size

    def forward() -> None:
        ids = torch.zeros(rows, length, dtype=torch.int64, device=stock.kind)
        position = torch.arange(length, device=stock.kind).expand(rows, length)
        mask = torch.ones_like(ids)
        wanted = torch.empty(rows * length, vocab, device=stock.kind)  # the stock model's logits
        with torch.no_grad():
            logits = stock.fake.base(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False).logits
            (logits.float().flatten(0, 1) - wanted).abs()

    of_attention = _transient(stock, forward)
    if not sim.memory.fused:
        return of_attention, 0
    fused = sim.built(sim.counts[0])
    return of_attention, max(_transient(built, lambda b=built: _run_mlp(b)) for built in (stock, fused))  # type: ignore[misc]


def _run_mlp(built: SimulatedModel) -> None:
    layer: Any = next(iter(decoder_layers(built.module).values()))
    mlp = getattr(layer, "mlp", None)
    if mlp is None:
        return
    width = built.fake.base.config.get_text_config().hidden_size
    x = torch.zeros(1, PROOF_TOKENS, width, dtype=built.subject.compute, device=built.kind).requires_grad_()
    y = mlp(x)
    trained = [p for p in mlp.parameters() if p.requires_grad]
    torch.autograd.grad(y, [x, *trained], torch.zeros_like(y), allow_unused=True)


def _transient(built: SimulatedModel, action: Callable[[], None]) -> int:
    with planning_for(built.subject.device), built.mode:
        built.module.eval()
        meter = LiveBytesMeter(built.module, detail=True)
        with meter:
            action()
    return meter.peak_bytes - meter.report().start_bytes
