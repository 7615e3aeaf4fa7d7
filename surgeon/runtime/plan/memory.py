"""How much memory weights and cache will take on every rank, from the shapes in a checkpoint and before any is read."""

from __future__ import annotations

from dataclasses import dataclass

from surgeon.checkpoint.read import Checkpoint
from surgeon.families.base import Unit
from surgeon.memory import free_bytes, gpu_free_bytes, show_size
from surgeon.program import Program, Sublayer
from surgeon.runtime.batching.blocks import BLOCK_TOKENS, blocks_for
from surgeon.runtime.plan.placement import computed_of, rank_work
from surgeon.runtime.plan.specification import Plan
from surgeon.weights import ModelWeights, unit_bounds


@dataclass(frozen=True)
class Footprint:
    """Bytes by rank. Norms and biases are left out: they are a thousandth of it.

    Attributes:
        weights: matrices, embedding and head.
        block: one block of the cache.
    """

    weights: tuple[int, ...]
    block: tuple[int, ...]


def footprint(plan: Plan) -> Footprint:
    """What ranks will hold for a plan."""
    source = ModelWeights(Checkpoint(plan.folder), plan.family, plan.head_dim)
    program = Program.parse(plan.program)
    rows = -(-plan.vocabulary // plan.ranks) * (1 if plan.tied else 2)
    if plan.family.position_embedding:
        rows += source.shape(f"{plan.family.position_embedding}.weight")[0]
    weights, block = [], []
    for rank in range(plan.ranks):
        work = rank_work(program, rank, plan.ranks)
        numbers = sum(_numbers(source, one) for one in {part.sublayer for each in work for part in each.parts})
        weights.append((rows * plan.hidden + numbers) * plan.dtype_bytes)
        attentions = [(each, part) for each in work for part in each.parts if part.slot is not None]
        kv_heads = sum(_kv_heads(source, computed_of(plan, each, part)) for each, part in attentions)
        block.append(2 * kv_heads * plan.head_dim * BLOCK_TOKENS * plan.dtype_bytes)
    return Footprint(tuple(weights), tuple(block))


def _numbers(source: ModelWeights, sublayer: Sublayer) -> int:
    """What the matrices of a slice hold, or the factors in their place."""
    total = 0
    for projection in source.family.spec(sublayer.kind).projections:
        outputs, inputs = source.matrix(sublayer, projection.role).shape
        rank = sublayer.rank(projection.role)
        total += outputs * inputs if rank is None else rank * (outputs + inputs)
    return total


def _kv_heads(source: ModelWeights, sublayer: Sublayer) -> int:
    (k,) = (p for p in source.family.spec(sublayer.kind).projections if p.role == "k")
    return _size(source, sublayer, k.unit)


def _size(source: ModelWeights, sublayer: Sublayer, unit: Unit) -> int:
    """How many heads, KV heads or neurons a slice has."""
    first, end = unit_bounds(source.units(sublayer)[unit], sublayer.piece)
    return end - first


def choose_blocks(
    plan: Plan, device: str, max_batch: int, blocks: int | None, memory: int | None, local_ranks: int | None = None
) -> int:
    """How many blocks the cache is to have.

    Args:
        device: "cpu", where all ranks of a machine share its memory, or "cuda", where each has its own. Of several
            machines, this one is looked at, and the ranks of every other are taken to have as much.
        max_batch: where `blocks` is None, as many of the longest sequences have room if the memory does.
        memory: what weights and cache may take, on this machine together or on each GPU; most of what is free if None.
        local_ranks: how many of the ranks run on this machine; all if None.

    Raises:
        ValueError: if there is not enough memory for the weights and the blocks; it says what would fit.
    """
    sizes, here = footprint(plan), local_ranks or plan.ranks
    if device == "cpu":
        weights, block = (sum(sorted(each)[-here:]) for each in (sizes.weights, sizes.block))
        free = free_bytes()
    else:
        weights, block = max(sizes.weights), max(sizes.block)
        free = min(gpu_free_bytes(number) for number in range(here))
    allowed = free if memory is None else memory
    fitting = (allowed - weights) // block if block else 1 << 30  # a program without attention has no cache
    limit = f"{show_size(allowed)} {'are free' if memory is None else 'are allowed'}"
    place = "" if device == "cpu" else " on each GPU"
    if fitting < 1:
        raise ValueError(f"the weights take {show_size(weights)}{place} and {limit}; give more memory or another model")
    if blocks is None:
        return min(fitting, max_batch * blocks_for(plan.max_tokens))
    if blocks > fitting:
        raise ValueError(
            f"weights of {show_size(weights)} and {blocks} blocks of {show_size(block)} do not fit: {limit}{place}; "
            f"at most {fitting} blocks do ({fitting * BLOCK_TOKENS} tokens)"
        )
    return blocks
