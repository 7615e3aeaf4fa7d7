"""Configurations of models from scratch: what they mean, and that every mistake names line, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.named import public
from surgeon.training.scratch.config import ScratchConfig, parse_config, read_config_file
from surgeon.training.settings import TrainSettings

GOOD = """\
surgeon: 1
model: {model_type: llama, hidden_size: 32, num_hidden_layers: 4, num_attention_heads: 4, rms_norm_eps: 1e-6}
tokenizer: some/tokenizer
operations:
  - ladder: {layers: "0:4"}
data: /somewhere/text.txt
eval_data: demo
window: 16
training: {steps: 30, batch: 4, learning_rate: 2e-3, schedule: linear, arguments: {weight_decay: 0.1, bf16: true}}
"""
RACKS = 'racks: {ranges: ["0:2", "2:4"], coda: 2, processes: true, average: 50, ahead: 2, replicas: 2}'
LADDER = 'operations:\n  - ladder: {layers: "0:4"}'


def test_what_it_says() -> None:
    config = parse_config(GOOD)
    assert config.model["rms_norm_eps"] == 1e-6
    assert config.recipe.program(4).sync_points(2) == 8
    assert str(config.recipe.program(4)).startswith(">A0 >F0")
    assert (config.window, config.eval_tokens, config.tokens) == (16, None, None)
    expected = {
        "steps": 30,
        "batch": 4,
        "learning_rate": 2e-3,
        "arguments": {"weight_decay": 0.1, "bf16": True},
    }
    assert config.settings == TrainSettings(scope="all", **expected)


def test_written_it_reads_the_same() -> None:
    for other in (LADDER, "program: A0 F0 [A1 F1]", "tracks: {count: 2, depth: 3}", RACKS):
        config = parse_config(GOOD.replace(LADDER, other))
        assert parse_config(config.to_yaml()) == config
    several = parse_config(
        GOOD.replace("data: /somewhere/text.txt", "data: {/a/b.txt: 3, c/: 1}\ndocuments: apart")
    )
    assert (several.data, several.documents) == ({"/a/b.txt": 3.0, "c/": 1.0}, "apart")
    assert parse_config(several.to_yaml()) == several
    published = parse_config(parse_config(GOOD).to_yaml(public))
    assert (published.data, published.tokenizer, published.eval_data) == (
        "text.txt",
        "some/tokenizer",
        "demo",
    )


def test_settings_can_be_others() -> None:
    config = parse_config(GOOD).with_settings(steps=7, seed=None, arguments={"fp16": False})
    assert (config.settings.steps, config.settings.seed) == (7, 0)
    assert config.settings.arguments == {"weight_decay": 0.1, "bf16": True, "fp16": False}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("surgeon: 1", "surgeon: 2", "configuration:1: configuration format 2 is not known; write surgeon: 1"),
        ("window:", "windwo:", "configuration:8: unknown key 'windwo'; did you mean 'window'?"),
        ("window: 16", "window: 1", "configuration:8: window: Input should be greater than or equal to 2, not 1"),
        ("window: 16", "window: wide", "configuration:8: window: Input should be a valid integer, not 'wide'"),
        ("tokenizer: some/tokenizer\n", "", "configuration:1: the key 'tokenizer' is missing"),
        ("model: {", "model: [", "configuration:2: not valid YAML"),
        ("data: /somewhere/text.txt", "data: 7", "configuration:6: data: it must be a text, or several with their"),
        ("data: /somewhere/text.txt", "data: {a: 0}", "configuration:6: data: the weight of a must be a number"),
        ("window: 16", "documents: part", "configuration:8: documents: documents cannot be 'part' in a window"),
        ("  - ladder", "  - lader", "configuration:5: unknown operation 'lader'; did you mean 'ladder'?"),
        ("data: /", "program: A0\ndata: /", "configuration:6: operations and program both say what the"),
        ("training: {", "training: {stesp: 3, ", "configuration:9: unknown key 'stesp'; did you mean 'steps'?"),
        ("batch: 4", "batch: 0", "configuration:9: training: batch must be at least 1, not 0"),
        ("2e-3", "-2e-3", "configuration:9: training: learning rate must be above 0, not -0.002"),
        ("batch: 4", "batch: 4, micro_batch: 3", "configuration:9: training: a batch of 4 windows is no multiple of a"),
        ("weight_decay", "weight_decy", "configuration:9: arguments: weight_decy is no argument of the Trainer"),
        ("weight_decay", "max_steps", "configuration:9: arguments: max_steps is decided by the run"),
        ("bf16: true", "bf16: maybe", "configuration:9: arguments: bf16=maybe cannot be read"),
        ("training: {", "training: 7 #", "configuration:9: training must be a mapping, not 7"),
        (LADDER, "program: A0 [F0", "configuration:4: program: "),
        ("data: /", "tracks: {count: 2, depth: 1}\ndata: /", "configuration:6: operations and tracks both say"),
        (LADDER, "tracks: {count: 1, depth: 1}", "configuration:4: tracks.count: Input should be greater than or"),
        (LADDER, "tracks: {count: 2, dept: 1}", "configuration:4: unknown key 'dept'; did you mean 'depth'?"),
        (LADDER, "tracks: {count: 2}", "configuration:4: tracks.depth: Field required"),
        ("data: /", 'racks: {ranges: ["0:4"]}\ndata: /', "configuration:6: racks.ranges: List should have at least 2"),
        ("data: /", "racks: {range: [], coda: 1}\ndata: /", "configuration:6: unknown key 'range'; did you mean"),
    ],
)  # fmt: skip
def test_mistakes_name_line_value_and_remedy(before: str, after: str, said: str) -> None:
    assert before in GOOD
    with pytest.raises(ValueError, match=".") as caught:
        parse_config(GOOD.replace(before, after, 1))
    assert str(caught.value).startswith(said)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no configuration .*none.yaml"):
        read_config_file(tmp_path / "none.yaml")
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model.json is no configuration; give a YAML file"):
        read_config_file(tmp_path / "model.json")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(
        ValueError, match=r"list.yaml:1: a configuration is a mapping with the keys surgeon, model, tok"
    ):
        read_config_file(tmp_path / "list.yaml")


def test_errors_that_are_found_later_know_the_line() -> None:
    config = parse_config(GOOD, "mine.yaml")
    assert str(config.error("oh", "model", "hidden_size")) == "mine.yaml:2: oh"
    assert str(config.error("oh", "training", "epochs")) == "mine.yaml:9: oh"
    assert str(config.error("oh", "nowhere")) == "mine.yaml:1: oh"
    plain = ScratchConfig({"model_type": "llama"}, "demo", "demo:train")
    assert str(plain.error("oh", "model")) == "configuration:1: oh"
