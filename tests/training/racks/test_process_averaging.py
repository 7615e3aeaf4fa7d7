"""Codas averaged over the racks."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState

from surgeon.training.racks.process import RackKeeper
from surgeon.training.racks.run import parse_averaging
from tests.selection import case
from tests.training.racks.local_run import SETTINGS, TWO, in_processes, in_step, require_close
from tests.training.racks.test_exchange import connected


def test_when_codas_are_averaged() -> None:
    assert [parse_averaging(text) for text in ("never", "always", "7", 3)] == [None, 1, 7, 3]
    for wrong in ("0", "often", -2, "1.5"):
        with pytest.raises(ValueError, match=r"never, always, or every N steps with N from 1, not '?"):
            parse_averaging(wrong)


def coda(numbers: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(numbers)), torch.nn.Parameter(torch.randn(2, 2))]


def make_steps(averaging: list[RackKeeper], steps: int) -> list[str]:
    """Let all racks make steps at once; returns what failed."""
    failed: list[str] = []

    def work(callback: RackKeeper) -> None:
        try:
            for step in range(1, steps + 1):
                callback.on_step_end(None, TrainerState(global_step=step), TrainerControl())  # type: ignore[arg-type]
        except ValueError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=work, args=(callback,)) for callback in averaging]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def test_all_have_the_mean_afterwards(tmp_path: Path) -> None:
    codas = [coda(3) for _ in range(3)]
    before = [[one.detach().clone() for one in each] for each in codas]
    with connected(tmp_path, 3) as exchanges:
        averaging = [RackKeeper(exchanges[rack], codas[rack].copy, 2) for rack in range(3)]
        assert make_steps(averaging, 1) == []
        assert all(all(map(torch.equal, *pair)) for pair in zip(codas, before, strict=True))
        assert make_steps(averaging, 3) == []
    for place in range(2):
        mean = torch.stack([each[place] for each in before]).mean(0)
        for each in codas:
            assert torch.allclose(each[place], mean)
            assert torch.equal(each[place], codas[0][place])


def test_codas_of_other_shapes(tmp_path: Path) -> None:
    codas = [coda(3), coda(3), coda(2)]
    with connected(tmp_path, 3) as exchanges:
        averaging = [RackKeeper(exchanges[rack], codas[rack].copy, 1) for rack in range(3)]
        failed = make_steps(averaging, 1)
    assert len(failed) == 3
    assert any(
        "rack 2 has a coda of 6 numbers and rack 1 one of 7; codas of different" in said
        for said in failed
    )


@pytest.mark.parametrize("replicas", [case(1, default=True), case(2, default=False)])
def test_processes_average_as_plain_training_does(replicas: int, tmp_path: Path) -> None:
    """Also where two processes of each rack share its parameters out, codas among them."""
    settings = replace(SETTINGS, steps=4)
    shared = (
        settings if replicas == 1 else replace(settings, arguments=SETTINGS.arguments | {"fsdp": True})
    )
    in_processes(tmp_path, shared, dropout=0.0, racks=TWO, average=2, replicas=replicas)
    expected, _ = in_step(settings, TWO, average=2)
    codas = [mine.coda_parameters() for mine in require_close(tmp_path, expected, 2e-6)]
    # The last step's are averaged.
    assert all(map(torch.equal, *codas))
