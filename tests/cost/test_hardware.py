"""Hardware files: what is read of them, what is written, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.cost.hardware import Figure, known_hardware, load_hardware, parse_hardware, write_hardware
from surgeon.language.yaml import YamlError

SMALL = """\
name: small
devices: 2
device:
  memory: 1e9
  bandwidth: 1e11
  flops: {float32: 1e12}
  shares: {flops: {1: 0.25, 16: 0.75}, bandwidth: 0.5}
host: {launch: 1e-6, graph: 0, collective: 2e-6, forward: 0.001, asynchronous: false}
links:
  wire:
    bandwidth: 1e9
    algorithms: [{kind: ring, base: 1e-6, hop: {2: 1e-6, 4: 3e-6}, share: 1}]
intervals: {device.bandwidth: [9e10, 1.1e11], links.wire.algorithms.0.hop.4: [2e-6, 4e-6]}
"""


HOST = """\
host:
  launch: 1e-6
  graph: 0
  collective: 2e-6
  forward: {1: 0.001, 8: 0.004}
  launches: {norm: 5e-6, attention: {1: 2e-5, 16: 8e-5}}
  asynchronous: false
"""
SHARING = """\
sharing:
  2:
    shares: {flops: 0.5, bandwidth: 0.4, copies: {1e3: 0.1, 1e6: 0.2}}
    host: {launch: 3e-6, graph: 0, collective: 2e-6, forward: 0.001, asynchronous: false}
  4:
    shares: {flops: 0.25, bandwidth: 0.2}
    host: {launch: 6e-6, graph: 0, collective: 2e-6, forward: 0.002, asynchronous: false}
"""
SHARED = SMALL.replace(SMALL[SMALL.index("host:") : SMALL.index("links:")], HOST) + SHARING


@pytest.mark.parametrize("name", known_hardware())
def test_every_file_of_the_package_is_read_and_written(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert parse_hardware(write_hardware(hardware)) == hardware


def test_figures_are_what_the_file_says() -> None:
    hardware = parse_hardware(SMALL)
    assert hardware.device.bandwidth == 1e11
    assert hardware.device.shares.flops == Figure(((1, 0.25), (16, 0.75)))
    assert hardware.device.shares.cache is None
    assert hardware.link().algorithms[0].hop.at(4) == 3e-6
    assert not hardware.host.asynchronous
    assert parse_hardware(write_hardware(hardware)) == hardware


def test_tables_are_read_between_their_points() -> None:
    share = Figure(((1, 0.25), (16, 0.75)))
    assert [share.at(rows) for rows in (0.5, 1, 4, 16, 1000)] == pytest.approx(
        [0.25, 0.25, 0.5, 0.75, 0.75]
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "  bandwidth: 1e11\n",
            "",
            "line 3: the figure device.bandwidth is missing; add it .bytes/s of its memory",
        ),
        (", graph: 0", "", "line 8: the figure host.graph is missing"),
        ("hop: {2: 1e-6, 4: 3e-6}, ", "", "line 12: the figure links.wire.algorithms.0.hop is missing"),
        ("kind: ring", "kind: rnig", "line 12: there is no way 'rnig' of summing; did you mean 'ring'?"),
        ("memory", "memroy", "line 4: there is no entry 'memroy'; did you mean 'memory'?"),
        ("1e9\n  bandw", "many\n  bandw", "line 4: device.memory is a number of at least 0, not 'many'"),
        ("memory: 1e9", "memory: 0", "line 4: device.memory is a number above 0, not 0"),
        (
            "{1: 0.25, 16: 0.75}",
            "{16: 0.25, 1: 0.75}",
            "line 7: device.shares.flops: .* in ascending order",
        ),
        ("devices: 2", "devices: 0", "line 2: devices is a whole number of at least 1, not 0"),
        ("asynchronous: false", "asynchronous: 3", "line 8: it is true or false, not 3"),
        (
            SMALL[SMALL.index("links:") : SMALL.index("intervals")],
            "links: {}\n",
            "there is no link between",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, said: str) -> None:
    assert old in SMALL
    with pytest.raises(YamlError, match=said):
        parse_hardware(
            SMALL.replace(old, new).split("intervals")[0]
            if new == "links: {}\n"
            else SMALL.replace(old, new)
        )


def test_what_is_asked_for_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no hardware 'h100-sxn'; did you mean 'h100-sxm'\?"):
        load_hardware("h100-sxn")
    with pytest.raises(FileNotFoundError, match=r"there is no hardware file .*mine.yaml"):
        load_hardware(tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_text(SMALL.replace("name: small\n", ""))
    with pytest.raises(ValueError, match=r"mine.yaml: line 1: the figure name is missing; add it"):
        load_hardware(tmp_path / "mine.yaml")
    hardware = load_hardware("h100-sxm")
    with pytest.raises(ValueError, match=r"h100-sxm has no link 'nvlnk'; did you mean 'nvlink'\?"):
        hardware.link("nvlnk")
    with pytest.raises(ValueError, match=r"no figure of FLOP/s in float8; did you mean 'float"):
        hardware.device.peak("float8")


def test_launches_are_those_of_a_name_of_a_nature_or_of_anything() -> None:
    host = parse_hardware(SHARED).host
    assert host.launch_seconds("norm", "copy", 100) == 5e-6
    # Between 1 and 16 new tokens.
    assert host.launch_seconds("attention", "attention", 4) == pytest.approx(5e-5)
    assert host.launch_seconds("q k v", "product", 1) == 1e-6
    assert host.forward.at(8) == 0.004


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "  2:\n",
            "  1:\n",
            "ranks that share a device are 2 or more; one alone has device.shares and host",
        ),
        ("  4:\n", "  four:\n", "sharing.four is a whole number of at least 1, not 'four'"),
        (
            "shares: {flops: 0.25, bandwidth: 0.2}",
            "shares: {flops: 0.25}",
            "sharing.4.shares.bandwidth is missing",
        ),
        ("norm: 5e-6", "norm: slow", "host.launches.norm is a number of at least 0, not 'slow'"),
    ],
)
def test_what_is_wrong_with_ranks_that_share_is_named(old: str, new: str, said: str) -> None:
    assert old in SHARED
    with pytest.raises(YamlError, match=said):
        parse_hardware(SHARED.replace(old, new, 1))


def test_what_a_rank_gets_of_a_device_that_it_shares() -> None:
    hardware = parse_hardware(SHARED)
    assert parse_hardware(write_hardware(hardware)) == hardware
    assert hardware.rank(1).shares is hardware.device.shares
    assert hardware.rank(2).shares.copies == Figure(((1e3, 0.1), (1e6, 0.2)))
    assert hardware.rank(3) == hardware.rank(4)  # as slow as with one more
    eight = hardware.rank(8)  # more than were measured take turns
    assert eight.shares.flops.at(1) == 0.125
    assert eight.shares.cache is None
    assert eight.host.launch == pytest.approx(12e-6)
    assert eight.host.forward.at(1) == pytest.approx(0.004)
