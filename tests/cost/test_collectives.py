"""Seconds of collectives against sums made by hand."""

from __future__ import annotations

import pytest

from surgeon.cost.hardware import Algorithm, Figure, Host, Interconnect, Kind
from surgeon.cost.kernels import Operation, Wiring, best
from surgeon.runtime.comm.collectives import Link

HOST = Host(launch=0.0, graph=0.25, collective=2.0, forward=Figure.constant(0.0), asynchronous=True)


def way(kind: Kind, base: float = 0.0, hop: float = 0.0, share: float = 1.0) -> Algorithm:
    return Algorithm(kind, Figure.constant(base), Figure.constant(hop), Figure.constant(share))


def link(*ways: Algorithm, bandwidth: float = 10.0) -> Interconnect:
    return Interconnect(bandwidth, ways)


@pytest.mark.parametrize(
    ("kind", "operation", "seconds"),
    [
        # 8 ranks, 40 bytes at half of 10 bytes/s: 8 s to send them once; base 1 s, a message 3 s.
        ("ring", "all-reduce", 1 + 14 * 3 + 8 * 2 * 7 / 8),
        ("ring", "all-gather", 1 + 7 * 3 + 8 * 7),
        ("tree", "all-reduce", 1 + 6 * 3 + 8 * 2),
        ("tree", "all-gather", 1 + 3 * 3 + 8 * 7),
        ("one-shot", "all-reduce", 1 + 3 + 8 * 7),
        ("one-shot", "all-gather", 1 + 3 + 8 * 7),
        ("sharp", "all-reduce", 1 + 3 + 8),
        ("sharp", "all-gather", 1 + 3 + 8 * 7),
    ],
)
def test_every_way_has_its_formula(kind: Kind, operation: Operation, seconds: float) -> None:
    assert best(link(way(kind, 1, 3, 0.5)), operation, 40, 8) == (pytest.approx(seconds), 0, 0)


def test_memory_that_all_see_is_written_and_read_by_the_ranks_themselves() -> None:
    assert best(link(way("shared-memory", 1, 3, 0.5)), "all-reduce", 40, 4) == (0, 8, 1 + 3 * 3 + 4 * 8)


def test_the_fastest_way_is_taken() -> None:
    both = link(way("ring", hop=1.0), way("tree", hop=1.0, share=0.5))
    assert best(both, "all-reduce", 0, 8)[0] == 6  # a tree's messages
    assert best(both, "all-reduce", 1000, 8)[0] == 14 + 175  # a ring's bytes


def test_nodes_share_out_the_sum_before_it_crosses_between_them() -> None:
    inside, between = link(way("ring", hop=1.0)), link(way("ring", hop=100.0), bandwidth=1.0)
    wires = Wiring(inside, between, 4, HOST)
    # 4 ranks on each of 2 nodes: a ring of 4 with 80 bytes, and rings of 2 with 20 bytes each.
    within, across = 6 + 2 * 3 / 4 * 8, 200 + 20
    assert wires.transfer("all-reduce", 80, tuple(range(8))).shared == within + across
    # One rank on each node has nobody to share with.
    assert wires.transfer("all-reduce", 80, (0, 4)).shared == 200 + 80
    # What crosses between nodes is gathered among their ranks, the whole of both.
    assert wires.transfer("all-gather", 80, tuple(range(8))).shared == (100 + 80) + (3 + 3 * 16)
    assert wires.transfer("all-reduce", 80, (4, 5, 6, 7)).shared == within


def test_starting_one_keeps_the_host_or_in_a_graph_the_device() -> None:
    inside = link(way("ring"))
    eager = Wiring(inside, None, 8, HOST).transfer("all-reduce", 8, (0, 1))
    assert (eager.host, eager.writing) == (2.0, 0.0)
    captured = Wiring(inside, None, 8, HOST, graphs=True).transfer("all-reduce", 8, (0, 1))
    assert (captured.host, captured.writing) == (0.0, 0.25)


def test_an_emulated_link_sends_what_the_runtime_has_it_send() -> None:
    wires = Wiring(link(way("ring")), None, 8, HOST, emulated=Link(0.5, 4.0))
    gathered, reduced = (wires.transfer(one, 80, (0, 1, 2, 3)) for one in ("all-gather", "all-reduce"))
    assert (gathered.line, gathered.delay) == (3 * 80 / 4, 0.5)
    assert (reduced.line, reduced.delay) == (2 * 3 / 4 * 80 / 4, 0.5)
