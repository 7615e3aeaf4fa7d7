"""`surgeon search` from the command line: what it writes, that it goes on where it was, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from surgeon.analysis import subject
from surgeon.checkpoint.read import Checkpoint
from surgeon.cli.app import main
from surgeon.cli.options import DATA_HELP
from surgeon.cost.hardware_file import MACHINES, load_hardware
from surgeon.cost.predict import Deployment, predict
from surgeon.cost.workload import Workload
from surgeon.language.program import Program
from surgeon.language.recipe import read_recipe
from surgeon.models.edit import program_of
from surgeon.models.recipe_program import recipe_program
from surgeon.models.shapes import ModelShapes
from surgeon.opened import open_model
from surgeon.searches import mixture
from surgeon.searches.evaluate import Evaluator
from surgeon.training.run import train
from tests.stored import configure
from tests.tiny_models import save_checkpoint

SIZES = ["--tokens", "256", "--window", "64", "--trials", "6"]


def search(model: Path, text: Path, output: Path, *more: str) -> int:
    """A search of pairs at depth 3; what `more` says again counts."""
    return main(["search", str(model), "--budget", "depth=3", "--data", str(text), "-o", str(output), *SIZES, *more])


def search_freely(model: Path, text: Path, output: Path, *more: str) -> int:
    """A search without a budget."""
    return main(["search", str(model), "--data", str(text), "-o", str(output), *SIZES, *more])


def record_of(output: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((output / "search.json").read_text())
    return found


def test_results_and_resumption(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "search"
    assert search(tiny_checkpoint, tiny_text, output, "--trials", "2") == 0
    first = pd.read_csv(output / "trials.csv")
    assert len(first) == 2
    assert search(tiny_checkpoint, tiny_text, output) == 0  # more trials are added to those
    said = capsys.readouterr().out
    recipe = read_recipe(output / "recipe.yaml")
    program = recipe.program(4)
    assert program.effective_depth() == 3
    assert str(program) in " ".join(said.split())
    assert "cost        depth 3; the original's is 4" in said
    assert Path(recipe.model) == tiny_checkpoint
    assert recipe.weights == Checkpoint(tiny_checkpoint).model_hash()
    table = pd.read_csv(output / "trials.csv")
    assert len(table) == 3, "four layers have three pairs"
    pd.testing.assert_frame_equal(table.head(2), first)
    assert set(table["edits"]) == {"pair 0:2", "pair 1:3", "pair 2:4"}
    assert (table["depth"] == 3).all()
    assert ((table["divergence_low"] <= table["divergence"]) & (table["divergence"] <= table["divergence_high"])).all()
    best = table[table["whole"]].sort_values("divergence").iloc[0]
    record = json.loads((output / "search.json").read_text())
    assert record["held_out"]["searched"]["trial"] == best["trial"]
    assert record["best"]["program"] == str(program)
    assert Program.parse(record["best"]["program"]) == program
    assert record["original"]["divergence"] == pytest.approx(0, abs=1e-6)
    assert record["original"].keys() < record["best"].keys()
    assert {"model", "model_hash", "data_hash", "seed", "versions", "command"} <= {*record, "seed"}
    terms = pd.read_csv(output / "terms.csv").set_index("edit")
    assert terms.loc[best["edits"], "divergence"] == pytest.approx(best["divergence"], rel=1e-3)
    assert (output / "search.png").stat().st_size > 10_000
    before = {path.name: path.read_bytes() for path in output.glob("*.csv")}
    assert search(tiny_checkpoint, tiny_text, output) == 0
    assert {path.name: path.read_bytes() for path in output.glob("*.csv")} == before


def test_lines_fit_a_terminal(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(tiny_checkpoint, tiny_text, tmp_path, "--budget", "depth=2") == 0
    said = capsys.readouterr().out.splitlines()
    keys = [line[:12].strip() for line in said if not line.startswith(" ")]
    assert list(dict.fromkeys(keys)) == [
        *("program", "edits", "cost", "divergence", "perplexity", "measured", "held out", "recipe")
    ]
    assert all(len(line) <= 80 for line in said if not line.startswith("recipe"))
    assert any(line.startswith(" " * 12) for line in said), "the held-out sentences are longer than a line"
    comments = [line for line in (tmp_path / "recipe.yaml").read_text().splitlines() if line.startswith("#")]
    assert all(len(line) <= 80 or len(line.split()) <= 2 for line in comments)  # paths are never broken


def test_the_winner_is_measured_again_on_text_that_follows(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(tiny_checkpoint, tiny_text, tmp_path / "both", "--holdout", "128") == 0
    held = json.loads((tmp_path / "both" / "search.json").read_text())["held_out"]
    assert {one["unseen"]["tokens"] for one in [held["searched"], *held["runners_up"]]} == {2 * 63}
    assert capsys.readouterr().out.count("held out    ") == len(held["sentences"])
    assert search(tiny_checkpoint, tiny_text, tmp_path / "none", "--holdout", "0") == 0
    assert "held_out" not in json.loads((tmp_path / "none" / "search.json").read_text())
    assert "held out" not in capsys.readouterr().out


def test_a_search_on_one_window_holds_two_out(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    assert search(tiny_checkpoint, tiny_text, tmp_path, "--tokens", "64") == 0
    assert json.loads((tmp_path / "search.json").read_text())["held_out"]["searched"]["unseen"]["tokens"] == 2 * 63


def test_other_text_held_out_is_measured_as_surgeon_eval_does(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, output = tmp_path / "other.txt", tmp_path / "search"
    other.write_text(tiny_text.read_text()[::-1])
    assert search(tiny_checkpoint, tiny_text, output, "--holdout-data", str(other)) == 0
    held = json.loads((output / "search.json").read_text())["held_out"]
    winner = next(one for one in [held["searched"], *held["runners_up"]] if one["trial"] == held["winner"])
    sizes = ["--tokens", "256", "--window", "64", "-o", str(tmp_path / "eval")]
    assert main(["eval", str(output / "recipe.yaml"), "--data", str(other), *sizes]) == 0
    evaluated = json.loads((tmp_path / "eval" / "text.json").read_text())
    assert winner["unseen"]["perplexity"] == pytest.approx(evaluated["perplexity"], rel=1e-5)
    assert held["data"] == str(other)
    assert held["data_hash"] == evaluated["data_hash"]
    capsys.readouterr()
    assert search(tiny_checkpoint, tiny_text, tmp_path / "same", "--holdout-data", str(tiny_text)) == 1
    assert "are among those that the search saw" in capsys.readouterr().err


def test_candidates_are_healed_before_the_choice(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Interrupted while the second one is healed, the same command heals those that are missing."""
    other, output = tmp_path / "other.txt", tmp_path / "search"
    other.write_text(tiny_text.read_text()[::-1])
    healing = ("--heal", "3", "--heal-batch", "2", "--heal-data", str(other), "--holdout", "128")
    healed: list[str] = []

    def interrupted(student: Any, *args: Any, **kwargs: Any) -> Any:
        healed.append(str(program_of(student)))
        if len(healed) == 2:
            raise KeyboardInterrupt
        return train(student, *args, **kwargs)

    monkeypatch.setattr("surgeon.searches.healer.train", interrupted)
    assert search(tiny_checkpoint, tiny_text, output, *healing) == 130
    assert not (output / "recipe.yaml").exists()
    assert search(tiny_checkpoint, tiny_text, output, *healing) == 0
    assert len(healed) == 4, "three candidates, and one of them was begun twice"
    assert healed[1] == healed[2]
    read = capsys.readouterr()
    assert "healing candidate 3 of 3" in read.err
    table = [line[12:].split() for line in read.out.splitlines() if line.startswith("healing ")]
    record = json.loads((output / "search.json").read_text())
    found = record["healing"]
    assert [row[0] for row in table[1:4]] == [str(one["trial"]) for one in found["candidates"]]
    assert {one["program"] for one in found["candidates"]} == set(healed)
    held = {one["trial"]: one for one in [record["held_out"]["searched"], *record["held_out"]["runners_up"]]}
    for one in found["candidates"]:
        assert one["before"] == held[one["trial"]]["unseen"]
        assert one["after"]["divergence"] != one["before"]["divergence"]
        assert one["tokens"] == 3 * 2 * 64
    assert record["best"]["trial"] == found["winner"]
    assert found["changed"] == (found["winner"] != found["winner_before"])
    assert (found["data"], found["steps"]) == (str(other), 3)
    recipe = (output / "recipe.yaml").read_text()
    assert "# On the same text, healed:\n# trial  divergence" in recipe
    assert "healing does not change the choice" in recipe or "HEALING CHANGES THE CHOICE" in recipe
    assert read_recipe(output / "recipe.yaml").program(4) == Program.parse(record["best"]["program"])
    assert main(["report", str(output), "-o", str(tmp_path / "page.html")]) == 0
    assert "The best trials before and after healing" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--heal", "3"), "to heal for 3 steps takes text, apart from the one that is searched on"),
        (("--heal-data", "other.txt"), "text to heal on without a number of steps heals nothing"),
        (
            ("--heal", "3", "--heal-data", "other.txt", "--holdout", "0"),
            "with 0 tokens none is held out; leave that out",
        ),
    ],
)
def test_healing_that_makes_no_sense_is_refused_before_a_model_is_loaded(
    tiny_checkpoint: Path,
    tiny_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    said: str,
) -> None:
    (tiny_checkpoint / "model.safetensors").unlink()
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search", *options) == 1
    assert said in capsys.readouterr().err


