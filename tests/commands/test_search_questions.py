"""`surgeon search` from the command line: what can be asked, what the answers are, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file

from surgeon.commands.app import main
from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.hardware import MACHINES, load_hardware
from surgeon.cost.predict import predict
from surgeon.language.program import Program
from surgeon.language.recipe import read_recipe
from surgeon.models.edit import recipe_program
from surgeon.models.shapes import ModelShapes
from surgeon.opened import open_model
from surgeon.searches import mixture
from tests.commands.searched import record_of, search, search_freely
from tests.stored import configure
from tests.tiny_models import save_checkpoint


@pytest.mark.thorough
def test_without_a_budget(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "search"
    assert (
        search_freely(
            tiny_checkpoint, tiny_text, output, "--space", "pair,ladder,drop", "--trials", "30"
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "knee        pair: " in said
    quality, trials = pd.read_csv(output / "quality.csv"), pd.read_csv(output / "trials.csv")
    assert set(quality["along"]) == {"depth"}
    together = quality[quality["space"] == "all together"].dropna(subset="trial")
    whole = trials[trials["whole"]].set_index("trial")
    for point in together.itertuples():
        as_shallow = whole[whole["depth"] <= point.cost]
        assert point.divergence == pytest.approx(as_shallow["divergence"].min())
    assert record_of(output)["knees"]
    front = pd.read_csv(output / "front.csv")
    recipe = read_recipe(output / front["recipe"].iloc[0])
    assert str(recipe.program(4)) == front["program"].iloc[0]
    for name in ("search.png", "quality-against-depth.png", "front.png"):
        assert (output / name).stat().st_size > 10_000


@pytest.mark.thorough
def test_two_layers(tmp_path: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_checkpoint(tmp_path / "model", num_layers=2)
    assert search_freely(model, tiny_text, tmp_path / "search") == 0
    assert "no knee" in capsys.readouterr().out
    assert str(read_recipe(tmp_path / "search" / "recipe.yaml").program(2)) == "[A0 A1] [F0 F1]"
    assert main(["report", str(tmp_path / "search"), "-o", str(tmp_path / "page.html")]) == 0


@pytest.mark.thorough
def test_several_objectives(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    output = tmp_path / "search"
    use = ("--objective", "divergence,latency@cpu-2", "--prompt", "16", "--new", "8")
    assert (
        search_freely(tiny_checkpoint, tiny_text, output, "--space", "pair,drop", "--trials", "20", *use)
        == 0
    )
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


@pytest.mark.thorough
def test_the_size_of_a_model_is_traded_for_quality(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "search"
    # Checkpoints keep the other half of a layer of which one is left out.
    spaces = ("--space", "drop:layers,rank")
    assert (
        search_freely(
            tiny_checkpoint, tiny_text, output, "--objective", "size", *spaces, "--trials", "12"
        )
        == 0
    )
    front = pd.read_csv(output / "front.csv")
    assert front["size"].is_monotonic_decreasing
    assert front["divergence"].is_monotonic_increasing
    smallest = front.iloc[-1]
    assert main(["export", str(output / smallest["recipe"]), "-o", str(tmp_path / "smallest")]) == 0
    sizes = [
        sum(
            t.numel() * t.element_size()
            for t in load_file(folder / "model.safetensors").values()
            if t.dim() > 1
        )
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


def test_a_budget_of_predicted_time(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "search"
    budget = (
        "--budget",
        "speedup>=1.05@cpu-2",
        "--ranks",
        "2",
        "--prompt",
        "16",
        "--new",
        "8",
        "--trials",
        "2",
    )
    assert search(tiny_checkpoint, tiny_text, output, *budget) == 0
    program = read_recipe(output / "recipe.yaml").program(4)
    shapes = ModelShapes.of("tiny", open_model(tiny_checkpoint, weights=False).config)
    hardware, workload = load_hardware("cpu-2"), Workload(1, 16, 8)
    dense, found = (
        predict(shapes, one, hardware, workload, Deployment(2)).per_token
        for one in (Program.dense(4), program)
    )
    assert dense / found >= 1.05
    table = pd.read_csv(output / "trials.csv").set_index("program")
    assert table.loc[str(program), "speedup@cpu-2"] == pytest.approx(dense / found, rel=1e-6)
    assert record_of(output)["ranks"] == 2
    capsys.readouterr()
    assert (
        search(
            tiny_checkpoint, tiny_text, tmp_path / "more", "--budget", "speedup>=90@cpu-2", *budget[2:]
        )
        == 1
    )
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
    assert (
        f"the nearest, trial {nearest['trial']}, has divergence {nearest['divergence']:.4g} nats"
        in error
    )
    assert not (tmp_path / "recipe.yaml").exists()
    assert not table["within"].any()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--budget", "depth=0"), "no depth; write whole or half layers"),
        (("--budget", "depth=40"), "the unedited model has depth 4 already; ask for less"),
        (("--budget", "depth=1"), "out of reach"),
        (
            ("--budget", "depth=3", "--link-delay", "1ms"),
            "--link-delay is for a latency, a speedup or a draft",
        ),
        (
            ("--objective", "size", "--prompt", "8"),
            "ask for one, or leave --prompt out",
        ),
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


def test_a_space_that_saves_nothing_of_what_is_looked_along(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search_freely(tiny_checkpoint, tiny_text, tmp_path / "search", "--space", "ladder") == 1
    assert "nothing of the space ladder lessens depth" in capsys.readouterr().err
    assert not (tmp_path / "search").exists()


def test_native_tracks(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers of tracks are dropped, paired within a track and made of low rank; the recipe is for such a model."""
    own = Program.parse("{A0 F0 A1 F1 | A2 F2 A3 F3}")
    configure(tiny_checkpoint, model_type="surgeon_llama", surgeon_program=str(own))
    asked = ("--space", "pair,drop:layers,rank:0.5", "--budget", "params=0.7x", "--holdout", "0")
    assert search_freely(tiny_checkpoint, tiny_text, tmp_path / "out", *asked, "--trials", "3") == 0
    recipe, config = (
        read_recipe(tmp_path / "out" / "recipe.yaml"),
        open_model(tiny_checkpoint, weights=False).config,
    )
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
        (
            "--space",
            "tracks",
        ): "the space tracks has no edits of tiny-llama: the model runs a program of its own",
        (
            "--heal",
            "2",
            "--heal-data",
            str(tiny_text),
        ): "candidates are healed of models whose layers run one after",
    }.items():
        assert search_freely(tiny_checkpoint, tiny_text, tmp_path / "no", *more) == 1
        assert message in capsys.readouterr().err
    configure(tiny_checkpoint, model_type="surgeon_llama", surgeon_program="A0 F0 >A1 F1 A2 F2 A3 F3")
    assert search_freely(tiny_checkpoint, tiny_text, tmp_path / "no") == 1
    assert (
        "tiny-llama is an edited model, or one that others pruned or decomposed; search the one that it was made of"
        in capsys.readouterr().err
    )


