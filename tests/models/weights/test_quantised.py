"""Quantised matrices against what their formats are defined to be: whole, in part, and damaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgeon.models.weights import NamedTensors
from surgeon.models.weights.quantised import quantised_matrices
from tests.quantised import SCHEMES, fp8, gptq, mxfp4, packed


def named(stored: dict[str, Any], module: str = "m") -> NamedTensors:
    return NamedTensors({f"{module}{ending}": tensor for ending, tensor in stored.items()})


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(48, 32), (32, 64)])
def test_numbers(scheme: str, shape: tuple[int, int]) -> None:
    quantise, config = SCHEMES[scheme]
    stored, numbers = quantise(torch.randn(shape))
    (found,) = quantised_matrices(named(stored), config).values()
    assert (found.name, found.shape, found.dtype) == ("m.weight", shape, torch.float32)
    torch.testing.assert_close(found.whole(), numbers, rtol=1e-6, atol=1e-7)
    assert found.whole(torch.bfloat16).dtype == torch.bfloat16
    for dim, first, end in ((0, 0, 5), (0, 3, 21), (0, 17, 32), (1, 0, 16), (1, 7, 30), (1, 31, 32)):
        assert torch.equal(found.part(dim, first, end), found.whole().narrow(dim, first, end - first))
    assert torch.equal(found.rows(3, 9), found.whole()[3:9])


def test_blocks_that_are_cut_off() -> None:
    stored, numbers = fp8(torch.randn(40, 24))
    (found,) = quantised_matrices(named(stored), SCHEMES["fp8"][1]).values()
    torch.testing.assert_close(found.whole(), numbers, rtol=1e-6, atol=0)
    assert torch.equal(found.part(1, 17, 24), found.whole()[:, 17:])


def test_one_scale() -> None:
    stored = {".weight": torch.randn(4, 6).to(torch.float8_e4m3fn), ".weight_scale_inv": torch.tensor(0.25)}
    (found,) = quantised_matrices(named(stored), {"quant_method": "fp8", "weight_block_size": None}).values()
    assert torch.equal(found.part(0, 1, 3), stored[".weight"].float()[1:3] * 0.25)


def test_stacked_experts() -> None:
    stored, numbers = mxfp4(torch.randn(3, 64, 10))
    (found,) = quantised_matrices(named(stored, "experts.down"), {"quant_method": "mxfp4"}).values()
    assert (found.name, found.shape) == ("experts.down", (3, 64, 10))
    assert torch.equal(found.whole(), numbers)
    for dim, first, end in ((0, 1, 3), (1, 5, 40), (2, 3, 8)):
        assert torch.equal(found.part(dim, first, end), numbers.narrow(dim, first, end - first))


def test_modules_by_their_groups() -> None:
    """compressed-tensors may store some modules in one way and others in another."""
    four, eight = (packed(torch.randn(16, 32))[0] for _ in range(2))
    args = {"strategy": "group", "group_size": 16}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, **args}},
        "group_1": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, **args}},
    }
    eight[".weight_packed"] = torch.randint(-(2**31), 2**31 - 1, (16, 8), dtype=torch.int32)
    del eight[".weight_zero_point"]
    tensors = named(four, "a.up_proj").tensors | named(eight, "a.down_proj").tensors
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    found = quantised_matrices(NamedTensors(tensors), config)
    assert {name: one.scheme.bits for name, one in found.items()} == {"a.up_proj.weight": 4, "a.down_proj.weight": 8}  # type: ignore[attr-defined]
    bytes_ = eight[".weight_packed"].view(torch.uint8).float() - 128
    expected = bytes_ * eight[".weight_scale"].float().repeat_interleave(16, 1)
    assert torch.equal(found["a.down_proj.weight"].whole(), expected)


def test_what_is_not_quantised_is_left_alone() -> None:
    stored, _ = fp8(torch.randn(32, 32))
    tensors = named(stored).tensors | {"n.weight": torch.randn(4), "h.weight": torch.randn(4, 4)}
    assert list(quantised_matrices(NamedTensors(tensors), SCHEMES["fp8"][1])) == ["m.weight"]
    assert quantised_matrices(NamedTensors(tensors), None) == {}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "quip"}, "quantised by 'quip' are not supported .known: fp8, compressed-tensors, gptq"),
        ("fp8", "must be an object"),
        ({"quant_method": "gptq"}, "not what gptq writes .KeyError: 'bits'"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 8}, r"GPTQ of 3 bits is not supported .known: 2, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "GPTQ as marlin is not supported"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {"+:.*up": {"bits": 8}}},
            r"in some modules .dynamic: '\+:.\*up'.",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse compressed-tensors as sparse-24-bitmask is not supported",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ as gemv is not supported"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "tensor_group"}}},
            },
            "as nvfp4-pack-quantized is not supported .known: float-quantized",
        ),
    ],
)
def test_what_is_not_known_is_named(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quantised_matrices(NamedTensors({}), config)


def test_a_tensor_that_is_missing_is_named() -> None:
    for scheme, ending in (("fp8", ".weight_scale_inv"), ("gptq", ".scales"), ("nf4", ".weight.quant_map")):
        stored, _ = SCHEMES[scheme][0](torch.randn(32, 32))
        del stored[ending]
        with pytest.raises(ValueError, match=f"has no tensor m{ending}, which .* needs beside m"):
            quantised_matrices(named(stored), SCHEMES[scheme][1])


@pytest.mark.parametrize(("scheme", "ending"), [("fp8", ".weight_scale_inv"), ("awq", ".scales"), ("int8", ".SCB")])
def test_scales_of_another_shape_are_refused(scheme: str, ending: str) -> None:
    stored, _ = SCHEMES[scheme][0](torch.randn(32, 32))
    stored[ending] = stored[ending][:-1]
    (found,) = quantised_matrices(named(stored), SCHEMES[scheme][1]).values()
    with pytest.raises(ValueError, match=f"tensor m{ending} has the shape .* for a matrix of 32 x 32"):
        _ = found.shape


def test_an_order_that_config_does_not_speak_of_is_refused() -> None:
    stored, _ = SCHEMES["gptq act order"][0](torch.randn(32, 32))
    (found,) = quantised_matrices(named(stored), SCHEMES["gptq"][1]).values()
    with pytest.raises(ValueError, match="inputs out of order, and config.json says that desc_act is false"):
        found.whole()


def test_a_zero_point_of_zero_is_the_largest_code() -> None:
    stored, numbers = gptq(torch.rand(16, 32) + 0.1)  # all above zero
    assert (stored[".qzeros"] == -1).all()
    (found,) = quantised_matrices(named(stored), SCHEMES["gptq"][1]).values()
    torch.testing.assert_close(found.whole(), numbers)
    assert (found.whole() >= 0).all()
