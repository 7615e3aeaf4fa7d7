"""Quantised checkpoints opened and loaded: they compute what a dense one of the same numbers does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.checkpoint.stored import Checkpoint
from surgeon.opened import load, load_streamed, open_model, streamed_layers
from tests.checkpoint.helpers import logits_of, save_source
from tests.quantised import SCHEMES, quantise_folder
from tests.selection import case

ROWS = "the weights of .* stored as {} are dequantised as they are read, and computed with in float32"


def quantised(folder: Path, scheme: str, family: str = "llama", layers: int = 2) -> tuple[Path, Path]:
    """A quantised model, and a dense one of the same numbers."""
    save_source(folder / "quantised", family, layers)
    return quantise_folder(folder / "quantised", scheme, folder / "dense"), folder / "dense"


@pytest.mark.parametrize(
    "scheme", [case(scheme, default=scheme in ("awq", "nf4 nested")) for scheme in SCHEMES]
)
def test_loaded_it_computes_what_its_numbers_do(scheme: str, tmp_path: Path) -> None:
    folder, dense = quantised(tmp_path, scheme)
    with pytest.warns(
        UserWarning, match="are dequantised as they are read, and computed with in float32"
    ):
        model = load(folder)
    expected = load(dense)
    torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=1e-5, atol=1e-5)
    assert not hasattr(model.config, "quantization_config")
    assert model.name_or_path == str(folder)
    stored, other = open_model(folder), open_model(dense)
    assert (stored.parameters, stored.program, stored.dtype) == (
        other.parameters,
        other.program,
        torch.float32,
    )
    assert stored.size < other.size
    assert stored.hash != other.hash


def test_its_names_are_those_of_its_architecture(tmp_path: Path) -> None:
    folder, dense = quantised(tmp_path, "gptq")
    found, expected = Checkpoint(folder), Checkpoint(dense)
    assert sorted(found.names()) == sorted(expected.names())
    for name in expected.names():
        assert name in found
        assert (found.shape(name), found.dtype(name)) == (expected.shape(name), expected.dtype(name))
        torch.testing.assert_close(found.tensor(name), expected.tensor(name))
    name = "model.layers.0.mlp.up_proj.weight"
    assert "model.layers.0.mlp.up_proj.scales" not in found
    assert found.raw.names() == [*load_file(folder / "model.safetensors")]
    assert torch.equal(torch.cat([*found[name].rows(7)]), found.tensor(name))
    assert found[name].num_bytes == sum(
        found.raw[part].num_bytes for part in found.quantised[name].parts.values()
    )
    assert found.weights_hash() == Checkpoint(folder).weights_hash()


def test_streamed(tmp_path: Path) -> None:
    folder, dense = quantised(tmp_path, "fp8")
    with pytest.warns(UserWarning, match=ROWS.format("FP8 in blocks of 16 x 16")):
        layers = streamed_layers(load_streamed(folder))
    assert layers is not None
    sublayer = surgeon.Program.parse("F1").nodes[0].sublayers[0]  # type: ignore[union-attr]
    found, expected = layers.weights(8).sublayer(sublayer), open_model(dense).weights.sublayer(sublayer)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.filterwarnings("ignore:the weights of")
def test_sixteen_bits(tmp_path: Path) -> None:
    """Numbers are rounded once, from float32 to what is computed in."""
    folder, dense = quantised(tmp_path, "nf4")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(
        load(folder, torch.bfloat16).get_parameter(name), load(dense, torch.bfloat16).get_parameter(name)
    )


@pytest.mark.filterwarnings("ignore:the weights of", "ignore:.* are dequantised")
def test_zeros_as_biases_of_layers_that_have_none_are_left_out(tmp_path: Path) -> None:
    """As old AutoGPTQ writes them, beside the biases that Qwen2 has."""
    folder, dense = quantised(tmp_path, "gptq", "qwen2")
    tensors = load_file(folder / "model.safetensors")
    spare = [
        name.removesuffix("qweight") + "bias"
        for name in tensors
        if name.endswith(("o_proj.qweight", "up_proj.qweight"))
    ]
    zeros = {name: torch.zeros(tensors[name.replace("bias", "qweight")].shape[1]) for name in spare}
    save_file(tensors | zeros, folder / "model.safetensors", {"format": "pt"})
    opened = open_model(folder)
    assert sorted(opened.checkpoint.names()) == sorted(Checkpoint(dense).names())
    out = surgeon.export(opened, tmp_path / "out", program="A0 F0 >A1 >F1")
    assert sorted(Checkpoint(out.folder).raw.names()) == sorted(tensors)
    zeros[spare[0]][3] = 0.5
    save_file(tensors | zeros, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=f"tensor {spare[0]} is a bias of a layer that has none by config.json"
    ):
        open_model(folder)


def test_what_is_wrong_is_said_as_it_is_opened(tmp_path: Path) -> None:
    folder, _ = quantised(tmp_path, "fp8")
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    scales = "model.layers.1.mlp.up_proj.weight_scale_inv"
    save_file(
        {k: v for k, v in tensors.items() if k != scales}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(
        ValueError, match=f"has no tensor {scales}, which FP8 in blocks of 16 x 16 needs beside"
    ):
        open_model(folder)
    cut = {k: v[:1].clone() if k == scales else v for k, v in tensors.items()}
    save_file(cut, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"tensor {scales} has the shape \(1, 2\), and FP8 .* needs \(3, 2\) for"
    ):
        open_model(folder)
    for method, said in (
        ("quark", "quantised by 'quark' are not supported"),
        ("mxfp4", "says its weights are quantised by mxfp4, and none of its tensors is"),
    ):
        entries = config | {"quantization_config": {"quant_method": method}}
        (folder / "config.json").write_text(json.dumps(entries))
        with pytest.raises(ValueError, match=said):
            load(folder)


def test_a_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Whose scales fit it: only its architecture can tell."""
    folder, _ = quantised(tmp_path, "fp8")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with (
        pytest.warns(UserWarning, match="stored as FP8"),
        pytest.raises(ValueError, match=f"tensor {name} has the shape .*, but config.json asks for"),
    ):
        load(folder)


@pytest.mark.parametrize("scheme", [case(one, default=one in ("fp8", "nf4")) for one in SCHEMES])
def test_storage_types_without_a_configuration_are_refused(scheme: str, tmp_path: Path) -> None:
    folder, _ = quantised(tmp_path, scheme)
    entries = json.loads((folder / "config.json").read_text())
    del entries["quantization_config"]
    (folder / "config.json").write_text(json.dumps(entries))
    with pytest.raises(
        ValueError, match=r"tensor model\.layers\..* and belongs to no quantization_config"
    ):
        open_model(folder)


def test_values_are_checked_as_it_is_opened(tmp_path: Path) -> None:
    folder, _ = quantised(tmp_path, "int8")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight_format"
    save_file(
        tensors | {name: torch.tensor(2, dtype=torch.uint8)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        ValueError, match=f"tensor {name} holds 2, and should hold 0 for a layout in rows"
    ):
        open_model(folder)