def test_programs_without_attention_are_none(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trials, no points of a front and no winners, also where a study of an earlier version has some."""
    asked = ("--space", "drop", "--budget", "syncs<=2", "--trials", "8", "--holdout", "0")
    with monkeypatch.context() as earlier:
        earlier.setattr(mixture, "_attending_layers", lambda _: {0, 1, 2, 3})
        assert search(tiny_checkpoint, tiny_text, tmp_path / "earlier", *asked) == 0
    trials = tmp_path / "earlier" / "trials.csv"
    assert not pd.read_csv(trials)["program"].str.contains("A").all()
    assert search(tiny_checkpoint, tiny_text, tmp_path / "earlier", *asked) == 0
    assert pd.read_csv(trials)["program"].str.contains("A").all()
    assert (
        search_freely(tiny_checkpoint, tiny_text, tmp_path / "new", "--space", "drop", "--trials", "20")
        == 0
    )
    front = pd.read_csv(tmp_path / "new" / "front.csv")
    assert front["depth"].min() <= 1, "as shallow as can be"
    assert front["program"].str.contains("A").all()
    shallowest = tmp_path / "new" / front.loc[front["depth"].idxmin(), "recipe"]
    assert main(["export", str(shallowest), "-o", str(tmp_path / "out")]) == 0
