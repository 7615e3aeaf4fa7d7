"""Fixtures that every test can use; the functions behind them, with their parameters, are in tests/tiny_models.py.

Torch and transformers are imported by the fixtures that need them, so that pytest starts at once.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
from hypothesis import settings

from surgeon.machine import wait_asleep
from tests import warm

if TYPE_CHECKING:
    from torch import Tensor

# Nothing in the tests may reach for the network; set before transformers is asked for anything by name.
os.environ["HF_HUB_OFFLINE"] = "1"

# What tests tokenize is theirs alone; set before datasets is imported.
_datasets_cache = tempfile.TemporaryDirectory(prefix="surgeon-tests-")
os.environ["HF_DATASETS_CACHE"] = _datasets_cache.name

# Where there is no GPU kernels for GPUs are interpreted; set before anything imports triton, as peft does.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long a case takes says nothing where tests share their cores.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

# Collecting leaves no garbage and each test little: looking for it as often as by default takes a twelfth of the time.
gc.disable()
gc.set_threshold(20_000, 20, 20)

wait_asleep()  # tests share their cores with each other, and with the ranks they start
warm.install()

# Shells start background jobs with Ctrl-C ignored, and every process started from them inherits that: tests that send
# it to a process of theirs would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that take long begin first, so that no worker is left with one when the others have ended."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    share = config.getoption("--one-in")
    left_out = [item for item in items if crc32(item.nodeid.encode()) % share]
    if not (config.getoption("--thorough") or config.getoption("--cases")):
        left_out += [item for item in items if item.get_closest_marker("thorough")]
        if not any(".py" in argument for argument in config.args):
            left_out += _two_thirds_of_cases(
                [item for item in items if not item.get_closest_marker("thorough")]
            )
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = {*left_out}
        items[:] = [item for item in items if item not in gone]


def _two_thirds_of_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of tests marked `sampled` all cases but a third (at least six), spread by a hash of their names.

    On a class the mark names the tests that it is about.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        test = item.nodeid.partition("[")[0]
        if mark is not None and (not mark.args or test.rpartition("::")[2] in mark.args):
            cases.setdefault(test, []).append(item)
    left_out: list[pytest.Item] = []
    for same_test in cases.values():
        same_test.sort(key=lambda item: crc32(item.nodeid.encode()))
        left_out += same_test[max(6, len(same_test) // 3) :]
    return left_out


def pytest_collection_finish() -> None:
    gc.freeze()  # what has been imported stays; looking through it takes a twentieth of the time
    gc.enable()
    atexit.register(gc.unfreeze)  # or triton would complain of what is left of it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Where several workers run tests (pytest-xdist), those marked `alone` run while the other workers wait.

    Every test stays in the room while it runs, one that is alone locks it. Who locks it holds the door meanwhile, so
    that nobody enters before the room is empty.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    shared: Path = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]
    alone = item.get_closest_marker("alone") is not None
    with ExitStack() as stack:
        door, room = (stack.enter_context((shared / name).open("w")) for name in ("door", "room"))
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(door, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def tiny_model() -> Callable[..., Any]:
    """A factory: `tiny_model("llama" | "qwen3" | "opt", num_layers=4, **config_overrides)`."""
    from tests import tiny_models as models

    return models.tiny_model


@pytest.fixture(scope="session")
def _saved_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests import tiny_models as models

    return models.save_checkpoint(tmp_path_factory.mktemp("saved") / "tiny-llama")


@pytest.fixture
def tiny_checkpoint(_saved_checkpoint: Path, tmp_path: Path) -> Path:
    """A folder with a 4-layer Llama and its tokenizer, the test's own to change."""
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    for file in _saved_checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def tiny_text(tmp_path: Path) -> Path:
    """A text file of about 20 KB, one sentence a line."""
    from tests import tiny_models as models

    path = tmp_path / "text.txt"
    path.write_text("\n".join(islice(models.sample_sentences(), 300)) + "\n")
    return path


@pytest.fixture
def tokens() -> Tensor:
    """Token ids of two sequences, (2, 11), for models with the tiny models' vocabulary."""
    import torch

    from tests import tiny_models as models

    return torch.randint(2, models.VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(7))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=int, help="how many models to draw of every family (tests/test_drawn.py)"
    )
    every = "costly ones, too, and all combinations of families, programs and ranks where a selection is the default"
    parser.addoption("--thorough", action="store_true", help=every)
    parser.addoption(
        "--one-in", type=int, default=1, help="of all these tests one in N, the same ones every time"
    )


@pytest.fixture
def drawn_settings(request: pytest.FixtureRequest) -> Any:
    """Of hypothesis: a few cases, always the same, or as many others as `--cases` says."""
    from hypothesis import HealthCheck, Phase

    asked = request.config.getoption("--cases")
    return settings(
        max_examples=asked or 2,
        derandomize=asked is None,
        # Making a case smaller takes minutes.
        phases=(Phase.generate, Phase.shrink) if asked else (Phase.generate,),
        database=None,
        suppress_health_check=list(HealthCheck),
    )
