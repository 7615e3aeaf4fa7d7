"""What sending activations as integers does to predictions, as a table for a terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping

from surgeon.benchmarks.compression_cost import CompressionCost
from surgeon.reports.bench import aligned


def describe_compression(costs: Mapping[str, CompressionCost], text: str) -> str:
    """A table with a line for each program, at most 80 columns wide.

    Args:
        costs: by the program's name; at least one.
        text: what was predicted.
    """
    first = next(iter(costs.values()))
    lines = [["program", "divergence", "95% interval", "perplexity", "if exact", "bytes"]]
    lines.append(["", "nats/token", "", "", "", "of exact"])
    for name, cost in costs.items():
        exact, compressed = (f"{value:.4g}" for value in cost.perplexities)
        low, high = cost.divergence_interval
        between = "-" if math.isinf(high) else f"{max(0.0, low):.3g} to {high:.3g}"
        sent = f"{cost.compressed_bytes / cost.exact_bytes:.0%}" if cost.exact_bytes else "-"
        lines.append([name, f"{cost.divergence:.3g}", between, compressed, exact, sent])
    heading = f"What {first.kind} changes in predictions of {first.predicted} tokens ({text})"
    return f"{heading}\n{aligned(lines)}"


def compression_record(costs: Mapping[str, CompressionCost], text: str) -> list[dict[str, object]]:
    """The same as JSON holds it: divergences in nats per token (None where there is no interval), bytes of a rank."""
    return [
        {
            "program": name,
            "compression": cost.kind,
            "text": text,
            "predicted": cost.predicted,
            "divergence": _finite(cost.divergence),
            **dict(zip(("divergence_low", "divergence_high"), map(_finite, cost.divergence_interval), strict=True)),
            **dict(zip(("exact_perplexity", "perplexity"), map(_finite, cost.perplexities), strict=True)),
            "exact_bytes": cost.exact_bytes,
            "bytes": cost.compressed_bytes,
        }
        for name, cost in costs.items()
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
