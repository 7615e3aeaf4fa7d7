"""`surgeon heal` as users call it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.checkpoint.codas import read_codas
from surgeon.checkpoint.tensor_file import verify
from surgeon.models.edit import program_of
from tests.commands.conftest import Run
from tests.furnished import check, furnish

RECIPE = """\
surgeon: 1
model: {model}
operations:
  - {operation}
"""
QUICK = (
    "--window",
    16,
    "--eval-tokens",
    64,
    "--batch",
    2,
    "--steps",
    3,
    "--evaluate-every",
    2,
    "--learning-rate",
    0.01,
)


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    path = tmp_path / "long.txt"
    path.write_text(" ".join(f"{number} sheep and {number * 7 % 31} dogs" for number in range(150)))
    return path


@pytest.fixture
def heal(surgeon_says: Run, tiny_checkpoint: Path, long_text: Path, tmp_path: Path) -> Any:
    """Heals a recipe of one operation, or whatever is given, into the folder "healed"."""

    def run(operation: str | Path, *arguments: object, output: str = "healed") -> tuple[int, str, str]:
        what: Any = operation
        if isinstance(operation, str):
            what = tmp_path / "recipe.yaml"
            what.write_text(RECIPE.format(model=tiny_checkpoint, operation=operation))
        return surgeon_says(
            "heal", what, "--data", long_text, *QUICK, "-o", tmp_path / output, *arguments
        )

    return run


def test_a_recipe_is_healed_and_written(
    heal: Any, surgeon_says: Run, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    code, out, err = heal('pair: {layers: "1:3"}')
    assert (code, out.strip()) == (0, str(tmp_path / "healed"))
    assert "edited sublayers; trained on 96 tokens" in err
    assert [
        line.split()[0] for line in err.splitlines() if "perplexity" in line and "tokens" in line
    ] == [
        "original",
        "edited",
        "healed",
    ]
    assert "proof: the program is the recipe's" in err
    folder, run = tmp_path / "healed", tmp_path / "healed.run"
    report = json.loads((folder / "surgeon.json").read_text())
    assert (report["form"], report["source"]["model"]) == ("fused", "tiny-llama")
    assert report["program"] == "A0 F0 [A1 A2] [F1 F2] A3 F3"
    assert report["trained"]["steps"] == 3
    assert report["trained"]["data"] == "long.txt"
    assert str(tmp_path) not in (folder / "surgeon.json").read_text()
    assert verify(folder, folder / "surgeon.json") > 3
    record = json.loads((run / "run.json").read_text())
    assert record["healed"] == report["trained"]["healed"]
    assert not list(run.glob("checkpoint-*"))
    ids = torch.arange(2, 60)[None]
    edited = surgeon.edit(surgeon.load(tiny_checkpoint), report["program"])
    assert not torch.allclose(
        surgeon.load(folder)(input_ids=ids).logits, edited(input_ids=ids).logits, atol=1e-3
    )
    assert surgeon_says("show", folder)[0] == 0
    assert heal('pair: {layers: "1:3"}')[2].startswith("error: ")  # it is there already


@pytest.mark.thorough
def test_layers_that_run_again_stay_one_set_of_weights(
    heal: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """In the healed checkpoint, and in one that is trained on from it."""
    assert heal('repeat: {layers: "1:3"}', "--steps", 1)[0] == 0
    assert heal(tmp_path / "healed", "--steps", 1, "--teacher", tiny_checkpoint, output="again")[0] == 0
    original = load_file(tiny_checkpoint / "model.safetensors")
    for folder in (tmp_path / "healed", tmp_path / "again"):
        report, written = (
            json.loads((folder / "surgeon.json").read_text()),
            load_file(folder / "model.safetensors"),
        )
        assert (report["form"], report["program"]) == ("program", "A0 F0 A1 F1 A2 F2 A1 F1 A2 F2 A3 F3")
        assert written.keys() == original.keys()
        changed = {
            name.split(".")[2] for name in written if not torch.equal(written[name], original[name])
        }
        assert changed == {"1", "2"}


def test_the_whole_of_it_by_options(heal: Any, tmp_path: Path) -> None:
    arguments = (
        "--train",
        "all",
        "--distill",
        "both",
        "--temperature",
        2,
        "--text-weight",
        0.1,
        "--seed",
        3,
    )
    more = (
        "--schedule",
        "cosine",
        "--warmup",
        1,
        "--micro-batch",
        1,
        "--trainer-arg",
        "gradient_checkpointing=true",
    )
    code, _, err = heal(
        'ladder: {layers: "2:4"}', *arguments, *more, "--form", "program", "--dtype", "bfloat16"
    )
    assert code == 0, err
    assert "all weights, distilled from the original" in err
    settings = json.loads((tmp_path / "healed.run" / "run.json").read_text())["settings"]
    wanted = {"logits": 1, "hidden": 10, "text": 0.1, "temperature": 2, "kept": None}
    assert settings["distillation"] == wanted
    assert (settings["seed"], settings["warmup"], settings["schedule"]) == (3, 1, "cosine")
    assert str(program_of(surgeon.load(tmp_path / "healed"))).startswith("A0 F0 A1 F1 ")


def test_an_edited_checkpoint_is_healed_again(heal: Any, tmp_path: Path, tiny_checkpoint: Path) -> None:
    assert (
        heal('tracks: {layers: "0:4", depth: 2, count: 2}', "--teacher-top", 9, "--distill", "logits")[0]
        == 0
    )
    code, _, err = heal(tmp_path / "healed", "--teacher", tiny_checkpoint, output="again")
    assert code == 0, err
    first, again = (
        json.loads((tmp_path / name / "surgeon.json").read_text()) for name in ("healed", "again")
    )
    assert again["program"] == first["program"]
    assert again["source"] == first["source"]
    assert again["trained"]["edited"]["perplexity"] == pytest.approx(
        first["trained"]["healed"]["perplexity"], rel=1e-4
    )


def test_a_fused_checkpoint_trains_as_pairs(heal: Any, tmp_path: Path) -> None:
    assert heal('pair: {layers: "1:3"}', "--lora", 2)[0] == 0
    code, _, err = heal(tmp_path / "healed", output="again")
    assert code == 0, err
    assert "original" not in err  # it is not known where it lies
    report = json.loads((tmp_path / "again" / "surgeon.json").read_text())
    assert (report["form"], report["program"]) == ("fused", "A0 F0 [A1 A2] [F1 F2] A3 F3")


def test_adapters_of_slices_are_merged(heal: Any) -> None:
    assert heal('tracks: {layers: "0:4", depth: 2, count: 2}', "--lora", 2)[0] == 0


def test_an_adapter_is_kept_apart(heal: Any, tmp_path: Path) -> None:
    code, _, err = heal('pair: {layers: "1:3"}', "--lora", 2, "--keep-adapter")
    assert code == 0, err
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "healed" / "base", trust_remote_code=True)
    adapted = PeftModel.from_pretrained(base, tmp_path / "healed" / "adapter").eval()
    assert heal('pair: {layers: "1:3"}', "--lora", 2, output="merged")[0] == 0
    ids = torch.arange(2, 60)[None]
    merged = surgeon.load(tmp_path / "merged")(input_ids=ids).logits
    assert torch.allclose(adapted(input_ids=ids).logits, merged, atol=1e-4)


@pytest.mark.thorough
def test_conversations_are_healed_on_by_their_answers(
    surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    data, template, recipe = (tmp_path / name for name in ("chat.jsonl", "chat.jinja", "recipe.yaml"))
    said = [{"role": role, "content": f"{role} of the dog"} for role in ("user", "assistant")]
    data.write_text("\n".join(json.dumps({"messages": said * (1 + number % 2)}) for number in range(12)))
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}")
    recipe.write_text(RECIPE.format(model=tiny_checkpoint, operation='pair: {layers: "1:3"}'))
    little = (*QUICK, "--steps", 1, "--tokens", 5000, "--window", 64)
    arguments = ("heal", recipe, "--data", data, *little, "-o", tmp_path / "healed")
    code, _, err = surgeon_says(*arguments)
    assert (code, "chat.jsonl:1 is a conversation, and the tokenizer has no chat template" in err) == (
        1,
        True,
    )
    code, _, err = surgeon_says(
        *arguments, "--chat-template", template, "--preset", "ladder", "--show-row"
    )
    assert code == 0, err
    assert re.search(r"of the [\d,]+ tokens to train on, padding among them, [\d,]+ are learned\n", err)
    assert "\n[user] user of the dog</s>\u27e6[assistant] assistant of the dog</s>\u27e7" in err
    assert "warmup 200; the paper's data is BAAI/Infinity-Instruct:7M:train" in err
    assert "predicted tokens of" in err
    assert "left out 6 answers behind a window's end (of 12 rows read)" in err
    assert json.loads((tmp_path / "healed.run" / "run.json").read_text())["data_left_out"] == {
        "answers_cut": 6
    }


def test_the_original_writes_the_text(
    surgeon_says: Run, tiny_checkpoint: Path, long_text: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=tiny_checkpoint, operation='prune: {layers: "1:2"}'))
    settings = (
        *QUICK,
        "--steps",
        20,
        "--batch",
        8,
        "--learning-rate",
        0.003,
        "--seed",
        3,
        "--self-temperature",
        0.9,
    )
    said = ("heal", recipe, "--data", "self", *settings, "-o", tmp_path / "healed")
    code, _, err = surgeon_says(*said, "--separator", "x")
    assert (code, "a separator divides text that is read, and self is written" in err) == (1, True)
    code, _, err = surgeon_says(
        "heal", recipe, "--data", "self", "--preset", "ladder", "-o", tmp_path / "healed"
    )
    assert (code, "say how much by tokens, or give steps" in err) == (1, True)
    code, _, err = surgeon_says(*said, "--eval-data", long_text)
    assert code == 0, err
    assert "distilled from the original; trained on 2,560 tokens of self, measured on" in err
    record = json.loads((tmp_path / "healed.run" / "run.json").read_text())
    assert record["healed"]["divergence"] < 0.9 * record["edited"]["divergence"]
    assert record["settings"]["distillation"]["logits"] == 1
    written = record["written"]
    kept = (tmp_path / "healed.run" / "self" / "texts.jsonl").read_text().splitlines()[1:]
    assert (written["seed"], written["temperature"]) == (3, 0.9)
    assert (written["model_hash"], written["start"]) == (surgeon.open(tiny_checkpoint).hash, 0)
    assert written["tokens"] == sum(len(json.loads(line)["tokens"]) for line in kept) >= 2560
    report = json.loads((tmp_path / "healed" / "surgeon.json").read_text())
    assert (report["trained"]["data"], report["trained"]["written"]) == ("self", written)
    assert "distilled from the original; the original wrote self" in " ".join(
        (tmp_path / "healed" / "README.md").read_text().split()
    )
    code, _, err = surgeon_says(*said, "--steps", 40, "--overwrite")
    assert (code, "is of another run: its steps was 20, and now it is 40" in err) == (1, True)
    assert (
        len((tmp_path / "healed.run" / "self" / "texts.jsonl").read_text().splitlines()) == len(kept) + 1
    )
    code, _, err = surgeon_says(
        "heal", tmp_path / "healed", "--data", "self", *QUICK, "-o", tmp_path / "again"
    )
    assert (
        code,
        "the original is to write the text, and is not known; name it as the teacher" in err,
    ) == (1, True)


def test_presets_are_said(heal: Any) -> None:
    code, _, err = heal('pair: {layers: "1:3"}', "--preset", "lp")
    assert code == 0, err
    assert (
        "preset lp (Layer Parallelism, section 5 and table 2): scope edited, batch 2, learning_rate 0.01"
        in err
    )


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        ('pair: {layers: "1:3"}', ("--preset", "pl"), "unknown preset 'pl'; known: lp, ladder"),
        ('pair: {layers: "1:3"}', ("--temperature", 2), "--temperature says how to distil"),
        ('pair: {layers: "1:3"}', ("--keep-adapter",), "there is none; add --lora RANK"),
        (
            'tracks: {layers: "0:4", depth: 2, count: 2}',
            ("--lora", 2, "--keep-adapter"),
            "do not keep the adapter",
        ),
        ('pair: {layers: "1:3"}', ("--trainer-arg", "bf17=true"), "did you mean 'bf16'"),
        ('pair: {layers: "1:3"}', ("--batch", 500), "fewer than one batch of 500"),
        (
            'pair: {layers: "1:3"}',
            ("--distill", "hidden", "--teacher-top", 5),
            "need the original in memory",
        ),
        ('pair: {layers: "1:3"}', ("--schedule", "linaer"), "linaer"),
        (
            'pair: {layers: "1:3"}',
            ("--self-temperature", 2),
            "--self-temperature is of text that the original writes",
        ),
        ('pair: {layers: "1:3"}', ("--eval-data", "self"), "self is written to train on"),
    ],
)
def test_what_does_not_fit_is_refused(
    operation: str, arguments: Any, message: str, heal: Any, tmp_path: Path
) -> None:
    code, out, err = heal(operation, *arguments)
    assert (code, out) == (1, "")
    assert message in " ".join(err.split())
    assert err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "healed").exists()


def test_an_unedited_model_needs_an_edit(heal: Any, tiny_checkpoint: Path) -> None:
    code, _, err = heal(tiny_checkpoint)
    assert code == 1
    assert "no sublayer is edited; train all" in err
    assert "tokens of" not in err  # before a text is read


def test_a_pruned_checkpoint_is_healed_where_it_was_cut(heal: Any, tmp_path: Path) -> None:
    assert heal('prune: {layers: "1:2"}')[0] == 0
    assert json.loads((tmp_path / "healed" / "surgeon.json").read_text())["form"] == "plain"
    code, _, err = heal(tmp_path / "healed", output="again")
    assert code == 0, err
    assert (
        json.loads((tmp_path / "again" / "surgeon.json").read_text())["program"] == "A0 F0 A2 F2 A3 F3"
    )


def test_an_edited_checkpoint_without_a_record_is_refused(
    heal: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    surgeon.edit(surgeon.load(tiny_checkpoint), "A0 F0 >A1 >F1").save_pretrained(tmp_path / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "saved" / name).write_bytes((tiny_checkpoint / name).read_bytes())
    code, _, err = heal(tmp_path / "saved")
    assert code == 1
    assert "has no surgeon.json that says of what; heal the recipe" in err


def test_racks_are_healed_one_by_one(heal: Any, surgeon_says: Run, tmp_path: Path) -> None:
    """Codas lie beside an ordinary checkpoint of the recipe's program."""
    code, out, err = heal("pair: {layers: '0:2'}", "--racks", "0:2,2:4", "--coda", 2)
    assert (code, out.strip()) == (0, str(tmp_path / "healed")), err
    assert "all weights; trained on" in err
    assert "rack 0:2: perplexity by its coda " in err
    assert "proof: the program is the recipe's" in err
    report = json.loads((tmp_path / "healed" / "surgeon.json").read_text())
    assert (report["form"], report["program"]) == ("fused", "[A0 A1] [F0 F1] A2 F2 A3 F3")
    assert (
        report["trained"]["method"]
        == "all weights, rack by rack (layers 0:2, 2:4) with codas of 2 layers"
    )
    assert [each["layers"] for each in report["trained"]["racks"]["each"]] == ["0:2", "2:4"]
    said = " ".join(surgeon_says("show", tmp_path / "healed")[1].split())
    assert "of 2 layers for every rack but the last; racks of the layers 0:2, 2:4" in said
    run = tmp_path / "healed.run"
    assert json.loads((run / "run.json").read_text())["healed"] == report["trained"]["healed"]
    for name in ("training.csv", "held_out.csv"):
        assert (run / name).read_text() == (run / "rack-1" / name).read_text()
        assert (run / name).read_text() != (run / "rack-0" / name).read_text()
    assert not list(run.rglob("*.safetensors"))
    codas = read_codas(tmp_path / "healed")
    assert codas is not None
    assert codas.nodes == (2, 6)
    assert surgeon_says("show", tmp_path / "healed", tmp_path / "healed")[0] == 0
    code, _, err = surgeon_says("report", run, "-o", tmp_path / "page.html")
    assert code == 0, err
    assert "rack by rack (layers 0:2, 2:4)" in (tmp_path / "page.html").read_text()


