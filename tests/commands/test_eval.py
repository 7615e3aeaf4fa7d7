"""`surgeon eval` as a user meets it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surgeon.language.recipe import read_recipe
from surgeon.opened import open_model
from tests.commands.conftest import Run
from tests.waiting import PATIENCE

ANSWERS = ["jumps over", "sleeping", "it"]
CHOICES = [
    {"query": f"Question: What does fox {i} do?", "choices": ANSWERS[: 2 + i % 2], "gold": i % 2}
    for i in range(6)
]
CONTINUATIONS = [
    {"context": "The quick brown fox", "continuation": "jumps"},
    {"context": "the", "continuation": "dog"},
]
NUMBERS = [
    {"context": f"{i} and 1", "answer": i + 1, "chain_of_thought": f"it is {i + 1}"} for i in range(3)
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(surgeon_says: Run, tiny_checkpoint: Path) -> Run:
    """Runs the command on a tiny model, with more arguments."""
    return lambda *arguments, model=tiny_checkpoint: surgeon_says("eval", model, *arguments)


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    """Three task files, with commas between."""
    files = {"choices": CHOICES, "words": CONTINUATIONS, "sums": NUMBERS}
    return ",".join(str(write(tmp_path / f"{name}.jsonl", rows)) for name, rows in files.items())


def test_a_table_and_files(run: Run, tasks: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    out = tmp_path / "out"
    code, said, err = run("--tasks", tasks, "--num-fewshot", 1, "--limit", 2, "-o", out, "--log-samples")
    assert code == 0, err
    _, *table, json_file, csv_file = said.splitlines()
    assert table[0].split() == [
        "task",
        "metric",
        "better",
        "value",
        "±",
        "standard",
        "error",
        "shots",
        "rows",
    ]
    assert list(dict.fromkeys(line.split()[0] for line in table[1:])) == ["choices", "words", "sums"]
    assert {line.split()[-1] for line in table[1:]} == {"2"}
    assert max(map(len, table)) <= 80
    assert {Path(json_file).parent, Path(csv_file).parent} == {out}
    results = json.loads(Path(json_file).read_text())
    record = results["surgeon"]
    assert record["model"] == results["model_name"] == str(tiny_checkpoint)
    assert record["program"] == "A0 F0 A1 F1 A2 F2 A3 F3"
    digests = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in tasks.split(",")}
    assert record["files"] == digests
    assert (results["config"]["limit"], results["n-shot"]["sums"]) == (2, 1)
    names = {path.name.split("_")[1] for path in out.glob("samples_*.jsonl")}
    assert names == {"choices", "words", "sums"}
    assert "scoring: done" in err
    assert "generating: done" in err


def test_the_same_command_goes_on(run: Run, tasks: str, tmp_path: Path) -> None:
    _, first, _ = run("--tasks", tasks, "-o", tmp_path / "out")
    (answers,) = (tmp_path / "out").glob("answers-*.jsonl")
    known = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(known[:3]) + known[3][:10])
    _, again, _ = run("--tasks", tasks, "-o", tmp_path / "out")
    assert again.splitlines()[:-2] == first.splitlines()[:-2]
    assert sorted(answers.read_text().splitlines(keepends=True)) == sorted(known)
    assert len(list((tmp_path / "out").glob("results_*.json"))) == 2


def test_a_recipe_is_applied(run: Run, tasks: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  - prune: {{layers: '0:3'}}\n"
    )
    words = tmp_path / "words.jsonl"
    code, pruned, err = run("--tasks", words, "-o", tmp_path / "out", model=recipe)
    assert code == 0, err
    _, same, _ = run("--tasks", words, "--program", "A3 F3")
    _, original, _ = run("--tasks", words)
    assert pruned.splitlines()[:-2] == same.splitlines() != original.splitlines()
    record = json.loads(Path(pruned.splitlines()[-2]).read_text())["surgeon"]
    assert (record["program"], record["recipe"]) == ("A3 F3", read_recipe(recipe).to_yaml())
    assert tasks


@pytest.mark.thorough
def test_what_a_user_sees(tasks: str, tiny_checkpoint: Path) -> None:
    """In a process of its own: nothing of lm-eval's many words."""
    code = "import sys; from surgeon.commands.app import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "eval",
        str(tiny_checkpoint),
        "--tasks",
        tasks,
        "--num-fewshot",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 + 2 + 2 + 2
    shown = [line.partition(":")[0] for line in done.stderr.splitlines()]
    assert shown == ["loading tasks", "scoring", "generating"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--limit", "0"], "error: limit must be at least 1 row of each task, not 0"),
        (["--batch-size", "0"], "error: batch size must be at least 1, not 0"),
        (["--log-samples"], "error: --log-samples writes files; say where to by an output folder"),
        (["--device", "gpu"], "error: unknown device 'gpu'"),
        (["--program", "A0 F0 A7"], "error: A7 is out of range: the model's layers are 0 to 3"),
        (
            ["--num-fewshot", "6"],
            "choices.jsonl has 6 different rows: too few for 6 examples and one question",
        ),
        (["--apply-chat-template"], "error: the tokenizer has no chat template; leave the template out"),
        (["--tasks", "nothing.jsonl"], "error: there is no task file nothing.jsonl"),
    ],
)
def test_mistakes_take_one_line(run: Run, tasks: str, arguments: list[str], said: str) -> None:
    code, out, err = run("--tasks", tasks, *arguments)
    assert (code, out) == (1, "")
    assert said in err
    assert sum("error" in line for line in err.splitlines()) == 1


