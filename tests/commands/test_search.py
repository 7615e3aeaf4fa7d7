"""`surgeon search` from the command line: what it writes, how it goes on, and how winners are measured again."""

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
from surgeon.checkpoint.stored import Checkpoint
from surgeon.commands.app import main
from surgeon.commands.heal import heal
from surgeon.commands.options import DATA_HELP
from surgeon.language.program import Program
from surgeon.language.recipe import read_recipe
from surgeon.searches.evaluate import Evaluator
from tests.commands.searched import search
from tests.stored import configure
from tests.tiny_models import save_checkpoint


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
    assert (
        (table["divergence_low"] <= table["divergence"])
        & (table["divergence"] <= table["divergence_high"])
    ).all()
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
        *(
            "winner",
            "program",
            "edits",
            "cost",
            "divergence",
            "perplexity",
            "measured",
            "held out",
            "recipe",
        )
    ]
    assert all(len(line) <= 80 for line in said if not line.startswith("recipe"))
    assert any(line.startswith(" " * 12) for line in said), (
        "the held-out sentences are longer than a line"
    )
    comments = [
        line for line in (tmp_path / "recipe.yaml").read_text().splitlines() if line.startswith("#")
    ]
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


def test_a_search_on_one_window_holds_two_out(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    assert search(tiny_checkpoint, tiny_text, tmp_path, "--tokens", "64") == 0
    assert (
        json.loads((tmp_path / "search.json").read_text())["held_out"]["searched"]["unseen"]["tokens"]
        == 2 * 63
    )


def test_other_text_held_out_is_measured_as_surgeon_eval_does(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, output = tmp_path / "other.txt", tmp_path / "search"
    other.write_text(tiny_text.read_text()[::-1])
    assert search(tiny_checkpoint, tiny_text, output, "--holdout-data", str(other)) == 0
    held = json.loads((output / "search.json").read_text())["held_out"]
    winner = next(
        one for one in [held["searched"], *held["runners_up"]] if one["trial"] == held["winner"]
    )
    sizes = ["--tokens", "256", "--window", "64", "-o", str(tmp_path / "eval")]
    assert main(["eval", str(output / "recipe.yaml"), "--data", str(other), *sizes]) == 0
    evaluated = json.loads((tmp_path / "eval" / "text.json").read_text())
    assert winner["unseen"]["perplexity"] == pytest.approx(evaluated["perplexity"], rel=1e-5)
    assert held["data"] == str(other)
    assert held["data_hash"] == evaluated["data_hash"]
    capsys.readouterr()
    assert search(tiny_checkpoint, tiny_text, tmp_path / "same", "--holdout-data", str(tiny_text)) == 1
    assert "are among those that the search saw" in capsys.readouterr().err


@pytest.mark.thorough
def test_candidates_are_healed_before_the_choice(
    tiny_checkpoint: Path,
    tiny_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
) -> None:
    """Interrupted while the second one is healed, the same command heals those that are missing."""
    other, output = tmp_path / "other.txt", tmp_path / "search"
    other.write_text(tiny_text.read_text()[::-1])
    healing = ("--heal", "3", "--heal-batch", "2", "--heal-data", str(other), "--holdout", "128")
    healed: list[str] = []

    def interrupted(recipe: Any, *args: Any, **kwargs: Any) -> Any:
        healed.append(str(recipe.program(4)))
        if len(healed) == 2:
            raise KeyboardInterrupt
        return heal(recipe, *args, **kwargs)

    monkeypatch.setattr("surgeon.commands.searching.heal", interrupted)
    assert search(tiny_checkpoint, tiny_text, output, *healing) == 130
    assert not (output / "recipe.yaml").exists()
    assert search(tiny_checkpoint, tiny_text, output, *healing) == 0
    assert len(healed) == 4, "three candidates, and one of them was begun twice"
    assert healed[1] == healed[2]
    read = capsys.readouterr()
    table = [line[12:].split() for line in read.out.splitlines() if line.startswith("healing ")]
    record = json.loads((output / "search.json").read_text())
    found = record["healing"]
    assert [row[0] for row in table[1:4]] == [str(one["trial"]) for one in found["candidates"]]
    assert {one["program"] for one in found["candidates"]} == set(healed)
    held = {
        one["trial"]: one for one in [record["held_out"]["searched"], *record["held_out"]["runners_up"]]
    }
    for one in found["candidates"]:
        assert one["before"] == held[one["trial"]]["unseen"]
        assert one["after"]["divergence"] != one["before"]["divergence"]
    assert record["best"]["trial"] == found["winner"]
    assert found["changed"] == (found["winner"] != found["winner_before"])
    assert (
        len([folder for folder in (output / "healed").iterdir() if (folder / "config.json").is_file()])
        == 3
    )
    recipe = (output / "recipe.yaml").read_text()
    assert "# On the same text, healed:\n# trial  divergence" in recipe
    assert "healing does not change the choice" in recipe or "HEALING CHANGES THE CHOICE" in recipe
    assert read_recipe(output / "recipe.yaml").program(4) == Program.parse(record["best"]["program"])
    assert main(["report", str(output), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "The best trials before and after healing" in page
    assert f"Single edits and trials ran {record['work']['sentence']}." in page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--heal", "3"), "to heal for 3 steps takes text, apart from the one that is searched on"),
        (("--heal", "3", "--heal-data", "self"), "self is written anew for each"),
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
    assert (
        search(tiny_checkpoint, short, tmp_path / "search", "--tokens", "100000", "--holdout", "128")
        == 1
    )
    assert "or hold out none" in capsys.readouterr().err
    assert not (tmp_path / "search" / "trials.csv").exists()
    assert (
        search(tiny_checkpoint, short, tmp_path / "search", "--tokens", "100000", "--holdout", "0") == 0
    )
    assert search(tiny_checkpoint, short, tmp_path / "some", "--tokens", "100000") == 0
    assert "are used of the 100,000 asked for, and the last 128 are held out" in capsys.readouterr().err
    assert search(tiny_checkpoint, tiny_text, tmp_path / "other", "--holdout", "64") == 1
    assert "hold out 128 or more" in capsys.readouterr().err


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
    assert "has another model_hash" in capsys.readouterr().err


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
    assert (
        "not finite: NaN or infinity appears first in F2; check that layer's weights"
        in capsys.readouterr().err
    )


def test_interrupted_it_goes_on(
    tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between rounds: nothing that was measured is lost, and the result is that of an undisturbed search."""
    model, more = (
        save_checkpoint(tmp_path / "model", num_layers=8),
        ("--budget", "depth=5", "--trials", "14"),
    )
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
