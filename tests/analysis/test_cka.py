"""CKA from sums over batches against the formulas on n x n kernel matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surgeon.analysis.similarity import LinearCKA

SPLITS = ([40], [1, 39], [7, 13, 20], [1] * 40)


def features(samples: int = 40, offset: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two related sets of features, 6 and 9 wide, with means far from 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    mixed = x @ torch.randn(6, 9, generator=generator, dtype=torch.float64)
    y = mixed + 2 * torch.randn(samples, 9, generator=generator, dtype=torch.float64)
    return x + 3 + offset, y - 5 - offset


def biased_hsic(k: Tensor, m: Tensor) -> Tensor:
    n = len(k)
    centre = torch.eye(n, dtype=k.dtype) - 1 / n
    return torch.trace(k @ centre @ m @ centre)


def unbiased_hsic(k: Tensor, m: Tensor) -> Tensor:
    n = len(k)
    k, m = k.clone().fill_diagonal_(0), m.clone().fill_diagonal_(0)
    ones = torch.ones(n, dtype=k.dtype)
    middle = (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return (torch.trace(k @ m) + middle - 2 / (n - 2) * (ones @ k @ m @ ones)) / (n * (n - 3))


def by_kernels(hsic, x: Tensor, y: Tensor) -> float:  # type: ignore[no-untyped-def]
    k, m = x @ x.T, y @ y.T
    return float(hsic(k, m) / torch.sqrt(hsic(k, k) * hsic(m, m)))


def streamed(x: Tensor, y: Tensor, split: list[int]) -> LinearCKA:
    cka = LinearCKA()
    for part_x, part_y in zip(x.split(split), y.split(split), strict=True):
        cka.add(part_x, part_y)
    return cka


@pytest.mark.parametrize("split", SPLITS, ids=len)
def test_equals_the_kernel_formulas(split: list[int]) -> None:
    x, y = features()
    cka = streamed(x, y, split)
    assert cka.samples == 40
    assert cka.biased() == pytest.approx(by_kernels(biased_hsic, x, y), rel=1e-12)
    assert cka.debiased() == pytest.approx(by_kernels(unbiased_hsic, x, y), rel=1e-12)
    assert cka.biased() - cka.debiased() > 0.01  # so that one is not mistaken for the other


def test_far_from_the_origin_no_digits_are_lost() -> None:
    near, far = (streamed(*features(offset=offset), [7, 13, 20]) for offset in (0.0, 1e6))
    assert far.biased() == pytest.approx(near.biased(), rel=1e-8)
    assert far.debiased() == pytest.approx(near.debiased(), rel=1e-8)


def test_single_precision_features_are_summed_in_double() -> None:
    x, y = (part.float() for part in features())
    cka = streamed(x, y, [20, 20])
    assert cka.debiased() == pytest.approx(by_kernels(unbiased_hsic, x.double(), y.double()), rel=1e-9)


def test_what_cka_does_not_see() -> None:
    x, _ = features()
    turned, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    for estimate in ("biased", "debiased"):
        assert getattr(streamed(x, -4 * x @ turned + 7, [25, 15]), estimate)() == pytest.approx(1)


def test_unrelated_features_are_similar_only_with_the_bias() -> None:
    values = []
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, 20, 30, generator=generator)
        values.append((streamed(x, y, [20]).biased(), streamed(x, y, [20]).debiased()))
    biased, debiased = torch.tensor(values).mean(0).tolist()
    assert biased > 0.5
    assert abs(debiased) < 0.05


def test_features_that_do_not_vary_have_no_similarity() -> None:
    x, y = features()
    assert math.isnan(streamed(torch.ones_like(x), y, [40]).biased())
    assert math.isnan(streamed(x, torch.ones_like(y), [40]).debiased())


def test_too_few_samples_for_the_unbiased_estimate() -> None:
    x, y = features(3)
    assert 0 < streamed(x, y, [3]).biased() < 1
    with pytest.raises(ValueError, match="at least 4 samples, not 3"):
        streamed(x, y, [3]).debiased()