@pytest.mark.thorough
def test_racks_in_processes_come_to_the_same(heal: Any, tmp_path: Path) -> None:
    """The same weights and figures, distilled from the original, and nothing is left but tables."""
    results = []
    for output, more in (("healed", ()), ("at-once", ("--rack-processes", "--rack-ahead", 2))):
        given = ("--racks", "0:2,2:4", "--distill", "both", *more)
        code, out, err = heal("pair: {layers: '0:2'}", *given, output=output)
        assert (code, out.strip()) == (0, str(tmp_path / output)), err
        report = json.loads((tmp_path / output / "surgeon.json").read_text())
        assert report["trained"]["method"].startswith(
            "all weights, distilled from the original, rack by rack"
        )
        codas = read_codas(tmp_path / output)
        assert codas is not None
        results.append(
            (report["trained"]["healed"], report["trained"]["edited"], load_weights(tmp_path / output))
        )
    (healed, edited, weights), (other_healed, other_edited, other_weights) = results
    assert (healed, edited) == (other_healed, other_edited)
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    run = tmp_path / "at-once.run"
    assert (run / "rack-0" / "timeline.csv").is_file()
    assert not list(run.rglob("*.safetensors"))


def load_weights(folder: Path) -> dict[str, Any]:
    return {name: one for path in folder.rglob("*.safetensors") for name, one in load_file(path).items()}