def test_text_to_heal_on_is_apart_and_long_enough(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, short = tmp_path / "search", tmp_path / "short.txt"
    assert search(tiny_checkpoint, tiny_text, output, "--heal", "3", "--heal-data", str(tiny_text)) == 1
    assert "heal on other text" in capsys.readouterr().err
    short.write_text(tiny_text.read_text()[:250][::-1])
    assert search(tiny_checkpoint, tiny_text, output, "--heal", "3", "--heal-data", str(short)) == 1
    assert "fewer than one batch of 8; give more text, or a smaller batch" in capsys.readouterr().err
    assert not (output / "trials.csv").exists()


def test_text_too_short_to_hold_some_out(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text(tiny_text.read_text()[:1500])
    assert search(tiny_checkpoint, short, tmp_path / "search", "--tokens", "100000") == 1
    assert "or hold out none" in capsys.readouterr().err
    assert not (tmp_path / "search" / "trials.csv").exists()
    assert search(tiny_checkpoint, short, tmp_path / "search", "--tokens", "100000", "--holdout", "0") == 0
    assert search(tiny_checkpoint, tiny_text, tmp_path / "other", "--holdout", "64") == 1
    assert "hold out 128 or more" in capsys.readouterr().err


def test_without_a_budget(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "search"
    assert search_freely(tiny_checkpoint, tiny_text, output, "--space", "pair,ladder,drop", "--trials", "30") == 0
    said = capsys.readouterr().out
    assert "knee        pair: " in said
    quality, trials = pd.read_csv(output / "quality.csv"), pd.read_csv(output / "trials.csv")
    assert set(quality["along"]) == {"depth"}
    together = quality[quality["space"] == "all together"].dropna(subset="trial")
    whole = trials[trials["whole"]].set_index("trial")
    for point in together.itertuples():
        as_shallow = whole[whole["depth"] <= point.cost]
        assert point.divergence == pytest.approx(as_shallow["divergence"].min())
    assert "mixing      mixing spaces has less divergence than the best space alone at" in said
    mixing, levels = pd.read_csv(output / "mixing.csv"), record_of(output)["mixing"]["levels"]  # type: ignore[index]
    assert mixing["held_out"].all()
    for row, level in zip(mixing.itertuples(), levels, strict=True):
        assert whole.loc[row.trial, "depth"] <= row.cost == level["cost"]
        spaces = {edit.split()[0] for edit in whole.loc[row.alone_trial, "edits"].split("; ")}
        assert spaces == {row.space}
        assert (row.trial == row.alone_trial) == (row.verdict == "the same program")
    assert record_of(output)["knees"]
    front = pd.read_csv(output / "front.csv")
    recipe = read_recipe(output / front["recipe"].iloc[0])
    assert str(recipe.program(4)) == front["program"].iloc[0]
    for name in ("search.png", "quality-against-depth.png", "front.png"):
        assert (output / name).stat().st_size > 10_000


def test_two_layers(tmp_path: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_checkpoint(tmp_path / "model", num_layers=2)
    assert search_freely(model, tiny_text, tmp_path / "search") == 0
    assert "no knee" in capsys.readouterr().out
    assert str(read_recipe(tmp_path / "search" / "recipe.yaml").program(2)) == "[A0 A1] [F0 F1]"
    assert main(["report", str(tmp_path / "search"), "-o", str(tmp_path / "page.html")]) == 0


def test_several_objectives(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    output = tmp_path / "search"
    use = ("--objective", "divergence,latency@cpu-2", "--prompt", "16", "--new", "8")
    assert search_freely(tiny_checkpoint, tiny_text, output, "--space", "pair,drop", "--trials", "20", *use) == 0
    front, trials = pd.read_csv(output / "front.csv"), pd.read_csv(output / "trials.csv")
    assert front["divergence"].is_monotonic_increasing
    assert front["latency@cpu-2"].is_monotonic_decreasing
    whole = trials[trials["whole"]]
    for point in front.itertuples(index=False):
        better = (whole["divergence"] <= point[1]) & (whole["latency@cpu-2"] <= point[2])
        assert (whole[better]["trial"] == point.trial).all(), "nothing is at least as good in both"
    best = json.loads((output / "search.json").read_text())["best"]
    assert best["trial"] in set(front["trial"])
    assert main(["report", str(output), "-o", str(tmp_path / "page.html")]) == 0
    assert "The front: divergence against latency@cpu-2" in (tmp_path / "page.html").read_text()


def test_the_size_of_a_model_is_traded_for_quality(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    output = tmp_path / "search"
    spaces = ("--space", "drop:layers,rank")  # checkpoints keep the other half of a layer of which one is left out
    assert search_freely(tiny_checkpoint, tiny_text, output, "--objective", "size", *spaces, "--trials", "12") == 0
    front = pd.read_csv(output / "front.csv")
    assert front["size"].is_monotonic_decreasing
    assert front["divergence"].is_monotonic_increasing
    smallest = front.iloc[-1]
    assert main(["export", str(output / smallest["recipe"]), "-o", str(tmp_path / "smallest")]) == 0
    sizes = [
        sum(t.numel() * t.element_size() for t in load_file(folder / "model.safetensors").values() if t.dim() > 1)
        for folder in (tiny_checkpoint, tmp_path / "smallest")
    ]
    assert sizes == [pd.read_csv(output / "quality.csv")["cost"].max(), smallest["size"]]


def test_a_front_between_two_limits_is_there_where_nothing_keeps_both(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, limits = tmp_path / "search", ("--budget", "depth=3,divergence<=1e-6")
    assert search(tiny_checkpoint, tiny_text, output, *limits) == 1
    assert "none is within depth=3,divergence<=1e-6; the nearest, " in capsys.readouterr().err
    front = pd.read_csv(output / "front.csv")
    assert front["depth"].min() < 3, "what less quality gives"
    assert not front["within"].any()


def test_another_search_in_the_same_folder_is_refused(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search") == 0
    before = (tmp_path / "search" / "recipe.yaml").read_text()
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search", "--budget", "depth=2") == 1
    assert "has another budget (depth=3, not depth=2)" in capsys.readouterr().err
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search", "--space", "pair,drop") == 1
    assert "has another space (pair, not pair,drop)" in capsys.readouterr().err
    assert (tmp_path / "search" / "recipe.yaml").read_text() == before
    configure(tiny_checkpoint, rms_norm_eps=0.5)
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search") == 1
    assert "use another folder" in capsys.readouterr().err.splitlines()[-1]


def test_a_budget_of_predicted_time(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "search"
    budget = ("--budget", "speedup>=1.05@cpu-2", "--ranks", "2", "--prompt", "16", "--new", "8", "--trials", "2")
    assert search(tiny_checkpoint, tiny_text, output, *budget) == 0
    program = read_recipe(output / "recipe.yaml").program(4)
    shapes = ModelShapes.of("tiny", open_model(tiny_checkpoint, weights=False).config)
    hardware, workload = load_hardware("cpu-2"), Workload(1, 16, 8)
    dense, found = (
        predict(shapes, one, hardware, workload, Deployment(2)).per_token for one in (Program.dense(4), program)
    )
    assert dense / found >= 1.05
    table = pd.read_csv(output / "trials.csv").set_index("program")
    assert table.loc[str(program), "speedup@cpu-2"] == pytest.approx(dense / found, rel=1e-6)
    assert record_of(output)["ranks"] == 2
    capsys.readouterr()
    assert search(tiny_checkpoint, tiny_text, tmp_path / "more", *budget, "--budget", "speedup>=90@cpu-2") == 1
    assert "out of reach" in capsys.readouterr().err


def test_a_hardware_that_is_too_small_for_the_model_is_warned_of(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny_checkpoint / "model.safetensors").unlink()  # it is said before the model is loaded
    small = tmp_path / "small.yaml"
    small.write_text((MACHINES / "cpu-2.yaml").read_text().replace("memory: 16e9", "memory: 16e3"))
    asked = ("--budget", f"speedup>=1.01@{small}", "--prompt", "16", "--new", "8")
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search", *asked) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: the unedited model needs ")
    assert f"{small} has " in first
    assert last.startswith("error: ")


def test_a_quality_that_cannot_be_kept(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(tiny_checkpoint, tiny_text, tmp_path, "--budget", "depth=3,divergence<=1e-9") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    table = pd.read_csv(tmp_path / "trials.csv")
    nearest = table[table["whole"]].sort_values("divergence").iloc[0]
    assert f"the nearest, trial {nearest['trial']}, has divergence {nearest['divergence']:.4g} nats" in error
    assert not (tmp_path / "recipe.yaml").exists()
    assert not table["within"].any()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--budget", "depth=0"), "no depth; write whole or half layers"),
        (("--budget", "depth=40"), "the unedited model has depth 4 already; ask for less"),
        (("--budget", "depth=1"), "out of reach"),
        (("--budget", "dpeth=3"), "did you mean 'depth'?"),
        (("--budget", "depth=3,depth=2"), "limits depth twice"),
        (("--budget", "latency=1ms"), "@"),
        (("--budget", "latency=1ms@h100-smx"), "h100-sxm"),
        (("--space", "lader"), "did you mean 'ladder'?"),
        (("--space", "pair,pair"), "named twice"),
        (("--space", "pair:x"), "pair:x"),
        (("--space", "ladder"), "out of reach"),
        (("--objective", "divregence"), "did you mean 'divergence'?"),
        (("--objective", "divergence,divergence"), "names divergence twice"),
        (("--objective", "accuracy"), "say on which, as in accuracy:piqa"),
        (("--sampler", "tp"), "unknown sampler 'tp'; did you mean 'tpe'?"),
        (("--sampler", "cmaes", "--objective", "divergence,depth"), "cmaes"),
    ],
)
def test_what_makes_no_sense_is_said_before_a_model_is_loaded(
    tiny_checkpoint: Path,
    tiny_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    said: str,
) -> None:
    (tiny_checkpoint / "model.safetensors").unlink()  # whoever opened it would say so
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search", *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "search").exists()


def test_a_task_that_there_is_not_is_said_before_anything_is_measured(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--objective", "divergence,accuracy:nowhere.jsonl")
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search", *asked) == 1
    assert "nowhere.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "search" / "trials.csv").exists()
    assert not (tmp_path / "search" / "reference.safetensors").exists()


def test_a_space_that_saves_nothing_of_what_is_looked_along(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search_freely(tiny_checkpoint, tiny_text, tmp_path / "search", "--space", "ladder") == 1
    assert "nothing of the space ladder lessens depth" in capsys.readouterr().err
    assert not (tmp_path / "search").exists()


def test_a_limit_of_memory_and_what_goes_wrong_is_said_as_in_a_scan(
    tiny_checkpoint: Path,
    tiny_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert search(tiny_checkpoint, tiny_text, tmp_path / "whole") == 0
    with monkeypatch.context() as context:
        context.setattr(subject, "available_bytes", lambda *_: 0)
        assert search(tiny_checkpoint, tiny_text, tmp_path / "streamed", "--memory", "100GB") == 0
        assert "they are read layer by layer" in capsys.readouterr().err
    whole, streamed = (pd.read_csv(tmp_path / name / "trials.csv") for name in ("whole", "streamed"))
    pd.testing.assert_frame_equal(whole, streamed, rtol=1e-4)
    for limit, message in (("lots", "write e.g. 512MB or 2GB"), ("1MB", "set memory to")):
        assert search(tiny_checkpoint, tiny_text, tmp_path / "other", "--memory", limit) == 1
        assert message in capsys.readouterr().err
    path = tiny_checkpoint / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.2.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    assert search(tiny_checkpoint, tiny_text, tmp_path / "broken") == 1
    assert "not finite: NaN or infinity appears first in F2; check that layer's weights" in capsys.readouterr().err


def test_interrupted_it_goes_on(
    tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between rounds: nothing that was measured is lost, and the result is that of an undisturbed search."""
    model, more = save_checkpoint(tmp_path / "model", num_layers=8), ("--budget", "depth=5", "--trials", "14")
    assert search(model, tiny_text, tmp_path / "whole", *more) == 0
    measure, left = Evaluator.measure, 3

    def interrupted(self: Evaluator, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return measure(self, *args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(Evaluator, "measure", interrupted)
        assert search(model, tiny_text, tmp_path / "ended", *more) == 130
    assert "interrupted; run the same command again to go on" in capsys.readouterr().err
    assert not (tmp_path / "ended" / "recipe.yaml").exists()
    assert search(model, tiny_text, tmp_path / "ended", *more) == 0
    whole, ended = (pd.read_csv(tmp_path / name / "trials.csv") for name in ("whole", "ended"))
    assert len(whole) == math.comb(5, 3), "all sets of three pairs of eight layers"
    pd.testing.assert_frame_equal(ended, whole, rtol=1e-4)


def test_samplers_of_optuna(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    """What single edits do alone is not measured for them; another sampler, or seed, is another search."""
    options = ("--budget", "depth=2", "--space", "pair,drop:layers", "--trials", "6", "--sampler", "tpe")
    assert search(tiny_checkpoint, tiny_text, tmp_path, *options, "--seed", "3") == 0
    trials = pd.read_csv(tmp_path / "trials.csv")
    assert set(trials["source"]) == {"TPE"}
    assert trials["whole"].all()
    assert not (tmp_path / "terms.csv").exists()
    record = json.loads((tmp_path / "search.json").read_text())
    assert (record["sampler"], record["seed"]) == ("tpe", 3)
    assert search(tiny_checkpoint, tiny_text, tmp_path, *options, "--seed", "4") == 1
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0


def test_help_has_the_words_of_the_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for command in ("scan", "search"):
        assert main([command, "--help"]) == 0
        texts.append(" ".join(capsys.readouterr().out.split()))
    for words in (DATA_HELP, "Tokens in a window. Default: 512", "The most memory the process may take"):
        assert all(words in text for text in texts)
    assert "depth=12" in texts[1]


def test_native_tracks(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers of tracks are dropped, paired within a track and made of low rank; the recipe is for such a model."""
    own = Program.parse("{A0 F0 A1 F1 | A2 F2 A3 F3}")
    configure(tiny_checkpoint, model_type="surgeon_llama", surgeon_program=str(own))
    asked = ("--space", "pair,drop:layers,rank:0.5", "--budget", "params=0.7x", "--holdout", "0")
    assert search_freely(tiny_checkpoint, tiny_text, tmp_path / "out", *asked, "--trials", "3") == 0
    recipe, config = read_recipe(tmp_path / "out" / "recipe.yaml"), open_model(tiny_checkpoint, weights=False).config
    program = recipe_program(recipe, config, own)
    assert program != own
    assert program.parameters(ModelShapes.of("", config).layer_shapes) <= 0.7 * own.parameters(
        ModelShapes.of("", config).layer_shapes
    )
    terms = pd.read_csv(tmp_path / "out" / "terms.csv")
    pairs = [edit for edit in terms["edit"] if edit.startswith("pair")]
    assert pairs == ["pair 0:2", "pair 2:4"]  # and none of layers of two tracks
    capsys.readouterr()
    for more, message in {
        ("--space", "tracks"): "the space tracks has no edits of tiny-llama: the model runs a program of its own",
        ("--heal", "2", "--heal-data", str(tiny_text)): "candidates are healed of models whose layers run one after",
    }.items():
        assert search_freely(tiny_checkpoint, tiny_text, tmp_path / "no", *more) == 1
        assert message in capsys.readouterr().err
    configure(tiny_checkpoint, model_type="surgeon_llama", surgeon_program="A0 F0 >A1 F1 A2 F2 A3 F3")
    assert search_freely(tiny_checkpoint, tiny_text, tmp_path / "no") == 1
    assert "tiny-llama is an edited model; search the one that it was made of" in capsys.readouterr().err


def test_programs_without_attention_are_none(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trials, no points of a front and no winners, also where a study of an earlier version has some."""
    asked = ("--space", "drop", "--budget", "syncs<=2", "--trials", "8", "--holdout", "0")
    with monkeypatch.context() as earlier:
        earlier.setattr(mixture, "_attending", lambda _: {0, 1, 2, 3})
        assert search(tiny_checkpoint, tiny_text, tmp_path / "earlier", *asked) == 0
    trials = tmp_path / "earlier" / "trials.csv"
    assert not pd.read_csv(trials)["program"].str.contains("A").all()
    assert search(tiny_checkpoint, tiny_text, tmp_path / "earlier", *asked) == 0
    assert pd.read_csv(trials)["program"].str.contains("A").all()
    assert search_freely(tiny_checkpoint, tiny_text, tmp_path / "new", "--space", "drop", "--trials", "20") == 0
    front = pd.read_csv(tmp_path / "new" / "front.csv")
    assert front["depth"].min() <= 1, "as shallow as can be"
    assert front["program"].str.contains("A").all()
    shallowest = tmp_path / "new" / front.loc[front["depth"].idxmin(), "recipe"]
    assert main(["export", str(shallowest), "-o", str(tmp_path / "out")]) == 0
