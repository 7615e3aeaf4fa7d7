"""The executor against the papers' equations written out, on toy sublayers, on one device and on simulated ranks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from surgeon.language.execute import Branch, Machine, Partial, Pending, State, advance, land, run
from surgeon.language.program import Fork, Program, Step
from surgeon.language.sublayer import Sublayer

torch.manual_seed(0)
MATRICES = {(kind, k): torch.randn(6, 6, dtype=torch.float64) / 4 for kind in "AF" for k in range(4)}


def toy(sublayer: Sublayer, x: Tensor) -> Tensor:
    """A nonlinear function per sublayer; a slice takes its share of the inner neurons."""
    matrix = torch.stack([MATRICES[sublayer.kind, k] for k in sublayer.layers]).mean(0)
    index, count = sublayer.piece or (0, 1)
    inner = slice(index * 6 // count, (index + 1) * 6 // count)
    return torch.tanh(x @ matrix[:, inner]) @ matrix.T[inner]


def A(k: int, x: Tensor) -> Tensor:
    return toy(Sublayer("A", (k,)), x)


def F(k: int, x: Tensor) -> Tensor:
    return toy(Sublayer("F", (k,)), x)


class OneDevice(Machine):
    """Keeps a log of what was computed and reduced, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def compute(self, step: Step, stream: Tensor) -> Partial:
        self.log.append(f"compute {step}")
        return Partial(torch.stack([toy(sublayer, stream) for sublayer in step.sublayers]).sum(0))

    def reduce(self, partial: Partial) -> Pending:
        number = sum(entry.startswith("start") for entry in self.log)
        self.log.append(f"start {number}")

        def wait() -> Tensor:
            self.log.append(f"wait {number}")
            return partial.part if partial.finish is None else partial.finish(partial.part)

        return wait

    def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:
        return [(branch, self) for branch in fork.branches]


def sequential(x: Tensor) -> Tensor:
    for k in range(3):
        x = x + A(k, x)
        x = x + F(k, x)
    return x


def lp(x: Tensor) -> Tensor:
    x = x + A(0, x) + A(1, x)
    x = x + F(0, x) + F(1, x)
    x = x + A(2, x)
    return x + F(2, x)


def par(x: Tensor) -> Tensor:
    return x + A(0, x) + F(0, x + A(0, x)) + A(1, x) + F(1, x + A(1, x))


def ladder(x: Tensor) -> Tensor:
    """Equation 2 of the ladder paper, x_{i+1} = x_i + h_{i+1}(x_{i-1}), from the second layer on."""
    x0 = x
    x1 = x0 + A(0, x0)
    x2 = x1 + F(0, x1)
    x3 = x2 + A(1, x1)
    x4 = x3 + F(1, x2)
    return x4 + A(2, x4)


def ladder_over_lp(x: Tensor) -> Tensor:
    x1 = x + A(0, x)
    x2 = x1 + A(1, x) + A(2, x)
    return x2 + F(1, x1) + F(2, x1)


def attention_beside_mlp(x: Tensor) -> Tensor:
    x = x + A(0, x) + F(0, x)
    return x + A(1, x) + F(1, x)


def tracks(x: Tensor) -> Tensor:
    """Two tracks of half the width that meet after two layers."""
    total = x
    for index in range(2):
        own = x
        for k in range(2):
            own = own + toy(Sublayer("A", (k,), (index, 2)), own)
            own = own + toy(Sublayer("F", (k,), (index, 2)), own)
        total = total + own - x
    return total


def merged(x: Tensor) -> Tensor:
    return x + toy(Sublayer("A", (0, 1, 2)), x)


def late_after_fork(x: Tensor) -> Tensor:
    """A late step reads the stream without what the fork before it added."""
    y = x + A(0, x)
    return y + A(1, y) + F(1, y) + A(2, y)


EQUATIONS = [
    ("A0 F0 A1 F1 A2 F2", sequential),
    ("[A0 A1] [F0 F1] A2 F2", lp),
    ("{A0 F0 | A1 F1}", par),
    ("A0 F0 >A1 >F1 A2", ladder),
    ("A0 >[A1 A2] >[F1 F2]", ladder_over_lp),
    ("[A0 F0] [A1 F1]", attention_beside_mlp),
    ("{A0/2:0 F0/2:0 A1/2:0 F1/2:0 | A0/2:1 F0/2:1 A1/2:1 F1/2:1}", tracks),
    ("A0~A1~A2", merged),
    ("A0 {A1 | F1} >A2", late_after_fork),
]


@pytest.mark.parametrize(("text", "equation"), EQUATIONS)
def test_equations(text: str, equation: object) -> None:
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    got = run(Program.parse(text), x, OneDevice())
    torch.testing.assert_close(got, equation(x), rtol=1e-12, atol=1e-12)  # type: ignore[operator]


def test_a_late_step_computes_while_the_previous_reduction_is_in_flight() -> None:
    machine = OneDevice()
    run(Program.parse("A0 >F0 A1"), torch.zeros(1, 1, 6, dtype=torch.float64), machine)
    assert machine.log == [
        "compute A0", "start 0", "compute >F0", "start 1", "wait 0", "wait 1", "compute A1", "start 2", "wait 2",
    ]  # fmt: skip


def test_two_programs_go_on_from_one_state() -> None:
    machine = OneDevice()
    state = State(torch.randn(1, 2, 6, dtype=torch.float64))
    start = state.stream.clone()
    for node in Program.parse("A0 F0").nodes:
        state = advance(state, node, machine)
    ends = [land(advance(state, Program.parse(text).nodes[0], machine)).stream for text in (">A1", "A1")]
    torch.testing.assert_close(ends[0], run(Program.parse("A0 F0 >A1"), start, machine), rtol=0, atol=0)
    torch.testing.assert_close(ends[1], run(Program.parse("A0 F0 A1"), start, machine), rtol=0, atol=0)


def test_a_machine_without_a_share_in_a_fork_adds_nothing() -> None:
    class Idle(OneDevice):
        def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:  # noqa: ARG002
            return []

    x = torch.randn(1, 2, 6, dtype=torch.float64)
    assert torch.equal(run(Program.parse("{A0 | F0}"), x, Idle()), x)


def test_what_finishes_an_output_lands_with_it() -> None:
    """A norm behind a sublayer, say: of the whole sum, and also of what is in flight while a late step computes."""

    class Finishing(OneDevice):
        def compute(self, step: Step, stream: Tensor) -> Partial:
            return Partial(super().compute(step, stream).part, lambda total: 2 * total)

    x = torch.randn(1, 2, 6, dtype=torch.float64)
    machine = Finishing()
    y = x + 2 * A(0, x)
    expected = y + 2 * A(1, x)
    torch.testing.assert_close(
        run(Program.parse("A0 >A1"), x, machine), expected, rtol=1e-12, atol=1e-12
    )
    forked = x + 2 * A(0, x) + 2 * A(1, x)  # what a fork joins is finished already
    torch.testing.assert_close(
        run(Program.parse("{A0 | A1}"), x, machine), forked, rtol=1e-12, atol=1e-12
    )
