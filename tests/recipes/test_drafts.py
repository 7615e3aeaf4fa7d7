"""recipes/drafts/: every program drafts for the model that it names, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.commands.opening import draft_program
from surgeon.language.program import Program
from surgeon.opened import open_model
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_draft

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "drafts"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_it_drafts(name: str) -> None:
    model = open_model("demo")
    draft = draft_program(model, FOLDER / f"{name}.yaml")
    assert draft is not None
    planned = with_draft(make_plan(model, 2, 256), model, draft).draft
    assert planned is not None
    assert (
        Program.parse(planned.plan.program).sync_points(2)
        == {"demo-left-out": 25, "demo-mixture": 4}[name]
    )