def test_racks_by_hand(heal: Any, tmp_path: Path) -> None:
    """Prepared, and said how to start them."""
    by_hand = ("--racks", "0:2,2:4", "--racks-by-hand", "--average", 2)
    code, out, err = heal("pair: {layers: '0:2'}", *by_hand)
    assert code == 0, err
    run = tmp_path / "healed.run"
    assert out.splitlines() == [
        f"python -m surgeon.training.racks.process {run} 0 --meet HOST0:PORT",
        f"python -m surgeon.training.racks.process {run} 1 --meet HOST0:PORT",
    ]
    assert sorted(path.name for path in (run / "start").iterdir()) == [
        "rack-0.safetensors",
        "rack-1.safetensors",
    ]
    assert not (tmp_path / "healed").exists()
    code, out, err = heal("pair: {layers: '0:2'}", *by_hand, "--rack-replicas", 2, output="two")
    assert code == 0, err
    assert out.splitlines()[1] == (
        f"torchrun --standalone --nproc-per-node 2 -m surgeon.training.racks.process {tmp_path / 'two.run'} 1 "
        "--meet HOST0:PORT"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rack-processes",), "add --racks, or drop it"),
        (("--racks", "0:2,2:4", "--average", 2), "add --rack-processes, or drop it"),
        (("--racks", "0:2,2:4", "--rack-replicas", 2), "add --rack-processes, or drop it"),
        (("--racks", "0:2,2:4", "--rack-processes", "--rack-replicas", 0), "at least 1 process, not 0"),
        (("--racks", "0:2,2:4", "--distill", "logits"), "distil both, or hidden"),
        (
            ("--racks", "0:2,2:4", "--average", "often", "--rack-processes"),
            "never, always, or every N steps",
        ),
        (("--racks", "0:2"), "the racks end before layer 2"),
        (("--racks", "0:1,1:4"), "would cut through [A0 A1]"),
        (("--racks", "0:2,2:4", "--coda", 3), "deeper than the last rack"),
        (("--racks", "0:2,2:4", "--train", "edited"), "train all weights"),
        (("--racks", "0:2,2:4", "--keep-adapter"), "leave --keep-adapter out"),
        (("--coda", 1), "add --racks, or drop it"),
    ],
)
def test_racks_that_cannot_be(arguments: Any, message: str, heal: Any, tmp_path: Path) -> None:
    code, _, err = heal("pair: {layers: '0:2'}", *arguments)
    assert (code, err.count("error:")) == (1, 1)
    assert message in " ".join(err.split())
    assert not (tmp_path / "healed").exists()