def test_a_damaged_file_names_its_line(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", CHOICES)
    path.write_text(path.read_text() + '{"query": "a", "choi')
    code, _, err = run("--tasks", path)
    assert code == 1
    assert f"error: {path}:7: not valid JSON" in err


def test_a_model_without_a_tokenizer(run: Run, tasks: str, tiny_checkpoint: Path) -> None:
    for path in tiny_checkpoint.glob("tokenizer*"):
        path.unlink()
    code, _, err = run("--tasks", tasks)
    assert code == 1
    assert "has no tokenizer that can be read" in err


def test_perplexity_and_divergence_on_a_text(run: Run, tiny_text: Path, tmp_path: Path) -> None:
    text = ("--data", tiny_text, "--tokens", 128, "--window", 32)
    code, said, err = run(*text)
    assert code == 0, err
    assert said.startswith("perplexity ")
    assert "divergence" not in said
    assert said.endswith("over 124 tokens\n")
    code, said, err = run(*text, "--program", "A0 F0 [A1 A2] [F1 F2] A3 F3", "-o", tmp_path / "out")
    assert code == 0, err
    record = json.loads((tmp_path / "out" / "text.json").read_text())
    assert f"divergence {record['divergence']:.3g}" in said
    assert record["divergence"] > 0.001
    assert (record["tokens"], record["window"], record["program"]) == (
        124,
        32,
        "A0 F0 [A1 A2] [F1 F2] A3 F3",
    )


def test_what_is_left_out_of_a_text_is_said_and_recorded(
    run: Run, tiny_text: Path, tmp_path: Path
) -> None:
    rows = [{"id": "a"}, {"id": "b", "text": None}, {"id": "c", "text": tiny_text.read_text()}]
    path, sizes = tmp_path / "rows.JSONL", ("--tokens", 128, "--window", 32)
    path.write_text("\ufeff" + "\r\n".join(map(json.dumps, rows)), encoding="utf-8")
    code, said, err = run("--data", path, *sizes, "-o", tmp_path / "out")
    assert code == 0, err
    assert said == run("--data", tiny_text, *sizes)[1]
    left_out = "1 row with null in column 'text', 1 row without column 'text' (of 3 rows read)"
    assert f"warning: {path}: left out the byte order mark at its start, {left_out}\n" in err
    record = json.loads((tmp_path / "out" / "text.json").read_text())
    assert record["data_column"] == "text"
    assert record["data_left_out"] == {"byte_order_marks": 1, "null_rows": 1, "rows_without_column": 1}


def test_divergence_from_another_model(run: Run, tiny_text: Path, tiny_checkpoint: Path) -> None:
    code, said, err = run(
        "--data", tiny_text, "--tokens", 64, "--window", 32, "--against", tiny_checkpoint
    )
    assert code == 0, err
    assert float(said.split("divergence ")[1].split()[0]) < 1e-8


def test_models_of_other_vocabularies_are_not_compared(run: Run, tiny_text: Path) -> None:
    code, _, err = run("--data", tiny_text, "--tokens", 64, "--window", 32, "--against", "demo")
    assert code == 1
    assert "divergence is told between models of one vocabulary" in err


def test_a_program_is_compared_with_that_of_the_checkpoint(
    surgeon_says: Run, tiny_text: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Of one that has a program of its own that is the model, not the layers that are stored."""
    recipe = tmp_path / "late.yaml"
    recipe.write_text(
        f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  - ladder: {{layers: '0:2'}}\n"
    )
    folder = tmp_path / "late"
    code, _, err = surgeon_says("export", recipe, "-o", folder, "--form", "program")
    assert code == 0, err
    dense, late = open_model(str(tiny_checkpoint)).program, open_model(str(folder)).program
    for program, same in ((late, True), (dense, False)):
        code, said, err = surgeon_says(
            "eval",
            folder,
            "--program",
            str(program),
            "--data",
            tiny_text,
            "--tokens",
            64,
            "--window",
            32,
        )
        assert code == 0, err
        assert (float(said.split("divergence ")[1].split()[0]) < 1e-8) == same


def test_a_text_or_tasks_are_needed(run: Run) -> None:
    code, _, err = run()
    assert (code, err) == (1, "error: there is nothing to measure; give tasks, data or both\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--data", "demo", "--limit", "8"],
            "--limit is for tasks; give tasks, too, or leave --limit out",
        ),
        (["--data", "demo", "--batch-size", "8"], "--batch-size is for tasks; give tasks, too"),
        (
            ["--tasks", "piqa", "--window", "64"],
            "--window is for data; give data, too, or leave --window out",
        ),
        (["--tasks", "piqa", "--against", "demo"], "--against is for data; give data, too"),
        # A user's own word is no parameter.
        (["--data", "demo", "--against", "log_samples"], "there is no model folder log_samples"),
    ],
)
def test_options_of_what_is_not_measured_are_refused(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert said in err


def test_a_recipe_with_calibrated_factors(
    run: Run, tmp_path: Path, tiny_checkpoint: Path, tiny_text: Path
) -> None:
    """Whitened factors lose less of the model's predictions on this text than plain ones of the same ranks."""
    divergences = {}
    for method in ("plain", "whitened"):
        calibration = f"{{data: {tiny_text}, tokens: 640, window: 32, after: 128}}"
        operation = (
            f"- lowrank: {{layers: '0:4', keep: 0.7, method: {method}, calibration: {calibration}}}"
        )
        recipe = tmp_path / f"{method}.yaml"
        recipe.write_text(f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  {operation}\n")
        out = tmp_path / method
        text = ("--data", tiny_text, "--window", 32, "--tokens", 128, "-o", out)
        code, _, err = run(*text, model=recipe)
        assert code == 0, err
        divergences[method] = json.loads((out / "text.json").read_text())["divergence"]
        assert (out / "factors").exists() == (method == "whitened")
    assert 0 < divergences["whitened"] < divergences["plain"]
    code, _, err = run(*text, "--against", recipe, model=recipe)
    assert code == 0, err
    assert json.loads((out / "text.json").read_text())["divergence"] < 1e-6, (
        "the same factors on both sides"
    )
