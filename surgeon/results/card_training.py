"""What a model card says of a model's training, after surgery or from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surgeon.checkpoint.training import STAGES
from surgeon.results.card_text import paragraph, table
from surgeon.results.measured import DIVERGENCE, PERPLEXITY
from surgeon.words import plural

METRICS = {PERPLEXITY: PERPLEXITY, DIVERGENCE: "divergence from the original, nats per token"}
COLUMNS = {
    "healed": "{name}",
    "trained": "{name}",
    "edited": "before training",
    "untrained": "with random weights",
    "original": "unedited",
}


def trained_how(training: dict[str, Any] | None, from_scratch: bool = False) -> str:
    """The end of the card's first sentence.

    Args:
        from_scratch: the first of the trainings began with random weights.
    """
    if training is None:
        return "without further training"
    said = [_how(training)]
    while "earlier" in training:
        training = training["earlier"]
        said.insert(0, _how(training))
    parts = [f"trained from scratch: {said.pop(0)}"] if from_scratch else []
    parts += [f"then trained further (healed): {'; then again: '.join(said)}"] if said else []
    return "; ".join(parts)


def _how(training: dict[str, Any]) -> str:
    tokens = f"{plural(training['tokens'], 'token')} of {training['data']}"
    return f"{plural(training['steps'], 'step')}, {tokens} (SHA-256 `{training['data_hash']}`), {training['method']}"


def training_section(training: dict[str, Any] | None, name: str) -> Iterator[str]:
    """Quality before and after, on text that was held out; nothing where none was measured."""
    found = {stage: training[stage] for stage in STAGES if training is not None and training.get(stage) is not None}
    if training is None or not found:
        return
    yield "## What training changed\n"
    columns = [stage for stage in COLUMNS if stage in found]
    rows = [[label, *(_shown(found[stage], metric) for stage in columns)] for metric, label in METRICS.items()]
    yield table(["", *(COLUMNS[stage].format(name=name) for stage in columns)], [row for row in rows if any(row[1:])])
    tokens = next(iter(found.values()))["tokens"]
    held_out, its_hash = training.get("held_out"), training.get("held_out_hash")
    of = f" of {held_out}" if isinstance(held_out, str) else ""
    known = f" (SHA-256 `{its_hash}`)" if isinstance(its_hash, str) else ""
    yield paragraph(
        f"On {tokens:,} tokens{of}{known} that were not trained on; in brackets the 95% interval over windows of the "
        "text."
    )


def _shown(quality: dict[str, Any], metric: str) -> str:
    """A number with its interval; nothing where there is none."""
    value, ends = quality.get(metric), quality.get(f"{metric}_interval")
    if value is None:
        return ""
    return f"{value:.4g}" + ("" if ends is None or None in ends else f" ({ends[0]:.3g} to {ends[1]:.3g})")
