"""scripts/gpu/papers: what rows are measured as, what cannot run, and that a paper's rows come out, killed or not."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.cost.cases import Case, read_cases
from scripts.gpu import paper_bench, paper_racks, papers
from scripts.gpu.paper_bench import Settings, Shared
from scripts.gpu.paper_specs import Place, Row, Spec
from surgeon.checkpoint.tensor_file import read_json
from surgeon.language.program import Program
from surgeon.processes.torchrun import TorchrunEnvironment
from tests.processes.test_torchrun import free_port
from tests.runtime.comm import on_collectives

CASES = read_cases(read_json(papers.TABLES)["rows"])


def case_of(text: str, group: str = "") -> Case:
    return next(case for case in CASES if text in case.text and group in case.group)


def measured(spec: Spec, **times: Any) -> dict[str, Any]:
    split = {"compute": 0.0, "waiting": 0.0}
    passes = {
        "prefill_pass": split | times.pop("first", {}),
        "decode_pass": split | times.pop("decode", {}),
    }
    return {"spec": vars(spec), "rounds": [times | passes]}


def test_rows_run_as_printed_or_on_as_many_ranks_as_there_are() -> None:
    case = case_of("70b, ladder no p2p")
    row = Place(gpus=8).rows([case])[0]
    assert row.own == (Spec("llama3-70b", "ladder", 8, False, 1, 1024, 512),)
    assert row.baseline == (Spec("llama3-70b", "dense", 8, False, 1, 1024, 512),)
    assert Place(gpus=3).rows([case])[0].own[0].ranks == 2
    assert Place(gpus=3, exact=True).rows([case])[0].own[0].ranks == 8
    assert Place(gpus=1).rows([case])[0].own == (Spec("llama3-70b", "ladder", 1, True, 1, 1024, 512),)
    other = Place(gpus=4, model="pt-6b").rows([case_of("30b", "parallel-track 7")])[0]
    assert (other.own[0].model, other.own[0].ranks) == ("pt-6b", 4)


def test_pairs_keep_their_share_of_other_models() -> None:
    case = case_of("llama3.2-3b, 28 layers, effective depth 20")
    assert Place(8).rows([case])[0].own[0].system == "lp:8:25"
    assert Place(8, model="qwen3-14b").rows([case])[0].own[0].system == "lp:11:36"
    assert Place(None, small=True).rows([case])[0].own[0].system == "lp:2:8"


def test_values_are_in_the_printed_units() -> None:
    def row(
        text: str, group: str, own: dict[str, Any], base: dict[str, Any]
    ) -> tuple[float, float | None]:
        made = Place(8).rows([case_of(text, group)])[0]
        pairs = [*zip(made.own, [own] * 2, strict=False), *zip(made.baseline, [base] * 2, strict=False)]
        found = {spec.key: measured(spec, **times) for spec, times in pairs}
        return made.value(found), made.speedup(found)

    assert row("effective depth 27", "1", {"per_token": 0.01}, {"per_token": 0.012}) == (
        1.2,
        pytest.approx(1.2),
    )
    decode = row(
        "ladder p2p, batch 1, TP 8, H100, decode", "2", {"per_token": 0.008}, {"per_token": 0.01}
    )
    assert decode == (pytest.approx(20), pytest.approx(1.25))
    rate = row("ladder p2p, batch 1, TP 8, H100, tokens/s", "2", {"rate": 150.0}, {"rate": 100.0})
    assert rate == (pytest.approx(50), pytest.approx(1.5))
    assert row("1024/128, D2", "parallel-track 5", {"rate": 3000.0}, {"rate": 2000.0}) == (
        3000,
        pytest.approx(1.5),
    )
    assert row("1024, D2", "parallel-track 6", {"first_token": 0.03}, {"first_token": 0.06}) == (30, 2)


def test_parts_of_layers_are_a_program_less_one_of_half_its_layers() -> None:
    row = Place(8).rows([case_of("two layers, lp, all-reduce")])[0]
    assert [(spec.system, spec.layers) for spec in row.specs] == [
        ("lp:14:28", None), ("lp:7:14", 14), ("dense", None), ("dense", 14)
    ]  # fmt: skip
    waiting = dict(zip(row.specs, (0.0014, 0.0007, 0.0029, 0.0015), strict=True))
    found = {spec.key: measured(spec, decode={"waiting": one}) for spec, one in waiting.items()}
    assert row.value(found) == pytest.approx(1e6 * 0.0007 / 14 * 2)
    assert row.speedup(found) == pytest.approx(2)
    prefill = Place(8).rows([case_of("base compute", "deinfer 5")])[0]
    found = {
        one.key: measured(one, first={"compute": 0.08 if one.layers is None else 0.04})
        for one in prefill.own
    }
    assert prefill.value(found) == pytest.approx(1e3 * 0.04 / 40)


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    def why(place: Place, spec: Spec, free: int = 1 << 40) -> str | None:
        settings = Settings(place, tmp_path, "cpu")
        vars(settings)["free"] = free  # a cached property
        return Shared(settings, [spec]).why_not(spec)

    some = Spec("llama3.2-1b", "ladder", 4, True, 4, 1024, 512)
    assert why(Place(2, exact=True), some) == "needs 4 GPUs, 2 here"
    assert why(Place(4), some) is None
    assert why(Place(4), some, 1 << 30) == "needs 1.56 GB for each rank, 1.07 GB can be used"
    assert why(Place(8), Spec("llama3.2-1b", "dense", 5, True, 1, 16, 2)) is None


@pytest.mark.parametrize("disabled", [False, True])
def test_ranks_of_torchrun_are_as_many_and_as_they_were_started(
    disabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paper_bench.NO_P2P, str(int(disabled)))
    settings = Settings(Place(16), tmp_path, "cpu", started=16)

    def why(ranks: int, p2p: bool) -> str | None:
        spec = Spec("llama3.2-1b", "ladder", ranks, p2p, 1, 16, 2)
        return Shared(settings, [spec]).why_not(spec)

    assert why(8, True) == "is for 8 ranks, torchrun has started 16"
    assert why(16, not disabled) is None
    assert why(16, disabled) == f"wants NCCL_P2P_DISABLE={int(not disabled)} where torchrun starts"


def test_racks_are_not_for_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TorchrunEnvironment(0, 2, 0, 1, "127.0.0.1", 29500).variables().items():
            patch.setenv(name, value)
        assert papers.main(["racks", "--small", "-o", str(tmp_path / "out")]) == 1
    assert "run it without torchrun" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.thorough
def test_rows_come_out_of_two_machines(tmp_path: Path) -> None:
    """Two of torchrun's, on this one, with a folder each; rank 0's has the rows."""
    script, port = Path(papers.__file__), free_port()
    environment = os.environ | {"PYTHONPATH": str(script.parents[2])}
    started = []
    for number in (0, 1):
        meeting = [
            "--nnodes",
            "2",
            "--node-rank",
            str(number),
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            port,
        ]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", "1"]
        arguments = ["ladder", "--small", "--only", "405b", "-o", str(tmp_path / str(number))]
        started.append(subprocess.Popen([*torchrun, str(script), *arguments], env=environment))
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    rows = list(csv.DictReader((tmp_path / "0" / "rows.csv").open()))
    assert len(rows) == 2
    assert all(float(row["here_speedup"]) > 0 for row in rows)
    shapes = [sorted(path.name for path in (tmp_path / number / "shapes").iterdir()) for number in "01"]
    assert shapes == [["llama3-405b.json"]] * 2
    assert not (tmp_path / "1" / "rows.csv").exists()


def test_programs_of_one_model_count_what_they_share_once(tmp_path: Path) -> None:
    specs = [Spec("llama3.2-1b", system, 2, True, 1, 64, 2) for system in ("dense", "ladder", "lp:4:14")]
    settings = Settings(Place(2), tmp_path, "cpu")
    dense, ladder, pairs = (Shared(settings, specs[:count]).bytes_together for count in (1, 2, 3))
    assert dense == ladder
    # Bytes in float32; each rank has four whole ones besides.
    layer = 4 * (2 * 2048 * (2048 + 512) + 3 * 2048 * 8192)
    assert pairs - dense == pytest.approx(4 * layer, rel=0.01)


@pytest.mark.long
def test_rows_come_out_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert papers.main(["ladder", "--small", "--only", "70b, ladder p2p", "-o", str(folder)]) == 0
    said = capsys.readouterr()
    assert "3 of 3 rows measured" in said.err
    table = list(csv.DictReader((folder / "rows.csv").open()))
    assert [row["printed"] for row in table] == [
        str(case.printed) for case in CASES if "70b, ladder p2p" in case.text
    ]
    assert all(float(row["here_speedup"]) > 0 for row in table)
    assert all(row["row"] in said.out for row in table)
    ladder, dense = (
        read_json(next((folder / "runs").glob(f"*{name}*"))) for name in ("ladder", "dense")
    )
    assert Program.parse(ladder["program"]).sync_points(2) == Program.parse(
        dense["program"]
    ).sync_points(2)
    assert ">" in ladder["program"]
    assert ladder["rounds"][0]["decode_pass"]["layers"]["all_reduces"] == 16
    rows = (
        len(row) for row in (folder / "table.md").read_text().splitlines() if row.startswith("| ladder")
    )
    assert len(list(rows)) == 3


def fake(specs: list[Spec], stop: int, asked: list[Spec]) -> Iterator[tuple[Spec, dict[str, Any] | str]]:
    for number, spec in enumerate(specs):
        if number == stop:
            raise KeyboardInterrupt
        asked.append(spec)
        if spec.model == "llama3-8b":
            yield spec, "needs 99GB on each of 8 GPUs, 70GB can be used"
        else:
            yield spec, measured(spec, rate=2.0 if spec.system == "ladder" else 1.0)


def test_a_killed_run_goes_on_and_what_failed_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["ladder", "--small", "--only", "with P2P", "-o", str(tmp_path)]
    asked: list[list[Spec]] = []

    def start(stop: int) -> int:
        asked.append([])
        monkeypatch.setattr(papers, "measure", lambda _, specs: fake(specs, stop, asked[-1]))
        return papers.main(arguments)

    with pytest.raises(KeyboardInterrupt):
        start(5)
    notes = [row["note"] for row in csv.DictReader((tmp_path / "rows.csv").open())]
    assert {"", "not measured"} <= {*notes}
    assert start(99) == 0
    assert "6 of 7 rows measured" in capsys.readouterr().err
    failed = [spec for spec in asked[0] if spec.model == "llama3-8b"]
    assert len(asked[0]) == 5
    assert set(asked[0]) & set(asked[1]) == set(failed)
    assert len({*asked[0], *asked[1]}) == 14
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [(row["here"], row["note"][:10]) for row in rows if "8b," in row["row"]] == [
        ("nan", "needs 99GB")
    ]
    assert all(row["here"] == "2" for row in rows if "8b," not in row["row"])
    assert start(99) == 0
    assert {spec.model for spec in asked[2]} == {"llama3-8b"}
    assert papers.main([*arguments, "--model", "llama-8b"]) == 1
    assert "has runs of other settings" in capsys.readouterr().err


@pytest.mark.parametrize("p2p", [True, False])
def test_rows_without_peer_to_peer_do_without_it_altogether(
    p2p: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither NCCL nor symmetric memory reaches other GPUs then; afterwards the environment is as before."""
    monkeypatch.delenv(paper_bench.NO_P2P, raising=False)
    with paper_bench._started("cpu", 2, p2p) as ranks:
        assert ranks.call(on_collectives.asked_for_memory) == [p2p] * 2
    assert paper_bench.NO_P2P not in os.environ


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_row_of_every_paper_comes_out(paper: str, tmp_path: Path) -> None:
    assert papers.main([paper, "--small", "-o", str(tmp_path / "out")]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "rows.csv").open()))
    assert len(rows) == sum(
        row["paper"] == papers.PAPERS[paper] for row in read_json(papers.TABLES)["rows"]
    )
    assert all(math.isfinite(float(row["here"])) for row in rows)
    assert [row["note"] for row in rows if row["note"]] == []


