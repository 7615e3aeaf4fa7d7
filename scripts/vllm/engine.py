"""Speed of vLLM on CPU ranks, measured in processes of its own environment (cells.py)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
CELLS = Path(__file__).with_name("cells.py")
MARK = "CELL "  # of its answers
# Every process of Python imports this module first, so that vLLM runs as on processors without AVX-512.
AVX2 = "import torch\n\ntorch.cpu._is_avx512_supported = lambda: False\n"


def vllm_python(given: str) -> str:
    """The value of an option: a Python by its name or path, as one that is found from every folder.

    Raises:
        ArgumentTypeError: if there is no such program.
    """
    found = shutil.which(given)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{given!r} is no program; name the Python of an environment with vLLM"
        )
    return str(Path(found).absolute())  # not resolved: a link is what makes it that environment's


def require_plugin(parser: argparse.ArgumentParser) -> None:
    """End if the project's folder does not say that it has one: vLLM would run the modeling files in checkpoints."""
    entries = [entry for one in distributions(path=[str(PROJECT)]) for entry in one.entry_points]
    if not any(entry.group == "vllm.general_plugins" for entry in entries):
        parser.error(
            f"vLLM would not find surgeon's plugin in {PROJECT}: run pip install -e . there first"
        )


def vllm_environment(
    ranks: int, cache_gigabytes: int = 1, given: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a process in which vLLM is to run on so many CPU ranks: a core for each, or all for one.

    Args:
        given: what else is in it, but for a number of threads.
    """
    cores = sorted(os.sched_getaffinity(0))
    bound = ",".join(map(str, cores)) if ranks == 1 else "|".join(map(str, cores[:ranks]))
    inherited = {key: value for key, value in given.items() if key != "OMP_NUM_THREADS"}
    return inherited | {
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gigabytes),
        "VLLM_CPU_OMP_THREADS_BIND": bound,
    }


def decode_rates(
    command: Sequence[str], prompt: int, new: int, batches: Sequence[int], **options: Any
) -> dict[int, float]:
    """New tokens per second in passes that bring every text one, by batch.

    Args:
        command: cells.py by vLLM's Python, with its arguments.
        options: of `subprocess.run`.

    Raises:
        CalledProcessError: if vLLM fails; it has said why.
    """
    # Every batch is warmed up with two tokens.
    asked = "".join(f"{batch} {prompt} {tokens}\n" for batch in batches for tokens in (2, new))
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True, **options)
    found = [
        json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)
    ]
    return {
        batch: batch / median(passes) for batch, (_, passes) in zip(batches, found[2::2], strict=True)
    }


def vllm_rates(
    python: str,
    model: Path,
    ranks: int,
    options: argparse.Namespace,
    avx2: bool = False,
    reduce: str | None = None,
) -> dict[int, float]:
    """`decode_rates` on CPU ranks, with this project's plugin.

    Args:
        python: the Python of an environment with vllm-cpu.
        options: have prompt, new and batch.
        avx2: as on a processor without AVX-512, where vLLM's ranks talk through gloo.
        reduce: of surgeon's plugin, for checkpoints in the program form.
    """
    sizes = (ranks, options.prompt + options.new, max(options.batch))
    command = [python, str(CELLS), str(model), *map(str, sizes)]
    if reduce is not None:
        command += ["--additional-config", json.dumps({"surgeon": {"reduce": reduce}})]
    environment = vllm_environment(ranks)
    with tempfile.TemporaryDirectory() as folder:
        if avx2:
            (Path(folder) / "sitecustomize.py").write_text(AVX2)
        environment["PYTHONPATH"] = os.pathsep.join([folder, str(PROJECT)])
        return decode_rates(command, options.prompt, options.new, options.batch, env=environment)


class Measurer:
    """vLLM with a model loaded, in a process that stands still but for what it is asked to measure."""

    def __init__(
        self,
        python: str,
        model: Path,
        ranks: int,
        longest: int,
        batch: int,
        cache_gigabytes: int,
        given: Mapping[str, str],
    ) -> None:
        """Load it.

        Args:
            python: the Python of an environment with vllm-cpu.
            longest: most tokens of a text with its continuation.
            batch: most texts at a time.
            given: the environment that it is started in.

        Raises:
            ChildProcessError: if vLLM ends; it has said why.
        """
        command = [python, str(CELLS), *map(str, (model, ranks, longest, batch))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = vllm_environment(ranks, cache_gigabytes, given)
        # It has a group of its own, so that all of vLLM's processes can be stopped.
        self._process: Any = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def measure(self, batch: int, prompt: int, new: int) -> tuple[float, list[float]]:
        """Seconds to the first token of every text, and of each later pass of all texts."""
        self._signal(signal.SIGCONT)
        self._process.stdin.write(f"{batch} {prompt} {new}\n")
        self._process.stdin.flush()
        first, passes = self._answer()
        self._signal(signal.SIGSTOP)
        return first, passes

    def _answer(self) -> Any:
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise ChildProcessError(f"vLLM has ended with {self._process.wait()}")

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End vLLM."""
        self._signal(signal.SIGKILL)
        self._process.wait()
