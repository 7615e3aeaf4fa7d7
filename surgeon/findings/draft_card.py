"""The card of a healed draft: what it is, how often its tokens are accepted, and how it is used."""

from __future__ import annotations

import textwrap
from typing import Any

from surgeon.findings.card_sections import quality_cell
from surgeon.opened import EditedModel

WIDTH = 100
_ROWS = {
    "greedy_acceptance": "accepted, greedy",
    "sampled_acceptance": "accepted, drawn at temperature 1",
    "divergence": "divergence, nats per token",
    "perplexity": "perplexity",
}


def draft_card(edited: EditedModel, trained: dict[str, Any]) -> str:
    """README.md of a healed draft.

    Args:
        edited: what was healed.
        trained: the record of its training, with qualities as JSON values under "edited" and "healed".
    """
    model = edited.model.public_name
    before, after = trained["edited"], trained["healed"]
    rows = [
        f"| {label} | {quality_cell(before, metric)} | {quality_cell(after, metric)} |"
        for metric, label in _ROWS.items()
    ]
    how = (
        f"It was trained for {trained['steps']:,} steps on {trained['tokens']:,} tokens of {trained['data']} "
        f"({trained['method']}). The table is of {trained['healed']['tokens']:,} tokens of held-out text, one token "
        "ahead of the text's own, with 95% intervals. Training and measuring, it read the keys and values that the "
        "model has of earlier tokens, as it does when it drafts."
    )
    what = (
        f"This is no model: it is what a program over the weights of `{model}` (SHA-256 `{edited.model.hash}`) changes "
        "of them to draft tokens, which that model then verifies, so that the text is the model's own."
    )
    parts = [
        f"# A draft for {model}",
        textwrap.fill(what, WIDTH),
        f"```\n{edited.program}\n```",
        f"```\nsurgeon generate {model} --draft DIR --prompt ...\nsurgeon serve {model} --draft DIR\n```",
        textwrap.fill(how, WIDTH),
        "\n".join(["| | before | after |", "|:--|--:|--:|", *rows]),
    ]
    return "\n\n".join(parts) + "\n"