def rack_record(end: float, computed: float, forward: float, backward: float) -> dict[str, Any]:
    ends = [1.0, 2.0, *(2 + (end - 2) * number / 5 for number in range(1, 6))]
    return {"ends": ends, "computed": [9.0] * 2 + [computed] * 5, "memory": None} | {
        "sent": {"forward": forward, "backward": backward}
    }


def test_what_the_articles_rows_are_here() -> None:
    ((pipeline, local),) = paper_racks.jobs(4, "cpu", small=True)
    records = {
        pipeline.key: [rack_record(7, 0.6, 30, 0), rack_record(7, 0.8, 0, 30)],
        local.key: [rack_record(6, 0.8, 30, 0), rack_record(5, 0.8, 0, 0)],
    }
    found = {job.key: paper_racks.figures(job, records[job.key]) for job in (pipeline, local)}
    assert found[pipeline.key]["tokens_per_second"] == pytest.approx(5 * 8 * 32 / 5)
    printed = [row for row in read_json(papers.TABLES)["rows"] if row["use"] == "training"]
    here = paper_racks.values(found, pipeline, local, printed)
    assert here == pytest.approx([25, 30, 540, 0])  # both ways the same, and nothing comes back
    assert all(map(math.isnan, paper_racks.values({}, pipeline, local, printed)))


