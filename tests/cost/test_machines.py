"""The hardware files of the package: complete, each figure with its source, and plausible beside each other."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from surgeon.cost.hardware import (
    MACHINES,
    Hardware,
    Interconnect,
    known_hardware,
    load_hardware,
)

GPUS = [name for name in known_hardware() if not name.startswith("cpu")]
FIGURE = re.compile(r":\s*\{?[\w.+-]*\d")


def by_peak(figure: str) -> list[str]:
    def of(hardware: Hardware) -> float:
        device = hardware.device
        return device.bandwidth if figure == "bandwidth" else device.peak(figure)

    return sorted(GPUS, key=lambda name: of(load_hardware(name)))


def fastest(link: Interconnect) -> float:
    return max(one.share.at(2) for one in link.algorithms) * link.bandwidth


@pytest.mark.parametrize("name", known_hardware())
def test_every_figure_has_its_source_beside_it(name: str) -> None:
    lines = (MACHINES / f"{name}.yaml").read_text().splitlines()
    entries = [line for line in lines if not line.startswith(("#", "name:", "note:"))]
    figures = [line for line in entries if FIGURE.search(line.partition("#")[0])]
    assert len(figures) > 10
    assert [line for line in figures if not line.partition("#")[2].strip()] == []


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_has_all_that_is_asked_of_it(name: str) -> None:
    hardware = load_hardware(name)
    device, host = hardware.device, hardware.host
    assert {"bfloat16", "float16", "float32", "int8"} <= set(device.flops)
    assert len(hardware.networks) >= 2  # InfiniBand, Ethernet
    assert len(hardware.links) >= 2 or name == "mi300x"  # with and without NVLink or peer to peer
    assert not hardware.sharing
    assert host.asynchronous
    assert 0 < host.graph < host.launch < host.forward.at(1)


@pytest.mark.parametrize("name", GPUS)
def test_peaks_and_shares_of_a_gpu_are_of_this_world(name: str) -> None:
    hardware = load_hardware(name)
    device = hardware.device
    assert device.peak("bfloat16") == device.peak("float16")
    assert 1.9 < device.peak("int8") / device.peak("bfloat16") < 4.1
    assert device.peak("float32") < device.peak("bfloat16")
    assert 50 < device.peak("bfloat16") / device.bandwidth < 450  # FLOP for each byte
    shares = [share for _, share in (*device.shares.flops.points, *device.shares.bandwidth.points)]
    assert 0.1 < min(shares) <= max(shares) < 1
    for curve in (device.shares.flops, device.shares.bandwidth):
        assert [share for _, share in curve.points] == sorted(share for _, share in curve.points)
    for link in (*hardware.links.values(), *hardware.networks.values()):
        assert 1e9 < fastest(link) < device.bandwidth / 2
        assert all(0.3e-6 < one.hop.at(2) < 50e-6 for one in link.algorithms)


def test_gpus_stand_in_the_order_of_their_generations() -> None:
    ampere = ["a100-pcie", "a100-sxm", "a800-sxm"]
    assert sorted(by_peak("bandwidth")[3:6]) == ampere or sorted(by_peak("bandwidth")[3:7]) == [
        *ampere,
        "h100-pcie",
    ]
    assert by_peak("bandwidth")[:3] == ["l4", "rtx-a6000", "rtx-4090"]
    assert by_peak("bandwidth")[-4:] == ["h100-sxm", "h200-sxm", "mi300x", "b200-sxm"]
    assert by_peak("bfloat16")[:3] == ["l4", "rtx-a6000", "rtx-4090"]
    assert by_peak("bfloat16")[-5:-2] == ["h100-pcie", "h100-sxm", "h200-sxm"]
    assert by_peak("bfloat16")[-2:] == ["mi300x", "b200-sxm"]


@pytest.mark.parametrize("name", [name for name in GPUS if "nvlink" in load_hardware(name).links])
def test_nvlink_is_the_first_link_and_faster_than_none(name: str) -> None:
    hardware = load_hardware(name)
    assert next(iter(hardware.links)) == "nvlink"
    off = hardware.link("nvlink-off")
    rings = replace(off, algorithms=tuple(one for one in off.algorithms if one.kind != "sharp"))
    assert fastest(hardware.link()) > 4 * fastest(rings)
    assert fastest(hardware.link()) > fastest(hardware.link(between_nodes=True))
