"""What a configuration builds: the same random weights whatever the program, and what cannot be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from surgeon.models.edit import program_of
from surgeon.training.scratch.build import Blueprint, blueprint
from surgeon.training.scratch.config import parse_config
from tests.tiny_models import tiny_tokenizer

SIZES = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def built(tokenizer: Path) -> Any:
    """Checks a configuration with these entries of a model, and these lines."""

    def check(entries: str = f"model_type: llama, {SIZES}", *lines: str) -> Blueprint:
        text = [
            "surgeon: 1",
            f"model: {{{entries}}}",
            f"tokenizer: {tokenizer}",
            "window: 16",
            "data: text",
            *lines,
        ]
        return blueprint(parse_config("\n".join(text)))

    return check


def test_weights_follow_from_the_seed_and_not_from_the_program(built: Any) -> None:
    plain, ladder = (
        built(),
        built(f"model_type: llama, {SIZES}", "program: A0 F0 >A1 >F1 [A2 A3] [F2 F3]"),
    )
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(num_hidden_layers=4, vocab_size=len(tiny_tokenizer()), **sizes)
    expected = dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters())
    for each in (plain, ladder):
        found = dict(each.build().named_parameters())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert each.parameters == sum(value.numel() for value in expected.values())
    assert str(program_of(ladder.build())) == "A0 F0 >A1 >F1 [A2 A3] [F2 F3]"
    other = built(f"model_type: llama, {SIZES}", "training: {seed: 1}").build()
    assert not torch.equal(other.lm_head.weight, expected["lm_head.weight"])


def test_native_tracks_are_derived_from_the_dense_model(built: Any) -> None:
    found = built(f"model_type: llama, {SIZES}", "tracks: {count: 2, depth: 2}")
    assert (found.architecture.num_hidden_layers, found.architecture.num_attention_heads) == (8, 2)
    assert found.architecture.vocab_size == len(tiny_tokenizer())
    assert str(found.program).startswith("{A0 F0 A1 F1 | A2 F2 A3 F3} {A4 F4 ")
    assert program_of(found.build()) == found.program


def test_the_tokenizer_gives_the_vocabulary(built: Any) -> None:
    tokens = tiny_tokenizer()
    plain = built().architecture
    assert (plain.vocab_size, plain.bos_token_id, plain.eos_token_id) == (
        len(tokens),
        tokens.bos_token_id,
        tokens.eos_token_id,
    )
    assert plain.pad_token_id is None
    assert built(f"model_type: llama, {SIZES}, vocab_size: 512").architecture.vocab_size == 512


@pytest.mark.parametrize("model_type", ["opt", "gpt2", "gpt_neox", "gemma2", "phi3"])
def test_any_family(model_type: str, built: Any) -> None:
    names = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4"
    own = {
        "opt": ", ffn_dim: 48, word_embed_proj_dim: 32",
        "gemma2": ", head_dim: 8, num_key_value_heads: 2",
    }
    steps = {"gpt_neox": "[A0 F0] >[A1 F1]"}.get(model_type, "A0 F0 >A1 >F1")
    found = built(f"model_type: {model_type}, {names}{own.get(model_type, '')}", f'program: "{steps}"')
    model = found.build()
    ids = torch.arange(3, 19)[None]
    assert model(input_ids=ids).logits.shape == (1, 16, len(tiny_tokenizer()))


def test_what_a_run_goes_by(built: Any) -> None:
    known = built().identity()
    assert known["task"] == "train"
    assert known["program"] == "A0 F0 A1 F1 A2 F2 A3 F3"
    assert known["model"]["hidden_size"] == 32
    assert known == built(f"{SIZES}, model_type: llama").identity()
    assert known != built(f"model_type: llama, {SIZES}, initializer_range: 0.03").identity()
    assert "transformers_version" not in known["model"]


@pytest.mark.parametrize(
    ("entries", "lines", "said"),
    [
        (SIZES, (), "configuration:2: model: model_type is missing; write model_type: llama, or "),
        (
            "model_type: lama",
            (),
            "configuration:2: model: model_type 'lama' is not supported; did you mean 'llama'?",
        ),
        ("model_type: bert", (), "configuration:2: model: model_type 'bert' is not supported; known: "),
        (
            "model_type: surgeon_fused",
            (),
            "configuration:2: model: model_type 'surgeon_fused' is not supported",
        ),
        (
            "model_type: llama, hiden_size: 8",
            (),
            "configuration:2: model: Llama has no entry 'hiden_size'; did",
        ),
        (
            "model_type: llama, hidden_size: 0",
            (),
            "configuration:2: model: hidden_size must be a whole number above 0",
        ),
        (
            "model_type: llama, hidden_size: wide",
            (),
            "configuration:2: model: hidden_size must be a whole number above",
        ),
        (
            "model_type: qwen2, hidden_size: 30, num_attention_heads: 4, num_key_value_heads: 4",
            (),
            "configuration:2: model: 4 heads do not divide a width of 30; make hidden_size a multiple of 4, such",
        ),
        (
            "model_type: llama, hidden_size: 32, num_attention_heads: 4, num_key_value_heads: 3",
            (),
            "configuration:2: model: 3 KV heads do not divide 4 heads; use one of 1, 2, 4",
        ),
        (
            "model_type: llama, hidden_size: 36, num_attention_heads: 4",
            (),
            "configuration:2: model: RoPE requires an even rotary dimension, but got `head_dim`=9",
        ),
        (
            f"model_type: llama, {SIZES}, vocab_size: 97",
            (),
            "configuration:2: model: vocab_size 97 is too small for the tokenizer ",
        ),
        (
            f"model_type: llama, {SIZES}, vocab_size: 512, eos_token_id: 50256",
            (),
            "configuration:2: model: eos_token_id 50,256 is beyond a vocabulary of 512; leave it out",
        ),
        (
            f"model_type: llama, {SIZES}, max_position_embeddings: 8",
            (),
            "configuration:4: window: 16 tokens are more than the model's 8 positions; use a smaller window, or",
        ),
        (
            f"model_type: llama, {SIZES}, hidden_act: swish2",
            (),
            "configuration:2: model: it cannot be built: ",
        ),
        (f"model_type: llama, {SIZES}, attention_bias: 7", (), "configuration:2: model: "),
        (
            f"model_type: llama, {SIZES}",
            ('racks: {ranges: ["0:2", "2:4"], average: 3}',),
            "configuration:6: racks: average needs all racks at the same time; add processes: true, or leave it out",
        ),
        (
            f"model_type: llama, {SIZES}",
            ('racks: {ranges: ["0:2", "2:4"], replicas: 2}',),
            "configuration:6: racks: replicas are processes that share a rack; add processes: true, or leave them out",
        ),
        (
            f"model_type: llama, {SIZES}",
            ('racks: {ranges: ["0:2", "2:4"], average: often}',),
            "configuration:6: racks: codas are averaged never, always, or every N steps with N from 1, not 'often'",
        ),
        (
            f"model_type: llama, {SIZES}",
            ('racks: {ranges: ["0:2", "3:4"]}',),
            "configuration:6: racks: racks leave a gap: 3:4 begins at layer 3, and should at 2",
        ),
        (
            f"model_type: llama, {SIZES}",
            ('racks: {ranges: ["0:2", "2:4"]}', "program: A0 F0 A1 F1 >A2 >F2 A3 F3"),
            "configuration:6: racks: ",
        ),
        (
            f"model_type: llama, {SIZES}",
            ('racks: {ranges: ["0:2", "2:4"]}', "training: {patience: 2}"),
            "configuration:7: training: racks are trained side by side",
        ),
        (
            f"model_type: llama, {SIZES}",
            ("tracks: {count: 4, depth: 2}",),
            "configuration:6: tracks: 4 heads and 2 KV heads do not divide among 4 tracks; 2 tracks can",
        ),
        (
            f"model_type: llama, {SIZES}",
            ("program: A0 F9",),
            "configuration:6: program: F9 is out of range: the model's layers are 0 to 3",
        ),
        (
            f"model_type: llama, {SIZES}",
            ("operations:", '  - ladder: {layers: "0:9"}'),
            "configuration:7: ladder: layers 0:9 are out of range",
        ),
        (
            f"model_type: llama, {SIZES}",
            ("operations:", '  - lowrank: {layers: "0:4", keep: 0.5, method: whitened}'),
            "configuration:7: lowrank: method whitened goes by what a trained model computes",
        ),
        (
            f"model_type: llama, {SIZES}",
            ("operations:", '  - width: {layers: "0:4", heads: 0.5, by: random}'),
            "configuration:7: width: this model begins with random weights, of which some are as good as others; leave",
        ),
        (
            f"model_type: llama, {SIZES}",
            ("operations:", '  - width: {layers: "0:4", neurons: 0.5, calibration: {data: text.txt}}'),
            "configuration:7: width: this model begins with random weights, of which some are as good as others; leave",
        ),
        (
            f"model_type: llama, {SIZES}",
            ("operations:", '  - width: {layers: "0:4", heads: [1], neurons: 0.5}'),
            "configuration:7: width: which heads are listed says nothing of random weights; give their number, heads:",
        ),
    ],
)
def test_what_cannot_be_built(entries: str, lines: tuple[str, ...], said: str, built: Any) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        built(entries, *lines)
    assert str(caught.value).startswith(said)


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    text = f"surgeon: 1\nmodel: {{model_type: llama}}\ntokenizer: {tmp_path}\ndata: demo\n"
    with pytest.raises(
        ValueError, match=r"configuration:3: tokenizer: .* has no tokenizer that can be read"
    ):
        blueprint(parse_config(text))
    with pytest.raises(FileNotFoundError, match=r"configuration:3: tokenizer: there is no model folder"):
        blueprint(parse_config(text.replace(str(tmp_path), f"{tmp_path}/none")))


def test_too_little_text(built: Any, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a few words that are soon over, " * 8)
    entries = f"model_type: llama, {SIZES}"
    short = built(entries, "training: {batch: 500}", "eval_tokens: 16")
    config = parse_config(short.config.to_yaml().replace('data: "text"', f"data: {path}"), "mine.yaml")
    with pytest.raises(
        ValueError,
        match=r"mine.yaml:4: data: the training text has \d+ windows, fewer than one batch of",
    ):
        blueprint(config).texts()
