"""The section on training from scratch: what a run came to, and several runs side by side."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.findings.read_page import page_of, render
from tests.findings.run_folders import everything, make_from_scratch, state


def test_one_run(tmp_path: Path) -> None:
    page = page_of(make_from_scratch(tmp_path / "dense.run"))
    text = page.text()
    assert "models from scratch on demo:train" in text
    assert (
        "A model of 1,234,567 parameters (llama) with random weights was trained for 40 steps on 40,960 tokens of "
        "demo:train in 1:00. Before and after, 4,000 held-out tokens were predicted (demo)." in text
    )
    assert re.search(r"untrained ?7\.000 ?1,097 ?987\.0 to ", text)
    assert re.search(r"trained ?3\.000 ?20\.09 ?18\.08 to 22\.09", text)
    assert "from a perplexity of 1,097 to 20.09 on held-out text." in text
    assert "Step 0 is the model with random weights" in text
    assert "edited" not in text
    assert "No scan" not in text, "nothing of surgery is missed"
    assert "model_type: llama" in text
    assert "side by side" not in text


def test_racks(tmp_path: Path) -> None:
    stages = {"before": state(1000.0, None), "after": state(math.exp(4), None)}
    racks = {"coda": 2, "each": [{"layers": "0:4"} | stages, {"layers": "4:8"} | stages]}
    text = page_of(make_from_scratch(tmp_path / "racks.run", racks=racks)).text()
    assert re.search(r"layers 0:4 ?4\.000 ?1,000 ?54\.60 ?49\.14 to 60\.06", text)
    assert "Each by its own coda of 2 layers" in text
    own = make_from_scratch(tmp_path / "rack-0", identity={"task": "train", "rack": 0})
    with pytest.raises(ValueError, match="holds no run of a surgeon command"):
        render([own])


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = [
        make_from_scratch(tmp_path / "dense.run", 1, 3.1),
        make_from_scratch(tmp_path / "ladder.run", 0, 3.2, ">A0 >F0"),
    ]
    page = page_of(*runs)
    table = page.text().partition("Side by side")[2]
    assert "loss minus dense.run's" in table
    assert re.search(r"dense\.run ?A0 F0 ?1,234,567 ?40,960 ?1 ?3\.100 ?22\.20", table)
    assert re.search(r"ladder\.run ?>A0 >F0 ?1,234,567 ?40,960 ?0 ?3\.200 ?24\.53 ?\+0\.100", table)
    chart = re.search(
        r'aria-label="Perplexity on held-out text, side by side".*?</svg>', page.html, re.DOTALL
    )
    assert chart is not None
    assert f"dense.run, step 40: perplexity {math.exp(3.1):.2f}" in chart[0]


def test_other_texts_are_not_compared(tmp_path: Path) -> None:
    runs = [
        make_from_scratch(tmp_path / name, program=name, held_out_hash=name) for name in ("A0", "F0")
    ]
    assert "measured on different texts, and cannot be compared" in page_of(*runs).text()


def test_a_checkpoint_from_scratch_stands_with_its_run(tmp_path: Path) -> None:
    exported = next(path for path in everything(tmp_path) if path.name == "fused")
    report = json.loads((exported / "surgeon.json").read_text())
    trained = {
        "method": "all weights",
        "steps": 40,
        "tokens": 40960,
        "data": "demo:train",
        "data_hash": "d",
    }
    (exported / "surgeon.json").write_text(
        json.dumps(report | {"source": {"model": None, "num_layers": 6}, "trained": trained})
    )
    page = page_of(make_from_scratch(tmp_path / "dense.run"), exported)
    assert page.html.count('class="chapter"') == 1
    assert "40 steps on 40,960 tokens of demo:train, all weights" in page.text()
    assert "trained after the edit" not in page.text()


def test_a_run_that_has_not_ended(tmp_path: Path) -> None:
    folder = make_from_scratch(tmp_path / "dense.run")
    (folder / "run.json").write_text(json.dumps({"identity": {"task": "train"}}))
    with pytest.raises(
        ValueError, match=r"run.json is of a run that has not ended; give the same surgeon train"
    ):
        render([folder])
