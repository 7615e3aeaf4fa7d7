"""What ranks load is measured against their share of the matrices, of a checkpoint that the runtime loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.bench.goals import MISSED
from scripts.bench.large_model import make_model
from scripts.bench.loading import Watch, anonymous, main
from surgeon.checkpoint.stored import Checkpoint
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import footprint
from tests.scripts.bench.test_large_model import SHARD, small_config
from tests.waiting import wait_until


def test_the_share_of_a_rank(tmp_path: Path) -> None:
    make_model(tmp_path, small_config(), SHARD)
    checkpoint = Checkpoint(tmp_path)
    shapes = [checkpoint.shape(name) for name in checkpoint.names()]
    assert {checkpoint.dtype(name) for name in checkpoint.names()} == {torch.bfloat16}
    plan = make_plan(tmp_path, 1, 32, dtype="bfloat16")
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    assert engine.model.vocabulary.like.dtype == torch.bfloat16
    (share,) = footprint(plan).weights
    # Norms are left out.
    assert share == 2 * sum(rows * columns for rows, *rest in shapes for columns in rest)


def test_the_most_memory_that_a_process_has_had() -> None:
    """Of another process, which does nothing meanwhile but take and give back what is looked for."""
    size = 64 << 20
    code = f"print(); input(); held = b'1' * {size}; print(); input(); del held; print(); input()"
    with subprocess.Popen(
        [sys.executable, "-uc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:

        def go_on() -> None:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()

        def wait() -> None:
            assert process.stdout is not None
            process.stdout.readline()

        wait()
        watch = Watch([process.pid])
        before = watch.peaks[0]
        go_on()
        wait()
        wait_until(lambda: watch.peaks[0] >= before + 0.9 * size)
        go_on()
        wait()
        watch.end()
        assert before + 0.9 * size < watch.peaks[0] < before + 1.1 * size
        assert anonymous(process.pid) < before + 0.1 * size
        go_on()


def test_the_table_is_made_of_a_model_that_is_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The libraries alone are more than the share of so small a model, so that the limit is not kept."""
    shape = ["--layers", "1", "--hidden", "256", "--neurons", "512"]
    monkeypatch.setattr("sys.argv", ["loading.py", "--ranks", "1", *shape])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == MISSED
    page = capsys.readouterr().out
    assert "1 layers of 256, bfloat16, loaded in" in page
    assert page.endswith("goal missed: a rank took more than 1.1 times its share\n")
