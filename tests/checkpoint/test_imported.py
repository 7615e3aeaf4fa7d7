"""Models that others decomposed or pruned, written here as their software does, and computed in plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import surgeon
from surgeon.models.edit import edit
from surgeon.opened import load
from surgeon.quality.data import load_windows
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from tests.checkpoint.helpers import plain_logits, relative_error
from tests.reference import Reference
from tests.runtime.on_ranks import logits_in_chunks
from tests.selection import case
from tests.stored import configure
from tests.tiny_models import tiny_model, tiny_tokenizer

IDS = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(0))
BY_LAYER = {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
Tensors = dict[str, Tensor]
# A folder, a model with the same matrices, and the program that the folder has.
Written = tuple[Path, Any, str]


def rewrite(folder: Path, tensors: Tensors, **entries: Any) -> None:
    """Replace a folder's tensors, and some entries of its config.json."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps(config))


def factors(matrix: Any, rank: int) -> tuple[Tensor, Tensor]:
    """A first and a second factor, whose product the matrix becomes."""
    u, s, v = torch.linalg.svd(matrix.data, full_matrices=False)
    first, second = s[:rank, None] * v[:rank], u[:, :rank].clone()
    matrix.data.copy_(second @ first)
    return first, second


def svd_llm(folder: Path) -> Written:
    """All matrices of layers 0 and 2 as q_u_proj and q_v_proj, and so on."""
    model = tiny_model("llama", dropout=0.0)
    tensors = dict(model.state_dict())
    for layer in (0, 2):
        for name in (
            "self_attn.q",
            "self_attn.k",
            "self_attn.v",
            "self_attn.o",
            "mlp.gate",
            "mlp.up",
            "mlp.down",
        ):
            whole = f"model.layers.{layer}.{name}_proj.weight"
            first, second = factors(model.get_parameter(whole), 6)
            del tensors[whole]
            tensors[whole.replace("_proj", "_v_proj")], tensors[whole.replace("_proj", "_u_proj")] = (
                first,
                second,
            )
    model.save_pretrained(folder)
    rewrite(folder, tensors)
    layers = ("A{0}@q6,k6,v6,o6 F{0}@gate6,up6,down6", "A{0} F{0}")
    return folder, model, " ".join(layers[layer % 2].format(layer) for layer in range(4))


def asvd(folder: Path) -> Written:
    """Matrices with biases as BLinear and ALinear, which has the bias."""
    model = tiny_model("qwen2", dropout=0.0)
    tensors = dict(model.state_dict())
    for name, rank in (("model.layers.1.self_attn.q_proj", 5), ("model.layers.3.mlp.down_proj", 7)):
        first, second = factors(model.get_parameter(f"{name}.weight"), rank)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.BLinear.weight": first, f"{name}.ALinear.weight": second}
        if f"{name}.bias" in tensors:
            tensors[f"{name}.ALinear.bias"] = tensors.pop(f"{name}.bias")
    model.save_pretrained(folder)
    rewrite(folder, tensors)
    return folder, model, "A0 F0 A1@q5 F1 A2 F2 A3 F3@down7"


def palu(folder: Path) -> Written:
    """Keys and values of all layers as VT, and U for each of two heads."""
    model = tiny_model("llama", dropout=0.0, attention_bias=True)
    tensors = dict(model.state_dict())
    for layer in range(4):
        for role in ("k", "v"):
            name = f"model.layers.{layer}.self_attn.{role}_proj"
            matrix, bias = model.get_parameter(f"{name}.weight"), tensors.pop(f"{name}.bias")
            pairs = [factors(half, 3 + head) for head, half in enumerate(matrix.data.chunk(2))]
            del tensors[f"{name}.weight"]
            tensors[f"{name}.VT.weight"] = torch.cat([first for first, _ in pairs])
            for head, (_, second) in enumerate(pairs):
                tensors |= {
                    f"{name}.U.{head}.weight": second,
                    f"{name}.U.{head}.bias": bias.chunk(2)[head],
                }
    model.save_pretrained(folder)
    rewrite(
        folder,
        tensors,
        model_type="palullama",
        architectures=["PaluLlamaForCausalLM"],
        head_wise_ranks={},
    )
    return folder, model, " ".join(f"A{layer}@k7,v7 F{layer}" for layer in range(4))