def test_racks_that_cannot_run_say_why() -> None:
    large = paper_racks.jobs(4, "cuda", small=False)[-1][0]
    assert paper_racks.why_not(large, 2, 1 << 60) == "needs 4 GPUs, 2 here"
    assert paper_racks.why_not(large, 4, 80 << 30) is None
    said = paper_racks.why_not(large, 4, 20 << 30)
    assert said == "needs 33.1 GB and activations on each of 4 GPUs, 21.5 GB can be used"
    sizes = {pipeline.size: pipeline.config for pipeline, _ in paper_racks.jobs(4, "cuda", small=False)}
    for size, config in sizes.items():
        layer = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
        numbers = layer * config.num_hidden_layers + 2 * config.vocab_size * config.hidden_size
        assert numbers / 1e9 == pytest.approx(float(size.rstrip("B")), rel=0.1)


@pytest.mark.thorough
def test_racks_meet_in_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, local = paper_racks.jobs(2, "cpu", small=True)[0]
    record = paper_racks.measure(replace(local, warm=1, measured=1), Path("runs") / "racks")
    assert [len(rank["ends"]) for rank in record["ranks"]] == [2, 2]


def test_a_rack_alone_trains_as_a_model_does() -> None:
    job = replace(paper_racks.jobs(1, "cpu", small=True)[0][1], warm=0, measured=1)
    rank, plain = paper_racks.RackRank(job, 0), paper_racks.RackRank(job, 0).rack.stretch
    ids = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(0))
    logits = plain(ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    rank._local(ids)
    for own, expected in zip(rank.rack.stretch.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert expected.grad is not None
        assert float((own.grad - expected.grad).norm() / expected.grad.norm()) < 1e-4
    record = rank.train()
    assert (record["sent"], len(record["ends"]), record["memory"]) == ({}, 1, None)
    assert record["computed"][0] > 0


def test_rows_that_are_not_there_and_no_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert papers.main(["lp", "--small", "--only", "nothing", "-o", str(tmp_path)]) == 1
    assert "no row of layer-parallelism has 'nothing' in it" in capsys.readouterr().err


def test_one_measurement_serves_all_rows_that_it_is_in() -> None:
    rows: list[Row] = Place(8).rows(CASES)
    specs = {spec for row in rows for spec in row.specs}
    assert len(specs) == len({spec.key for spec in specs}) < len(rows)
