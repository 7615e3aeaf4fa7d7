"""scripts/cost: what rows of papers are read as, how constants are put in, and that the quick way is the long one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.cost import papers
from scripts.cost.cases import Case, Run, read_cases
from scripts.cost.constants import CONSTANTS, Values, fit, fitted, speedup, starts
from scripts.cost.models import CONFIGS, program_of
from scripts.cost.predictor import (
    Predictor,
    deployment_of,
    hardware_of,
    layer_shapes_of,
    shapes_of,
)
from surgeon.cost.deployment import Workload
from surgeon.cost.predict import predict


def row(
    paper: str, table: str, what: str, value: float, unit: str, use: str = "check"
) -> dict[str, Any]:
    return {"paper": paper, "table": table, "what": what, "value": value, "unit": unit, "use": use}


TRACKS = "30b (48 layers, 64 heads, 8 KV heads, 8 tracks)"
ROWS = [
    row(
        "layer-parallelism",
        "1",
        "llama2-7b, 32 layers, effective depth 25, 2 x A100 SXM4 80GB",
        1.2,
        "times dense",
    ),
    row(
        "ladder-residual",
        "2",
        "70b, ladder p2p, batch 1, TP 8, H100, decode",
        20.0,
        "percent improvement",
        "fit",
    ),
    row(
        "ladder-residual",
        "2",
        "70b, upper no p2p, batch 1, TP 8, H100, tokens/s",
        50.0,
        "percent improvement",
    ),
    row("parallel-track", "10", f"{TRACKS}, vllm_tpot_ms, 1024/128, dense, 8 x H100", 8.0, "ms", "fit"),
    row("parallel-track", "10", f"{TRACKS}, vllm_tpot_ms, 1024/128, D4, 8 x H100", 5.0, "ms"),
    row("deinfer", "5", "llama3-70b layer at 40%, TP 2, NVLink, A800, base comm", 0.6, "ms"),
    row("deinfer", "5", "llama3-70b layer at 40%, TP 2, NVLink, A800, deinfer comm", 0.2, "ms"),
]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return read_cases(ROWS)


def test_rows_are_speeds_over_the_baseline_of_their_table(cases: list[Case]) -> None:
    assert [case.speedup for case in cases] == [
        1.2,
        1.25,
        1.5,
        None,
        pytest.approx(1.6),
        None,
        pytest.approx(3),
    ]
    assert cases[3].seconds == pytest.approx(0.008)
    assert cases[0].seconds is None


def test_rows_say_what_was_run(cases: list[Case]) -> None:
    lp, ladder, upper, dense, tracks, base, deinfer = (case.run for case in cases)
    assert (lp.model, lp.system, lp.ranks, lp.graphs) == ("llama2-7b", "lp:7:28", 2, False)
    assert (ladder.system, ladder.measure, ladder.link, ladder.ranks) == ("ladder", "token", None, 8)
    assert (upper.system, upper.measure, upper.link) == ("upper", "rate", "nvlink-off")
    assert (dense.system, tracks.system, tracks.stack, tracks.new) == ("dense", "tracks:4", "vllm", 128)
    assert (base.system, deinfer.system, deinfer.per_layers, deinfer.measure) == (
        "base",
        "deinfer",
        1,
        "exchange",
    )
    assert cases[6].baseline == base


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"table": "77"}, "no known table: 'layer-parallelism 77'"),
        ({"what": "llama2-7b, made up"}, "cannot read the row 'llama2-7b, made up'"),
    ],
)
def test_rows_that_are_not_known_are_refused(changed: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_cases([ROWS[0] | changed])


def test_a_row_whose_baseline_is_not_printed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the baseline of '30b .*D4.*' is not among the rows"):
        read_cases([ROWS[4]])


def test_the_rows_that_ship_are_all_read() -> None:
    document = json.loads(papers.TABLES.read_text(encoding="utf-8"))
    found = read_cases(document["rows"])
    training = {row["paper"] for row in document["rows"] if row["use"] == "training"}
    assert {case.paper for case in found} == set(document["papers"]) - training
    assert {case.use for case in found} == {"fit", "check"}
    assert len({(case.group, case.text) for case in found}) == len(found) == 246
    assert all(case.speedup is None or 0.9 < case.speedup < 25 for case in found)


@pytest.mark.parametrize("model", CONFIGS)
def test_models_have_as_many_parameters_as_their_names_say(model: str) -> None:
    shapes = shapes_of(model)
    mlp = shapes.neurons * (2 if model.startswith("opt") else 3)
    layer = shapes.hidden * (2 * shapes.head_dim * (shapes.heads + shapes.kv_heads) + mlp)
    ends = (1 if shapes.tied else 2) * shapes.vocabulary * shapes.hidden
    billions = float(model.rpartition("-")[2].removesuffix("b"))
    assert (shapes.layers * layer + ends) / 1e9 == pytest.approx(billions, rel=0.25)


def test_every_constant_changes_something_that_it_concerns(cases: list[Case]) -> None:
    runs = [case.run for case in cases]
    for constant in CONSTANTS:
        for run in filter(constant.concerns, runs):
            before = hardware_of(run.hardware)
            assert constant.apply(before, 0.6 * constant.start, run) != before
    values = starts()
    assert (
        fitted(hardware_of("h100-sxm"), runs[1], values).host.forward.at(1) == values["gpt-fast, a pass"]
    )


def whole_prediction(run: Run, values: Values) -> Any:
    """What `surgeon predict` says of a run."""
    shapes = shapes_of(run.model)
    hardware = fitted(hardware_of(run.hardware), run, values)
    program = program_of(run.system, shapes.layers, layer_shapes_of(run.model))
    return predict(
        shapes, program, hardware, Workload(run.batch, run.prompt, run.new), deployment_of(run)
    )


@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_few_layers_give_the_time_of_all(cases: list[Case], place: int) -> None:
    run, values = cases[place].run, starts()
    if not run.graphs:
        values["launch, eager PyTorch"] = 1.0
    whole = whole_prediction(run, values)
    quick = Predictor()
    assert quick(run, values) == pytest.approx(
        whole.per_token if whole.decode else whole.first_token, rel=0.02
    )


def test_a_fit_comes_nearer_to_what_is_printed(cases: list[Case]) -> None:
    seconds = Predictor()
    case = cases[1]
    before, after = starts(), fit([case], seconds, rounds=2)[0]
    assert case.speedup is not None
    assert abs(speedup(case, seconds, after) - case.speedup) < abs(
        speedup(case, seconds, before) - case.speedup
    )
    assert fit([case], seconds, rounds=0, left_out=["some"]) == (before, {"some": before})
    assert after["launch, DeInfer's vLLM"] == before["launch, DeInfer's vLLM"]  # nothing is said of it


def test_the_page_shows_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    tables, page = tmp_path / "rows.json", tmp_path / "page.md"
    tables.write_text(json.dumps({"rows": ROWS[3:]}))
    monkeypatch.setattr(sys, "argv", ["papers.py", str(tables), "-o", str(page), "--rounds", "0"])
    papers.main()
    text = page.read_text()
    assert all(one["what"] in text for one in ROWS[3:])
    assert text.count("| baseline |") == 2
    assert "3.000 (part)" in text
    assert "| parallel-track | 1 |" in capsys.readouterr().out  # parts are no speeds