def deci(folder: Path, **config: Any) -> Written:
    """No attention in layer 1, no MLP in layer 2, fewer neurons in layer 3, whose heads share one KV head."""
    model = tiny_model("llama", dropout=0.0, **config)
    tensors = dict(model.state_dict())
    gone = ("1.self_attn", "1.input_layernorm", "2.mlp", "2.post_attention_layernorm")
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.removeprefix("model.layers.").startswith(tuple(f"{one}." for one in gone))
    }
    mlp, attention = (f"model.layers.3.{part}" for part in ("mlp", "self_attn"))
    for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
        matrix = model.get_parameter(f"{mlp}.{name}_proj.weight")
        tensors[f"{mlp}.{name}_proj.weight"] = matrix.data.narrow(dim, 0, 20).clone()
        matrix.data.narrow(dim, 20, 28).zero_()  # neurons that are not there
    for name in ("k", "v"):
        matrix = model.get_parameter(f"{attention}.{name}_proj.weight").data
        tensors[f"{attention}.{name}_proj.weight"] = matrix[:8].clone()
        matrix[8:] = matrix[:8]
    whole = {"no_op": False, "replace_with_linear": False, "n_heads_in_group": 2}
    wide = {"no_op": False, "intermediate_size": 48}
    none = {"no_op": True, "n_heads_in_group": None, "ffn_mult": None}
    blocks = [
        {"attention": whole, "ffn": wide},
        {"attention": none, "ffn": wide},
        {"attention": whole, "ffn": none},
        {"attention": whole | {"n_heads_in_group": 4}, "ffn": wide | {"intermediate_size": 20}},
    ]
    model.save_pretrained(folder)
    rewrite(
        folder,
        tensors,
        model_type="nemotron-nas",
        architectures=["DeciLMForCausalLM"],
        auto_map={"AutoConfig": "configuration_decilm.DeciLMConfig"},
        block_configs=blocks,
        num_key_value_heads=None,
        intermediate_size=None,
    )
    return folder, model, "A0 F0 F1 A2 A3 F3#20"


def kimi(folder: Path) -> Written:
    """DeepSeek-V3 under another name, by code that is not there."""
    model = tiny_model("deepseek_v3", dropout=0.0)
    model.save_pretrained(folder)
    configure(
        folder, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    )
    return folder, model, "A0 F0 A1 F1 A2 F2 A3 F3"


def by_layer(folder: Path) -> Written:
    """A GPT-2 whose scores are divided by the numbers of layers."""
    model = tiny_model("gpt2", dropout=0.0, tie_word_embeddings=False, **BY_LAYER)
    model.save_pretrained(folder)
    return folder, model, "A0 F0 A1 F1 A2 F2 A3 F3"


STYLES: dict[str, Callable[[Path], Written]] = {
    one.__name__: one for one in (svd_llm, asvd, palu, deci, kimi, by_layer)
}
FORMS = dict.fromkeys(("svd_llm", "asvd", "palu"), "program") | {
    "deci": "fused",
    "kimi": "plain",
    "by_layer": "plain",
}
all_styles = pytest.mark.parametrize("style", STYLES)


@pytest.mark.parametrize(
    ("program", "form"),
    [
        ("A1 F1 A3 F3", "plain"),
        ("A0 F0 [A1 A3] [F1 F3] A2 F2", "fused"),
        ("A0 >F0 A3@q5 F1 {A2/2:0 | A2/2:1}", "program"),
    ],
)
def test_attentions_that_depend_on_the_number_of_their_layer(
    program: str, form: str, tmp_path: Path
) -> None:
    folder, model, _ = by_layer(tmp_path / "source")
    with torch.no_grad():
        expected = plain_logits(model, program, IDS)
        assert relative_error(edit(load(folder), program)(IDS).logits, expected) < 1e-5
        assert surgeon.export(folder, tmp_path / "out", program=program).form == form
        assert relative_error(load(tmp_path / "out")(IDS).logits, expected) < 1e-5
    with pytest.raises(ValueError, match="give its folder, or what surgeon.load makes of it"):
        edit(model, program)


@torch.no_grad()
def plainly(model: Any, program: str, ids: Tensor = IDS) -> Tensor:
    """The logits of a program over a model's own layers, by plain PyTorch."""
    reference = Reference(model)
    stream = reference.embed(ids)
    order = [(name[0], int(name[1:].partition("@")[0].partition("#")[0])) for name in program.split()]
    for kind, layer in order:
        stream = stream + (reference.attention if kind == "A" else reference.feed_forward)(layer, stream)
    return reference.logits(stream)


@pytest.fixture
def written(style: str, tmp_path: Path) -> tuple[Path, str, Tensor]:
    folder, model, program = STYLES[style](tmp_path / style)
    return folder, program, plainly(model, program)


