"""`surgeon.families` and docs/models.md, which is made of it."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest

import surgeon
from surgeon.checkpoint.imported import WRAPPERS
from surgeon.models.families import FAMILIES
from tests.selection import one_in

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
ADVICE = "the page is not what the code says: surgeon families --markdown > docs/models.md"


def lines_of(page: str, model_type: str) -> list[str]:
    """The row of a family's table, and its paragraph, with the reasons."""
    lines = page.splitlines()
    start = next(number for number, line in enumerate(lines) if f"(`{model_type}`): " in line)
    reasons = takewhile(lambda line: line.startswith("    - "), lines[start + 1 :])
    return [next(line for line in lines if f" | {model_type} | " in line), lines[start], *reasons]


def test_the_page_has_all_families_and_wrappers() -> None:
    page = PAGE.read_text()
    for model_type in FAMILIES:
        assert f"(`{model_type}`): " in page, ADVICE
    for wrapper in WRAPPERS:
        assert f"(`{wrapper}`)**: " in page, ADVICE
    assert page.count("\n| ") == len(FAMILIES) + 2, ADVICE


def test_a_row_says_what_does_not_work() -> None:
    found = surgeon.families(["gpt2", "gemma2"])
    gemma2, gpt2 = found.rows
    assert gpt2.cells() == ["GPT-2", "gpt2", "all", "all", "all", "fused", "itself", "plugin"]
    assert gpt2.summary.startswith("layer norms with shifts")
    assert gpt2.reasons == {}
    assert gemma2.cells()[2:] == [
        "all",
        "not tracks, desync",
        "not tracks:D, desync",
        "program",
        "plugin",
        "itself",
    ]
    assert any("norm of a sum" in why for why in gemma2.reasons)


def test_the_table_fits_a_terminal() -> None:
    """Also where names are the longest, not everything works, and layers differ."""
    longest = surgeon.families(["cohere2", "qwen3_5_moe_text", "deepseek_v2"])
    assert max(map(len, str(longest).splitlines())) <= 80
    assert "either" in str(longest)


@pytest.mark.parametrize("model_type", one_in(len(FAMILIES), FAMILIES))
def test_the_page_says_what_the_code_says(model_type: str) -> None:
    found = surgeon.families([model_type]).markdown()
    assert lines_of(found, model_type) == lines_of(PAGE.read_text(), model_type), ADVICE
