"""What a notebook calls: models that are opened without their weights, and passes with a result that has a type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model

import surgeon
from surgeon.commands.app import main
from surgeon.findings.exported import ExportRun
from surgeon.language.recipe import parse_recipe

PAIRED = "A0 F0 [A1 A2] [F1 F2] A3 F3"
TEXT = {"tokens": 128, "window": 32}
ARGUMENTS = ["--tokens", "128", "--window", "32"]


def test_a_model_is_opened_without_its_weights(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "surgeon.checkpoint.stored.Checkpoint.tensor", lambda *_: pytest.fail("weights were read")
    )
    model = surgeon.open(tiny_checkpoint)
    assert (model.num_layers, model.family.name, str(model.form)) == (4, "Llama", "plain")
    assert str(model.program) == "A0 F0 A1 F1 A2 F2 A3 F3"
    assert (model.own, model.label, model.public_name) == (
        None,
        tiny_checkpoint.name,
        tiny_checkpoint.name,
    )
    assert repr(model) == f"<surgeon.Model {tiny_checkpoint}: Llama, 4 layers, plain form>"
    assert surgeon.open("demo").label == "demo"


def test_a_recipe_shows_itself_as_text() -> None:
    text = 'surgeon: 1\nmodel: "demo"\noperations:\n  - pair: {layers: "2:4"}'
    assert repr(parse_recipe(text)) == text


def test_a_recipe_and_a_program_are_no_models(tmp_path: Path) -> None:
    for text, what in ((str(tmp_path / "a.yaml"), "a recipe"), ("A0 F0 [A1 A2]", "a program")):
        with pytest.raises(ValueError, match=f"is {what}, which is applied to a model"):
            surgeon.open(text)


def test_a_scan_is_what_its_command_writes(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    model = surgeon.open(tiny_checkpoint)
    found = surgeon.scan(model, tiny_text, tmp_path / "ours", operations=["prune"], layers="1:4", **TEXT)
    command = [
        "scan",
        str(tiny_checkpoint),
        "--data",
        str(tiny_text),
        "--operation",
        "prune",
        "--layers",
        "1:4",
    ]
    assert main([*command, *ARGUMENTS, "-o", str(tmp_path / "theirs")]) == 0
    assert (tmp_path / "ours/cells.csv").read_bytes() == (tmp_path / "theirs/cells.csv").read_bytes()
    assert list(found.cells["operation"].unique()) == ["prune"]
    assert len(found.cells) == 6
    assert [path.name for path in found.files] == ["cells.csv", "heatmap-prune.png"]
    assert repr(found) == f"<Scan of {tiny_checkpoint.name}: 6 rows, in {tmp_path / 'ours'}>"


def test_a_pass_goes_on_from_another(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    scan = surgeon.scan(tiny_checkpoint, tiny_text, tmp_path / "scan", operations=["prune"], **TEXT)
    found = surgeon.similarity(tiny_checkpoint, tiny_text, tmp_path / "alike", scan=scan, **TEXT)
    again = surgeon.similarity(
        tiny_checkpoint, tiny_text, tmp_path / "alike", scan=tmp_path / "scan", **TEXT
    )
    assert isinstance(found.proxies, pd.DataFrame)
    assert found.proxies.equals(again.proxies)
    assert found.record["scan"] == again.record["scan"]
    pages = [
        surgeon.report(runs, tmp_path / "page.html").table()
        for runs in ([scan, found], [tmp_path / "scan", found])
    ]
    assert pages[0].equals(pages[1])
    with pytest.raises(ValueError, match="was written to no folder"):
        surgeon.report(replace(scan, files=()))
    assert all(path.is_file() for path in found.files)
    with pytest.raises(ValueError, match="sensitivity is used with scan only"):
        surgeon.similarity(tiny_checkpoint, tiny_text, tmp_path / "x", sensitivity=tmp_path / "none")


def test_an_evaluation_of_a_program_is_against_the_model_itself(
    tiny_checkpoint: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = surgeon.evaluate(surgeon.edit(surgeon.open(tiny_checkpoint), pair="1:3"), tiny_text, **TEXT)
    assert found.text is not None
    assert found.text.knows("divergence")
    assert found.tasks is None
    assert dict(found.table()[["metric", "value"]].to_numpy()) == {
        "perplexity": found.text.perplexity,
        "divergence": found.text.divergence,
        "greedy_acceptance": found.text.greedy_acceptance,
        "sampled_acceptance": found.text.sampled_acceptance,
    }
    assert found.text.acceptance_keys == "verified"
    capsys.readouterr()
    command = [
        "eval",
        str(tiny_checkpoint),
        "--data",
        str(tiny_text),
        "--program",
        "A0 F0 [A1 A2] [F1 F2] A3 F3",
    ]
    assert main([*command, *ARGUMENTS]) == 0
    assert capsys.readouterr().out == f"{found}\n"


def test_texts_are_those_of_the_command(
    tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts, events = ["The quick brown fox", "went on sleeping:"], list[tuple[str, str]]()
    found = surgeon.generate(
        surgeon.open(tiny_checkpoint),
        prompts,
        max_new_tokens=6,
        on_event=lambda text, event: events.append((text.prompt, event.text)),
    )
    command = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main(["generate", str(tiny_checkpoint), *command, "--max-new-tokens", "6"]) == 0
    out, err = capfd.readouterr()
    assert out == "\n".join(
        f"==> {number} of 2: {text.prompt} <==\n{text.text}\n"
        for number, text in enumerate(found.texts, start=1)
    )
    assert str(found).splitlines()[0] == err.splitlines()[0] == "ranks    1 (cpu, shm, float32)"
    assert repr(found) == "<Generation: 2 texts on 1 rank>"
    assert list(found.table()["text"]) == [text.text for text in found.texts]
    for text in found.texts:
        assert "".join(piece for prompt, piece in events if prompt == text.prompt) == text.text
        assert text.usage.new == len(text.tokens)


def test_an_edited_model_runs_on_ranks_and_is_predicted(tiny_checkpoint: Path) -> None:
    model = surgeon.open(tiny_checkpoint)
    edited = surgeon.edit(model, pair="1:3")
    texts = [
        surgeon.generate(one, "The fox", max_new_tokens=6).texts[0].tokens for one in (edited, model)
    ]
    assert (
        texts[0] == surgeon.generate(model, "The fox", max_new_tokens=6, program=PAIRED).texts[0].tokens
    )
    assert texts[0] != texts[1]
    found = surgeon.predict(edited, "h100-sxm", prompt=8, new=4)
    assert found.cells[0].prediction is not None
    assert found.cells[0].prediction.plan.program == PAIRED
    whitened = surgeon.edit(
        model,
        lowrank={"layers": "0:4", "keep": 0.5, "method": "whitened", "calibration": {"data": "demo"}},
    )
    for call in (partial(surgeon.generate, prompts="the"), surgeon.serve):
        with pytest.raises(
            ValueError, match="factors, .* that its matrices alone do not tell; export it"
        ):
            call(whitened)
        with pytest.raises(ValueError, match="was edited, and has a program of its own"):
            call(edited, program=PAIRED)
    with pytest.raises(ValueError, match="has a program of its own"):
        surgeon.bench(edited, program=PAIRED)


def test_a_prompt_that_is_none_is_named(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="prompt 2: the prompt is not text"):
        surgeon.generate(tiny_checkpoint, ["the fox", "\udcff"])
    with pytest.raises(ValueError, match="there is nothing to go on from"):
        surgeon.generate(tiny_checkpoint, [])
    with pytest.raises(ValueError, match="second: the prompt is not text"):
        surgeon.generate(tiny_checkpoint, {"first": "the fox", "second": "\udcff"})


def test_a_model_is_edited_by_a_program_a_recipe_or_operations(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('surgeon: 1\nmodel: elsewhere\noperations:\n  - pair: {layers: "1:3"}\n')
    loaded, model = surgeon.load(tiny_checkpoint), surgeon.open(tiny_checkpoint)
    for given in (
        PAIRED,
        surgeon.Program.parse(PAIRED),
        recipe,
        str(recipe),
        surgeon.read_recipe(recipe),
    ):
        assert str(surgeon.program_of(surgeon.edit(loaded, given))) == PAIRED
        assert str(surgeon.edit(model, given).program) == PAIRED
    assert (
        str(surgeon.program_of(surgeon.edit(loaded, pair=range(1, 3), ladder="3:4")))
        == f"{PAIRED[:-5]}>A3 >F3"
    )
    ranked = surgeon.edit(
        model, pair=["0:2", "2:4"], lowrank={"layers": "0:1", "keep": 0.5, "weights": ["q"]}
    )
    assert str(ranked.program).startswith("[A0@q")
    for wrong, said in (
        ({}, "either by a program"),
        ({"pair": "1:9"}, "pair: layers 1:9 are out of range"),
    ):
        with pytest.raises(ValueError, match=said):
            surgeon.edit(loaded, **wrong)
    with pytest.raises(ValueError, match="unknown operation 'pairs'; did you mean 'pair'"):
        surgeon.edit(model, pairs="1:3")
    whitened = {"layers": "0:4", "keep": 0.5, "method": "whitened", "calibration": {"data": "demo"}}
    with pytest.raises(ValueError, match="its factors or units go by a text"):
        surgeon.edit(loaded, lowrank=whitened)


def test_a_recipe_on_a_model_with_a_program_of_its_own_starts_from_that(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    tracks = "{A0 F0 A1 F1 | A2 F2 A3 F3}"
    surgeon.edit(surgeon.load(tiny_checkpoint), tracks).save_pretrained(tmp_path)
    expected = "{A0 F0 | A2 F2 A3 F3}"
    assert str(surgeon.edit(surgeon.open(tmp_path), prune="1:2").program) == expected
    loaded = surgeon.load(tmp_path)
    for _ in range(2):
        assert str(surgeon.program_of(surgeon.edit(loaded, prune="1:2"))) == expected


def test_whatever_a_model_is_can_be_exported(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model, recipe = surgeon.open(tiny_checkpoint), tmp_path / "recipe.yaml"
    recipe.write_text('surgeon: 1\nmodel: no/such\noperations:\n  - pair: {layers: "1:3"}\n')
    edited = surgeon.edit(model, pair="1:3")
    found = [
        surgeon.export(recipe, tmp_path / "recipe", original=tiny_checkpoint),
        surgeon.export(edited, tmp_path / "edited"),
        surgeon.export(str(tiny_checkpoint), tmp_path / "program", program=PAIRED),
        surgeon.export(surgeon.edit(surgeon.load(tiny_checkpoint), pair="1:3"), tmp_path / "memory"),
    ]
    assert {(one.form, str(one.program), one.depth) for one in found} == {("fused", PAIRED, 3)}
    assert all(one.proof.exact < 1e-4 and "Proof: on 128 random tokens" in str(one) for one in found)
    assert found[0].table().loc[0, ["form", "depth", "syncs", "program"]].tolist() == [
        "fused",
        3,
        6,
        PAIRED,
    ]
    page = surgeon.report([one.folder for one in found[1:3]], tmp_path / "page.html")
    assert repr(page) == f"ReportPage(file={tmp_path / 'page.html'!r})"
    assert repr(ExportRun.read(found[1].folder)).startswith("<ExportRun of ")
    weights = [(one.folder / "model.safetensors").read_bytes() for one in found]
    assert weights == weights[:1] * 4
    with pytest.raises(ValueError, match="program is of no use for a model in memory"):
        surgeon.export(surgeon.load(tiny_checkpoint), tmp_path / "no", program=PAIRED)
    with pytest.raises(ValueError, match="adapter is of no use for a model that is known by its files"):
        surgeon.export(edited, tmp_path / "no", adapter=True)


def test_an_adapter_is_exported_beside_its_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    edited = surgeon.edit(surgeon.load(tiny_checkpoint), ladder="2:4")
    adapted = get_peft_model(edited, LoraConfig(target_modules=["q_proj"]))
    found = surgeon.export(adapted.eval(), tmp_path / "both", adapter=True)
    assert (found.folder, found.form) == (tmp_path / "both" / "base", "program")
    assert (tmp_path / "both" / "adapter" / "adapter_model.safetensors").is_file()
    with pytest.raises(ValueError, match="keeps its form and dtype"):
        surgeon.export(adapted, tmp_path / "no", adapter=True, dtype="bfloat16")


def test_a_server_says_where_it_is(tiny_checkpoint: Path) -> None:
    def stop(serving: object) -> None:
        raise InterruptedError(str(serving))

    with pytest.raises(
        InterruptedError, match=f"serving {tiny_checkpoint.name} at http://127.0.0.1:.*\nroom for "
    ):
        surgeon.serve(tiny_checkpoint, port=0, on_start=stop)
    with pytest.raises(ValueError, match="the API key is empty"):
        surgeon.serve(tiny_checkpoint, api_key=" ")
    with pytest.raises(ValueError, match="is no origin of web pages"):
        surgeon.serve(tiny_checkpoint, cors_origins=["here"])


def test_what_is_no_model_is_said_by_every_function(tiny_checkpoint: Path, tmp_path: Path) -> None:
    edited, loaded = (
        surgeon.edit(surgeon.open(tiny_checkpoint), pair="1:3"),
        surgeon.load(tiny_checkpoint),
    )
    assert repr(edited) == f"<surgeon.EditedModel {tiny_checkpoint}: {PAIRED} of Llama>"
    # Of the model as it is stored.
    assert str(surgeon.edit(edited, prune="1:2").program) == "A0 F0 A2 F2 A3 F3"
    recipe = parse_recipe('surgeon: 1\nmodel: "demo"\noperations: []')
    functions: list[Callable[[Any], object]] = [
        surgeon.open,
        lambda model: surgeon.scan(model, "demo", tmp_path / "scan"),
        lambda model: surgeon.search(model, "demo", tmp_path / "search"),
        lambda model: surgeon.generate(model, "the"),
        lambda model: surgeon.serve(model, port=0),
        lambda model: surgeon.bench(model, rounds=1),
    ]
    for call in functions:
        for wrong, said in (
            (loaded, "not by LlamaForCausalLM"),
            (3, "(int|EditedModel, not|Model, not) 3"),
        ):
            with pytest.raises(ValueError, match=said):
                call(wrong)
    for call in functions[:3]:
        with pytest.raises(ValueError, match="was edited, and this takes"):
            call(edited)
    for call in functions[:5]:
        with pytest.raises(ValueError, match="is a recipe, which is applied to a model"):
            call(recipe)
    with pytest.raises(ValueError, match="is a recipe, which is applied to a model"):
        surgeon.generate(tmp_path / "a.yaml", "the")
    with pytest.raises(ValueError, match="not by LlamaForCausalLM"):
        surgeon.evaluate(cast("Any", loaded), "demo")
    with pytest.raises(ValueError, match="not by Program"):
        surgeon.export(cast("Any", edited.program), tmp_path / "no")
    with pytest.raises(ValueError, match="no adapter of peft"):
        surgeon.export(loaded, tmp_path / "no", adapter=True)
    with pytest.raises(ValueError, match="3 is no model that is loaded or open"):
        surgeon.edit(cast("Any", 3), "A0 F0")
    with pytest.raises(ValueError, match="not by int 3"):
        surgeon.load(cast("Any", 3))
    assert list(tmp_path.iterdir()) == [tiny_checkpoint]


def test_layers_and_counts_that_are_none_are_said_at_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model, there = surgeon.open(tiny_checkpoint), tmp_path / "no"
    for layers, said in ((range(0, 4, 2), "leaves layers out"), ((0, 4), "not "), (3, "not 3")):
        with pytest.raises(ValueError, match=said):
            surgeon.edit(
                model, prune=cast("Any", {"layers": layers} if isinstance(layers, int) else layers)
            )
        with pytest.raises(ValueError, match=said):
            surgeon.scan(model, "demo", there, layers=cast("Any", layers))
    calls: dict[str, Callable[..., object]] = {
        "workers": surgeon.scan,
        "batch": surgeon.scan,
        "iterations": surgeon.sensitivity,
        "trials": surgeon.search,
        "heal": surgeon.search,
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
            call(model, "demo", there, **{name: 0})
    with pytest.raises(ValueError, match="num_fewshot must be at least 0, not -1"):
        surgeon.evaluate(model, tasks="x.jsonl", num_fewshot=-1)
    with pytest.raises(FileNotFoundError, match=r"there is no task file .*x\.jsonl"):
        surgeon.evaluate(model, tasks=tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="unknown operation 'prun' to scan; did you mean 'prune'"):
        surgeon.scan(model, "demo", there, operations="prun")
    for name, wrong, said in (
        ("budget", 13, "budget must be a text or a sequence, not 13"),
        ("budget", {"depth": 3}, "budget must be a text"),
        ("space", ["pair", "pears"], "unknown space 'pears'"),
        ("ranks", 0, "ranks must be at least 1, not 0"),
    ):
        with pytest.raises(ValueError, match=said):
            surgeon.search(model, "demo", there, **cast("Any", {name: wrong}))
    with pytest.raises(ValueError, match="rank 1.5 is above the full rank"):
        surgeon.spectrum(model, "demo", there, ranks=[0.5, 1.5])
    for ranks, said in (
        (0, "ranks must be at least 1, not 0"),
        ("2", "ranks must be a number or RankOptions, not '2'"),
    ):
        for run in (surgeon.bench, surgeon.serve, partial(surgeon.generate, prompts="the")):
            with pytest.raises(ValueError, match=said):
                cast("Any", run)(model, ranks=ranks)
    with pytest.raises(ValueError, match="prompt 2: a prompt is text, not int 3"):
        surgeon.generate(model, cast("Any", ["the", 3]))
    with pytest.raises(ValueError, match="rounds must be at least 1, not 0"):
        surgeon.calibrate(model, tmp_path / "here.yaml", ranks=1, rounds=0)
    with pytest.raises(ValueError, match="there are no runs to report on"):
        surgeon.report([], there)
    for sweep, said in (
        ({"rank": [1]}, "there is no 'rank' to sweep; did you mean 'ranks'"),
        ({"batch": []}, "no values"),
    ):
        with pytest.raises(ValueError, match=said):
            surgeon.predict("demo", "h100-sxm", sweep=cast("Any", sweep))
    predicted = surgeon.predict("demo", "h100-sxm", prompt=8, new=8, sweep=cast("Any", {"ranks": 2}))
    assert repr(predicted) == "<Predictions of demo: 1 row>"
    with pytest.raises(ValueError, match="port must be at least 0, .* not 99999"):
        surgeon.serve(model, port=99999)
    with pytest.raises(ValueError, match="batch is empty"):
        surgeon.bench(model, batch=[])
    with pytest.raises(ValueError, match="rounds must be at least 1, not 0"):
        surgeon.bench(model, rounds=0)
    with pytest.raises(ValueError, match="unknown dtype torch.bfloat16; did you mean 'bfloat16'"):
        surgeon.export(model, there, dtype=cast("Any", torch.bfloat16))
    assert not there.exists()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: surgeon.generate("demo", cast("Any", 5)),
            "prompts must be a text, a sequence or a mapping",
        ),
        (
            lambda: surgeon.heal("demo", cast("Any", 5), "no"),
            "data must be a text, a path, a sequence or a",
        ),
        (
            lambda: surgeon.predict("demo", "h100-sxm", ranks=cast("Any", "2")),
            "ranks must be a number or Deployment, not '2'",
        ),
        (lambda: surgeon.scan(cast("Any", None)), "model must be a text, a path or Model, not None"),
    ],
)
def test_a_value_of_another_type_is_named(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_how_a_trained_model_is_stored_is_checked_before_it_is_trained(tmp_path: Path) -> None:
    for call in (surgeon.heal, surgeon.train):
        for wrong, said in (
            ({"form": "fusd"}, "unknown form 'fusd'"),
            ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ):
            given = ("demo", "demo:train") if call is surgeon.heal else ("none.yaml",)
            with pytest.raises(ValueError, match=said):
                cast("Any", call)(*given, tmp_path / "no", **wrong)
    with pytest.raises(ValueError, match=r"settings must be TrainSettings or a text, not"):
        surgeon.heal("demo", "demo:train", tmp_path / "no", settings=cast("Any", {"steps": 2}))
    assert not list(tmp_path.iterdir())


def test_a_file_where_a_folder_is_to_be_is_named(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for run in (surgeon.scan, surgeon.similarity):
        with pytest.raises(
            NotADirectoryError, match=f"cannot be a folder: a file is in the way .*{tmp_path / 'file'}"
        ):
            run(tiny_checkpoint, tiny_text, tmp_path / "file", **TEXT)  # type: ignore[operator]
    with pytest.raises(
        NotADirectoryError, match=f"deeper cannot be a folder: .* .{tmp_path / 'file'}.$"
    ):
        surgeon.predict("demo", "h100-sxm", prompt=8, new=8, output=tmp_path / "file" / "deeper")
