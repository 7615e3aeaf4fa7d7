"""Quantised matrices against what their formats are defined to be: whole, in part, and damaged."""

from __future__ import annotations

import pytest
import torch

from surgeon.models.weights import NamedTensors
from surgeon.models.weights.quantised import quantised_matrices
from tests.quantised import SCHEMES, fp8, gptq, mxfp4, named, packed


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
    # Of ranks with no heads.
    for dim, first in ((0, 0), (0, 5), (1, 16), (1, shape[1])):
        assert torch.equal(found.part(dim, first, first), found.whole().narrow(dim, first, 0))


def test_blocks_that_are_cut_off() -> None:
    stored, numbers = fp8(torch.randn(40, 24))
    (found,) = quantised_matrices(named(stored), SCHEMES["fp8"][1]).values()
    torch.testing.assert_close(found.whole(), numbers, rtol=1e-6, atol=0)
    assert torch.equal(found.part(1, 17, 24), found.whole()[:, 17:])


def test_one_scale() -> None:
    stored = {
        ".weight": torch.randn(4, 6).to(torch.float8_e4m3fn),
        ".weight_scale_inv": torch.tensor(0.25),
    }
    (found,) = quantised_matrices(
        named(stored), {"quant_method": "fp8", "weight_block_size": None}
    ).values()
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
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": False, **args}},
        "group_1": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, **args}},
    }
    eight[".weight_packed"] = torch.randint(-(2**31), 2**31 - 1, (16, 8), dtype=torch.int32)
    del eight[".weight_zero_point"]
    tensors = named(four, "a.up_proj").tensors | named(eight, "a.down_proj").tensors
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    found = quantised_matrices(NamedTensors(tensors), config)
    assert {name: one.scheme.bits for name, one in found.items()} == {
        "a.up_proj.weight": 4,
        "a.down_proj.weight": 8,
    }  # type: ignore[attr-defined]
    bytes_ = eight[".weight_packed"].view(torch.uint8).float() - 128
    expected = bytes_ * eight[".weight_scale"].float().repeat_interleave(16, 1)
    assert torch.equal(found["a.down_proj.weight"].whole(), expected)


def test_a_module_of_no_group_is_refused() -> None:
    """Where groups name modules and differ, which of them another module is in cannot be known."""
    said = {"strategy": "channel", "type": "int", "num_bits": 8}
    groups = {
        "one": {"targets": ["re:.*up_proj"], "weights": said},
        "other": {"targets": ["re:.*down_proj"], "weights": {**said, "strategy": "tensor"}},
    }
    stored, _ = SCHEMES["int8 rows"][0](torch.randn(16, 32))
    tensors = named(stored, "a.up_proj").tensors | named(stored, "a.gate_proj").tensors
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    with pytest.raises(
        ValueError, match=r"tensor a.gate_proj.weight holds int8, .* none that quantization_config"
    ):
        quantised_matrices(NamedTensors(tensors), config)


def test_what_is_not_quantised_is_left_alone() -> None:
    stored, _ = fp8(torch.randn(32, 32))
    dense = {"n.weight": torch.randn(4), "h.weight": torch.randn(4, 4), "m.bias": torch.randn(32)}
    dense |= {"a.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "m.input_scale": torch.ones(())}
    tensors = named(stored).tensors | dense
    assert list(quantised_matrices(NamedTensors(tensors), SCHEMES["fp8"][1])) == ["m.weight"]
    assert quantised_matrices(NamedTensors(dense), None) == {}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_in_storage_types_without_a_scheme_are_refused(scheme: str) -> None:
    stored, _ = SCHEMES[scheme][0](torch.randn(32, 32))
    with pytest.raises(ValueError, match=r"tensor m\..* belongs to no quantization_config"):
        quantised_matrices(named(stored), None)


def test_a_zero_point_of_zero_is_the_largest_code() -> None:
    stored, numbers = gptq(torch.rand(16, 32) + 0.1)  # all above zero
    assert (stored[".qzeros"] == -1).all()
    (found,) = quantised_matrices(named(stored), SCHEMES["gptq"][1]).values()
    torch.testing.assert_close(found.whole(), numbers)
    assert (found.whole() >= 0).all()