@pytest.mark.parametrize(
    ("operation", "form", "more"),
    [
        ('prune: {layers: "1:2"}', "plain", ()),
        ('pair: {layers: "1:3"}', "fused", ()),
        ('ladder: {layers: "1:3"}', "program", ("--lora", 2, "--keep-adapter")),
        ('pair: {layers: "0:2"}', "fused", ("--racks", "0:2,2:4")),
    ],
)
def test_what_lies_beside_the_weights_goes_along(
    heal: Any, tiny_checkpoint: Path, tmp_path: Path, operation: str, form: str, more: tuple[object, ...]
) -> None:
    furnish(tiny_checkpoint)
    code, _, err = heal(operation, *more)
    assert code == 0, err
    assert "assets/, notes.txt (not known to belong to a model)" in err
    target = tmp_path / "healed" / ("base" if "--keep-adapter" in more else "")
    if "--racks" in more:
        assert {path.name for path in (target / "codas").iterdir()} == {
            "codas.json",
            "rack-0.safetensors",
        }
        (target / "codas").rename(tmp_path / "codas")
    check(tiny_checkpoint, target, form)


def test_what_cannot_go_along_is_refused_before_it_is_trained(
    heal: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tiny_checkpoint / "LICENSE").symlink_to(tmp_path / "elsewhere")
    code, _, err = heal('prune: {layers: "1:2"}')
    assert code == 1
    assert "LICENSE is a link to " in err
    assert "trained on" not in err


def test_a_form_that_cannot_be_written_is_refused_before_training(heal: Any, tmp_path: Path) -> None:
    code, _, err = heal('pair: {layers: "1:3"}', "--steps", 1, "--form", "plain")
    assert code == 1
    assert "error: this program cannot be written in the plain form" in err
    assert not (tmp_path / "healed.run").exists()
