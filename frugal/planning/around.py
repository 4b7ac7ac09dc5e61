"""What lies around a plan's device: host memory and disk of a run, and what a rank sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frugal.checkpoints.rotation import STATE_BYTES, kept_at_once
from frugal.planning.host import Sizes, disk_bytes, host_bytes, host_phases, merge_bytes
from frugal.planning.network import UTILISATION, Network, gpu_flops, sent_bytes, step_flops
from frugal.planning.skeleton import layer_count

if TYPE_CHECKING:
    from frugal.planning.planner import Planner
    from frugal.planning.simulated_model import Policy


def host_of(planner: Planner, policy: Policy, tokens: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """(host memory of one rank by purpose, of all ranks of a machine by phase, disk by purpose), with micro-batches of
    ``tokens``."""
    sim = planner.simulation(policy)
    parts, (parameters, trained) = sim.parts(), sim.numbers()
    output, train = planner.config.output, planner.config.train
    saves = 2 if planner.optimizer_steps is None else -(-planner.optimizer_steps // (output.save_steps or 10**9))
    sizes = Sizes(
        kind=planner.device.kind,
        layers=layer_count(planner.architecture),
        hidden_size=int(planner.architecture.get_text_config().hidden_size),
        itemsize=planner.device.dtype.compute.itemsize,
        tokens=tokens,
        policy=policy,
        trained_bytes=4 * trained,
        checkpoint_bytes=int(trained * (4 + STATE_BYTES[train.optim])) + 1_000_000,
        kept_checkpoints=kept_at_once(output.save_total_limit, output.keep_best, max(saves, 1)),
        base_parameters=parameters,
        dataset_bytes=planner.dataset_bytes,
        embedding_bytes=sim.built(sim.counts[-1]).fake.host_embedding_bytes,
        shards_bytes=0 if sim.sharing is None else sim.sharing.host_bytes,
    )
    by_purpose = host_bytes(sizes, parts)
    return by_purpose, host_phases(by_purpose, merge_bytes(parts), planner.ranks_per_host), disk_bytes(sizes)


def network_of(planner: Planner, policy: Policy) -> Network | None:
    """Traffic of one of several ranks, and how long its step computes."""
    sharing = planner.sharing
    if sharing is None:
        return None
    text, (parameters, trained) = planner.architecture.get_text_config(), planner.simulation(policy).numbers()
    heads = int(text.num_attention_heads)
    flops = step_flops(
        parameters=parameters,
        embedding=text.vocab_size * text.hidden_size,
        trained=trained,
        layers=layer_count(planner.architecture),
        width=heads * (getattr(text, "head_dim", None) or text.hidden_size // heads),
        rows=planner.shape.rows,
        length=planner.shape.length,
        recompute=policy != "none",
    )
    rate = UTILISATION * gpu_flops(planner.device.name)
    hosts = -(-planner.world_size // planner.ranks_per_host)
    return Network(sent_bytes(sharing), flops * sharing.accumulation / rate, rate, planner.ranks_per_host, hosts)
