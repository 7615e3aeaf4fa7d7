"""`surgeon predict` from the command line: from a configuration alone, tables, files, and what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.image import imread

import surgeon
from surgeon.cost.hardware import parse_hardware
from surgeon.findings.speeds import Predictions
from tests.commands.conftest import Run
from tests.cost.examples import ROUND, SIZES

LOAD = ["--prompt", "20", "--new", "8"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with nothing but a configuration."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A hardware file."""
    path = tmp_path / "round.yaml"
    path.write_text(ROUND)
    return path


def test_tables_and_files_from_a_configuration(
    model: Path, file: Path, tmp_path: Path, surgeon_says: Run
) -> None:
    folder = tmp_path / "results"
    compared = ["--compare", "lp", "--compare", "upper-bound", "--layers", "0:4", "--batch", "1,2"]
    code, out, _ = surgeon_says(
        "predict",
        model,
        "--hardware",
        file,
        "--ranks",
        2,
        *compared,
        *LOAD,
        "--compress",
        "int8",
        "-o",
        folder,
    )
    assert code == 0
    assert out.startswith("small on round: 2 ranks, wire, float32, int8, prompt 20, 8 new\n")
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    table = pd.read_csv(folder / "predict.csv")
    assert list(zip(table["program"], table["batch"], strict=True)) == [
        (name, batch) for batch in (1, 2) for name in ("small", "lp", "upper-bound")
    ]
    assert list(table["decode_all_gathers"]) == 2 * [8, 4, 0]
    assert (table["per_token_speedup"].iloc[[0, 3]] == 1).all()
    assert (table["per_token_speedup"].iloc[[1, 2, 4, 5]] > 1).all()
    parts = sum(table[f"decode_{part}_ms"] for part in ("compute", "launches", "exposed"))
    assert list(parts) == pytest.approx(list(table["per_token_ms"]))
    record = json.loads((folder / "predict.json").read_text())
    assert record["programs"]["lp"]["program"] == "[A0 A1] [F0 F1] [A2 A3] [F2 F3]"
    assert parse_hardware(record["hardware_file"]) == parse_hardware(ROUND)
    assert imread(folder / "predict.png").std() > 0.1


def test_a_sweep_tells_what_cannot_be(model: Path, tmp_path: Path, surgeon_says: Run) -> None:
    tight = tmp_path / "tight.yaml"
    tight.write_text(ROUND.replace("memory: 1e12", "memory: 2.2e6"))
    compared = ["--compare", "tracks:2", "--layers", "0:4", "--sweep", "ranks=1..4,batch=1..64"]
    code, out, _ = surgeon_says(
        "predict", model, "--hardware", tight, *compared, *LOAD, "-o", tmp_path / "results"
    )
    assert code == 0
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    table = pd.read_csv(tmp_path / "results" / "predict.csv")
    assert len(table) == 2 * 3 * 7
    refused = table[table["first_token_ms"].isna()]
    assert set(zip(refused["program"], refused["ranks"], strict=True)) == {("tracks:2", 1)}
    assert "refused: tracks:2 has a slice of the layers for each rank" in out
    alone = table[(table["program"] == "small") & (table["ranks"] == 1)]
    assert list(alone["fits"]) == sorted(alone["fits"], reverse=True)
    assert set(alone["fits"]) == {0, 1}
    assert "!: does not fit into the" in out
    assert imread(tmp_path / "results" / "predict.png").std() > 0.05


def test_drafts_are_predicted_where_they_can_run(
    model: Path, file: Path, tmp_path: Path, surgeon_says: Run
) -> None:
    asked = [
        "--draft",
        "tracks:2",
        "--layers",
        "0:4",
        "--acceptance",
        "0,0.9",
        "--sweep",
        "ranks=1..2,batch=1..2",
    ]
    code, out, _ = surgeon_says(
        "predict", model, "--hardware", file, *asked, *LOAD, "-o", tmp_path / "out"
    )
    assert code == 0
    again = Predictions.read(tmp_path / "out")
    assert out.startswith(f"{again}\n")
    assert imread(tmp_path / "out" / "drafts.png").std() > 0.05
    assert out.startswith("small on round: wire, float32, prompt 20, 8 new; drafts of tracks:2\n")
    rows = [line.split() for line in out.partition("Where drafts pay")[2].splitlines()[3:7]]
    assert [row[:3] for row in rows] == [
        ["2", batch, chance] for batch in "12" for chance in ("0", "0.9")
    ]
    assert [row[3] for row in rows[::2]] == ["0", "0"]
    assert all(int(row[3]) > 0 for row in rows[1::2])
    assert [row[8] for row in rows[::2]] == ["1.00", "1.00"]
    assert all(1.05 < float(row[8]) < float(row[9]) for row in rows[1::2])
    assert "refused: 1 rank, batch 1: tracks:2 has a slice of the layers for each rank" in out


def test_a_folder_is_no_draft(tiny_checkpoint: Path, file: Path) -> None:
    with pytest.raises(ValueError, match="is a folder, and a draft is a program over the weights"):
        surgeon.predict(tiny_checkpoint, file, draft=tiny_checkpoint, ranks=2, prompt=20, new=8)


