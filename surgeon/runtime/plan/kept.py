"""What a rank keeps of a token in its cache: keys and values, or what the first factors of k and v give."""

from __future__ import annotations

from surgeon.language.program import ATTENTION, Program, Sublayer
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.plan.specification import Plan


def can_be_low_rank(program: Program) -> bool:
    """Whether there is an attention whose k and v are two factors each."""
    return any(_factor_ranks(sublayer) is not None for sublayer in program.sublayers())


def require_low_rank(*programs: Program) -> None:
    """Refuse programs that cannot be run with `Plan.kv` "lowrank", if none of them can.

    Raises:
        ValueError: if no attention has factors of k and v.
    """
    if not any(map(can_be_low_rank, programs)):
        raise ValueError(
            "kv lowrank keeps what the first factors of k and v give, and no attention here has factors of both, as in "
            "A0@k16,v16; use kv full or auto"
        )


def kept_ranks(plan: Plan, attention: Sublayer, kv_heads: int) -> tuple[int, int] | None:
    """The ranks of k and v where an attention keeps what their first factors give; None for keys and values.

    Args:
        attention: what the rank computes of it.
        kv_heads: how many of them that has.
    """
    ranks = _factor_ranks(attention)
    if ranks is None or plan.kv == "full":
        return None
    saves = plan.tight and sum(ranks) < 2 * kv_heads * plan.head_dim
    return ranks if plan.kv == "lowrank" or saves else None


def kept_numbers(plan: Plan, attention: Sublayer, kv_heads: int) -> int:
    """How many numbers a rank keeps of each token of an attention."""
    ranks = kept_ranks(plan, attention, kv_heads)
    return 2 * kv_heads * plan.head_dim if ranks is None else sum(ranks)


def _factor_ranks(sublayer: Sublayer) -> tuple[int, int] | None:
    k, v = sublayer.rank("k"), sublayer.rank("v")
    return None if sublayer.kind != ATTENTION or k is None or v is None else (k, v)


def is_static(plan: Plan, device: str) -> bool:
    """Whether passes that add one token to each text have fixed shapes on such a device, "cpu" or "cuda".

    Where tokens are drafted they do not: how many a pass verifies changes.
    """
    return plan.decoding in ("static", "captured") or (plan.decoding == "auto" and device == "cuda" and not plan.coda)


def power_of_two(least: int) -> int:
    """The smallest that is not below a positive number."""
    return 1 << (least - 1).bit_length()


def read_at_once(plan: Plan, static: bool, texts: int) -> tuple[int, int]:
    """How many texts an attention reads at a time, and at most how many blocks of each.

    Args:
        static: whether passes have fixed shapes; then they read all texts at once, and both numbers are powers of two.
        texts: that are computed together.
    """
    blocks = blocks_for(plan.max_tokens)
    return (power_of_two(texts), power_of_two(blocks)) if static else (1, blocks)