@all_styles
def test_it_opens_as_a_program_and_computes_what_it_did(written: tuple[Path, str, Tensor]) -> None:
    folder, program, expected = written
    model = surgeon.open(folder)
    assert str(model.program) == program
    with torch.no_grad():
        torch.testing.assert_close(load(model)(IDS).logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("style", [case(one, default=one in ("palu", "deci", "kimi")) for one in STYLES])
def test_it_is_exported_as_ours(written: tuple[Path, str, Tensor], style: str, tmp_path: Path) -> None:
    folder, program, expected = written
    exported = surgeon.export(folder, tmp_path / "out", program=program)
    assert exported.form == FORMS[style]
    assert exported.proof.exact < 1e-5
    ours = surgeon.open(exported.folder)
    assert not ours.checkpoint.imported
    with torch.no_grad():
        torch.testing.assert_close(load(ours)(IDS).logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("style", [case(one, default=one == "deci") for one in STYLES])
def test_ranks_run_it(written: tuple[Path, str, Tensor]) -> None:
    folder, _, expected = written
    with Ranks(RankOptions(2)) as ranks:
        answers = ranks.call(logits_in_chunks, make_plan(folder, 2, IDS.shape[1]), [IDS])
    assert all(torch.allclose(found, expected, atol=1e-4) for found, _, _ in answers)


@pytest.mark.parametrize("style", [case(one, default=one == "svd_llm") for one in STYLES])
def test_what_was_changed_in_memory_is_exported(
    written: tuple[Path, str, Tensor], tmp_path: Path
) -> None:
    folder, program, expected = written
    model: Any = edit(load(folder), program)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        assert torch.allclose(model(IDS).logits, 2 * expected, atol=1e-4)
    surgeon.export(model, tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(
            load(tmp_path / "out")(IDS).logits, 2 * expected, atol=1e-4, rtol=1e-4
        )


@torch.no_grad()
def test_layers_that_are_whole_are_scanned(tmp_path: Path, tiny_text: Path) -> None:
    tokenizer = tiny_tokenizer()
    folder, plain, program = deci(tmp_path / "deci", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    found = surgeon.scan(folder, tiny_text, tmp_path / "out", operations=["prune"], tokens=64, window=16)
    ids = load_windows(tokenizer, str(tiny_text), 16, 64).ids
    (cell,) = found.cells.to_dict("records")  # of layer 0, the only one that is whole
    own, pruned = (
        plainly(plain, one, ids)[:, :-1].double().log_softmax(-1)
        for one in (program, program[len("A0 F0 ") :])
    )
    divergence = (own.exp() * (own - pruned)).sum(-1).mean().item()
    assert (cell["first"], cell["last"], cell["divergence"]) == (
        0,
        0,
        pytest.approx(divergence, rel=1e-4),
    )


@pytest.mark.parametrize(
    "style", [case(one, default=one == "palu") for one in ("svd_llm", "asvd", "palu", "deci")]
)
def test_others_models_are_not_searched(style: str, tmp_path: Path) -> None:
    folder, _, program = STYLES[style](tmp_path / style)
    with pytest.raises(ValueError, match=f"search the one that it was made of .* '{program[:20]}"):
        surgeon.search(folder, tmp_path / "no text", tmp_path / "out", space="drop", trials=1)


def test_by_its_configuration_alone(tmp_path: Path) -> None:
    folder, _, program = deci(tmp_path)
    assert str(surgeon.open(folder, weights=False).program) == program
    blocks = [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": mult}} for mult in (12.0, 24.0)]
    entries = json.loads((folder / "config.json").read_text()) | {"block_configs": blocks}
    (folder / "config.json").write_text(json.dumps(entries))
    # 2 / 3 of 12 times 32, up to a multiple of 256.
    assert str(surgeon.open(folder, weights=False).program) == "A0 F0#256 A1 F1"


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([], "an object for each layer"),
        (
            [{"attention": {"replace_with_linear": True}, "ffn": {}}],
            "layer 0 has replace_with_linear: True",
        ),
        (
            [{"attention": {"num_key_value_heads": 2}}, {"attention": {"num_key_value_heads": 3}}],
            "layer 0 has 4 heads",
        ),
    ],
)
def test_layers_that_no_program_has_are_refused(blocks: list[Any], said: str, tmp_path: Path) -> None:
    folder, _, _ = deci(tmp_path)
    entries = json.loads((folder / "config.json").read_text()) | {"block_configs": blocks}
    (folder / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=said):
        surgeon.open(folder)


def test_factors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder, _, _ = svd_llm(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_u_proj.weight"] = torch.zeros(32, 5)
    rewrite(folder, tensors)
    with pytest.raises(ValueError, match="gives 6 features, and what follows it .* takes 5"):
        surgeon.open(folder)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    folder, _, _ = asvd(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "llama_whitening_only_0.8.pt")
    for what in (folder, folder / "llama_whitening_only_0.8.pt"):
        with pytest.raises(
            FileNotFoundError, match=r"is a pickle, .* its state_dict\(\) with safetensors"
        ):
            surgeon.open(what)