def test_other_axes_are_swept_and_drawn(
    model: Path, file: Path, tmp_path: Path, surgeon_says: Run
) -> None:
    sweep = ["--sweep", "prompt=8..32,new=2..4,ranks=2", "--compare", "ladder", "--layers", "0:4"]
    code, out, _ = surgeon_says("predict", model, "--hardware", file, *sweep, "-o", tmp_path / "results")
    assert code == 0
    table = pd.read_csv(tmp_path / "results" / "predict.csv")
    assert list(zip(table["prompt"], table["new"], strict=True))[::2] == [
        (prompt, new) for prompt in (8, 16, 32) for new in (2, 4)
    ]
    assert out.startswith("small on round: 2 ranks, wire, float32\n")
    assert out.splitlines()[3].split()[:4] == ["program", "prompt", "new", "first"]
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert surgeon_says("report", tmp_path / "results", "-o", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "ladder, prompt 32: " in page
    assert "4 new" in page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hardware", "h100-sxn"], "there is no hardware 'h100-sxn'; did you mean 'h100-sxm'?"),
        (["--ranks", "200"], "200 ranks cannot share this model, whose layers have 8 heads"),
        (["--dtype", "bf16"], "there is no dtype 'bf16'; did you mean 'bfloat16'?"),
        (["--dtype", "float16"], "no figure of FLOP/s in float16"),
        (["--ranks", "2", "--link", "wier"], "round has no link 'wier'; did you mean 'wire'?"),
        (
            ["--ranks", "8", "--per-node", "2", "--network", "nett"],
            "no network between nodes 'nett'; did you mean",
        ),
        (["--sweep", "rank=1..4"], "there is no 'rank' to sweep; did you mean 'ranks'?"),
        (["--sweep", "ranks=4..1"], "ranks=4..1: a range goes from at least 1 upwards"),
        (["--sweep", "ranks=few"], "'ranks=few' is no range; write e.g. ranks=1..64"),
        (
            ["--compare", "laddder"],
            "there is no model folder laddder, nor a variant of a model; did you mean 'ladder'?",
        ),
        (["--program", "A9"], "A9 is out of range"),
        (
            ["--compare", "tracks:2", "--layers", "0:4", "--ranks", "3"],
            "error: tracks:2: the 8 heads and 4 KV heads of A0 do not divide into 3 slices",
        ),
        (["--compare", "lp", "--layers", "0:9"], "error: lp of layers 0:9: "),
        (
            ["--compare", "upper-bound", "--layers", "0:4"],
            "layers are those that variants change, and none is compared; compare one, such as lp, or leave",
        ),
        (["--draft", "A0 F0", "--layers", "0:4"], "layers are those that variants change, and none"),
        (["--link", "nvlnk"], "has no link 'nvlnk'"),
        (
            ["--prompt", "5000"],
            "prompt and output together are 5008 tokens, and small has 4096 positions",
        ),
        (["--low-rank", "all"], "there is no way 'all' of sharing factors"),
        (["--draft", "lp", "--compare", "lp"], "draft does not look at compare; leave one of them out"),
        (
            ["--draft", "lp", "--layers", "0:4", "--acceptance", "1.5"],
            "an acceptance is a chance from 0 to 1, not 1.5",
        ),
        (
            ["--draft", "lp", "--acceptance", "most"],
            "'most' is no chance; give acceptances from 0 to 1, e.g. 0.6,0.8",
        ),
        (
            ["--draft", "upper-bound"],
            "there are no drafts 'upper-bound'; give a program over the model's weights",
        ),
        (["--draft", "A0 F0 A9"], "A9 is out of range"),
        (["--acceptance", "0.8"], "--acceptance is for a draft; give a draft, too"),
    ],
)
def test_bad_input_is_refused(
    options: list[str], said: str, model: Path, file: Path, surgeon_says: Run
) -> None:
    code, out, err = surgeon_says("predict", model, "--hardware", file, *LOAD, *options)
    assert (code, out) == (1, "")
    assert said in err


def test_what_does_not_fit_says_what_would(model: Path, tmp_path: Path, surgeon_says: Run) -> None:
    tight = tmp_path / "tight.yaml"
    tight.write_text(ROUND.replace("memory: 1e12", "memory: 6e5"))
    code, _, err = surgeon_says("predict", model, "--hardware", tight, *LOAD)
    assert code == 1
    assert "small in float32 on 1 rank with batch 1 and texts of 28 tokens needs" in err
    assert "round has 552 KB for it; 2 ranks would do for batch 1" in err
    code, _, err = surgeon_says(
        "predict", model, "--hardware", tight, *LOAD, "--ranks", 2, "--batch", 64
    )
    assert code == 1
    assert "texts fit on 2 ranks" in err


def test_a_file_that_lacks_a_figure_says_which(model: Path, tmp_path: Path, surgeon_says: Run) -> None:
    path = tmp_path / "half.yaml"
    path.write_text(ROUND.replace("  bandwidth: 1e9\n", ""))
    code, _, err = surgeon_says("predict", model, "--hardware", path)
    assert code == 1
    assert "half.yaml: line 3: the figure device.bandwidth is missing; add it" in err


@pytest.mark.thorough
def test_a_recipe_in_a_process_of_its_own(model: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.yaml").write_text(
        f'surgeon: 1\nmodel: {model}\noperations:\n  - pair: {{layers: "0:4"}}\n'
    )
    code = "import sys; from surgeon.commands.app import main; sys.exit(main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        "predict",
        "pairs.yaml",
        "--hardware",
        "a100-sxm",
        "--ranks",
        "2",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("small on a100-sxm: 2 ranks, nvlink, float32, prompt 1024, 512 new\n")
    assert "4+2" in done.stdout  # four steps, the embedding's collective and the head's
