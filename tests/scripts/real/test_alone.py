"""scripts/real/alone.py: rows as the datasets on the hub have them."""

from __future__ import annotations

from scripts.real.alone import document


def test_rows_are_as_the_hub_has_them() -> None:
    row = {"query": "Question: Which is hot?", "choices": ["ice", "fire", "rain"], "gold": 1}
    found = document("arc_easy", row)
    assert found == {
        "question": "Which is hot?",
        "choices": {"text": ["ice", "fire", "rain"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    }
    row = {"query": "Question: dresser\n", "choices": ["a drawer", "a pin"], "gold": 0}
    assert document("piqa", row) == {"goal": "dresser", "sol1": "a drawer", "sol2": "a pin", "label": 0}
