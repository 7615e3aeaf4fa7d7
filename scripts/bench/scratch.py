"""Small models from scratch, one architecture beside another: equal parameters, tokens, order, seeds; held-out loss.

    python scripts/bench/scratch.py -o FOLDER [--rows dense,attention-mlp,ladder,...] [--seeds N] [--steps N]
                                    [--width N] [--rate X] [--sweep X,Y,...] [--table]

The rows are in kind those of Ladder Residual's table 3 (dense, attention || MLP, ladder) and of Parallel Track's tables
2 to 4 (dense, and 2 or 4 native tracks that meet every D layers: tracks-2-D), on a model that one core trains in
minutes. All of them see the same windows in the same order; those with the dense model's layers begin with its weights.
Native tracks have as many parameters in their layers as the dense model, and narrower embeddings: both are printed.
The rows sliced-2-D are the post-hoc way: the trained dense model of the same seed cut into tracks, and healed with a
fifth of its steps at a fifth of its rate.
FOLDER/ROW-SEED.run is a run's folder, which `surgeon report` takes. Killed, the same command goes on where it was, and
runs that are there are not made again. --sweep tries learning rates on the dense model, judged by training text that no
run learns from; --table prints the table of what is there, and runs nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from surgeon.checkpoint.read import Checkpoint
from surgeon.exports.saving import edit
from surgeon.library.train import story_of, train_blueprint
from surgeon.models.edit import restore
from surgeon.processes.files import write_table
from surgeon.provenance import provenance
from surgeon.quality.data import DEMO
from surgeon.quality.sources import DEMO_TRAINING
from surgeon.quality.summary import Values, interval
from surgeon.quality.text import logits_of, text_values
from surgeon.training.model import TrainedModel, train_model
from surgeon.training.resume import RECORD_FILE, finish_run, read_record
from surgeon.training.scratch.build import Blueprint, blueprint
from surgeon.training.scratch.config import ScratchConfig, parse_config
from surgeon.training.scratch.tracks import count_parameters
from surgeon.training.texts import TrainTexts

DENSE = "dense"
LAYERS = 8
WINDOWS = "windows.csv"  # of a run: the negative log-likelihood of every held-out window
MEASUREMENTS = 2  # on held-out text, while a run goes on
MODEL = f"""\
surgeon: 1
model:
  model_type: llama
  hidden_size: {{width}}
  intermediate_size: {{neurons}}
  num_hidden_layers: {LAYERS}
  num_attention_heads: 4
  num_key_value_heads: 4
  max_position_embeddings: 512
  tie_word_embeddings: true
tokenizer: demo
data: {DEMO_TRAINING}
"""
ALL = f"0:{LAYERS}"
SLICED, SHORTER = "sliced-", 5  # so many times fewer steps than dense has had, at as much lower a rate
TRAINED_MODEL = "model"  # of a dense run, in its folder: what sliced rows begin with
PROGRAMS = {
    DENSE: "",
    "attention-mlp": f'operations: [{{fuse_attention_mlp: {{layers: "{ALL}"}}}}]',
    "ladder": f'operations: [{{ladder: {{layers: "{ALL}"}}}}]',
    "desync-2": f'operations: [{{desync: {{layers: "{ALL}", count: 2}}}}]',
    **{
        f"tracks-{count}-{depth}": f"tracks: {{count: {count}, depth: {depth}}}"
        for count in (2, 4)
        for depth in (1, 2, 4, 8)
    },
    **{
        f"{SLICED}2-{depth}": f'operations: [{{tracks: {{layers: "{ALL}", count: 2, depth: {depth}}}}}]'
        for depth in (2, 4)
    },
}


@dataclass(frozen=True)
class ScratchRun:
    """One training of one architecture."""

    row: str
    seed: int
    rate: float

    @property
    def sliced(self) -> bool:
        """Whether it is cut out of the trained dense model, and healed."""
        return self.row.startswith(SLICED)

    def config(self, arguments: argparse.Namespace, judged_by: str | None) -> ScratchConfig:
        """What it trains; judged by the end of the training text where no other text is given."""
        shorter = SHORTER if self.sliced else 1
        steps, rate = arguments.steps // shorter, self.rate / shorter
        every = math.ceil(steps / MEASUREMENTS)
        lines = [PROGRAMS[self.row], f"window: {arguments.window}", f"eval_tokens: {arguments.eval_tokens}"]
        lines += [] if judged_by is None else [f"eval_data: {judged_by}"]
        training = f"steps: {steps}, batch: {arguments.batch}, learning_rate: {rate}, warmup: {max(1, steps // 20)}"
        more = f"seed: {self.seed}, evaluate_every: {every}, save_every: {every}, arguments: {{weight_decay: 0.1}}"
        model = MODEL.format(width=arguments.width, neurons=arguments.width * 8 // 3)
        return parse_config("\n".join([model, *lines, f"training: {{{training}, {more}}}"]), self.row)


def measure(run: ScratchRun, arguments: argparse.Namespace, folder: Path, judged_by: str | None) -> None:
    """Train, and leave what came of it; nothing if that is there."""
    if is_whole(folder):
        return
    plan = blueprint(run.config(arguments, judged_by))
    texts = plan.texts()
    print(f"{folder.name}: {plan.parameters:,} parameters; {texts.line()}", flush=True)
    found = _healed(run, plan, texts, folder) if run.sliced else train_blueprint(plan, texts, folder)
    assert found is not None
    if run.row == DENSE:
        restore(found.whole.model).save_pretrained(folder / TRAINED_MODEL)
    values = text_values(logits_of(found.whole.model.eval()), texts.held_out.ids, bar=False).nll
    write_table(folder / WINDOWS, pd.DataFrame({"nll": values}))
    story = story_of(plan, texts, found)
    sizes = count_parameters(plan.architecture)
    known = {"row": run.row, "parameters": sum(sizes), "parameters_in": sizes._asdict()}
    finish_run(folder, provenance(run.row, "", seed=run.seed, **known, **story))


def _healed(run: ScratchRun, plan: Blueprint, texts: TrainTexts, folder: Path) -> TrainedModel | None:
    """The dense model of this seed, as it was trained, changed to a program and trained on."""
    dense = folder.parent / f"{DENSE}-{run.seed}.run" / TRAINED_MODEL
    if not dense.is_dir():
        raise FileNotFoundError(f"there is no {dense} to cut slices out of; run the row {DENSE} first")
    model = edit(AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32), plan.program)
    known = plan.identity() | {"begins": Checkpoint(dense).model_hash()}
    return train_model(model, texts, plan.config.settings, folder, program=plan.program, identity=known)


def is_whole(folder: Path) -> bool:
    """Whether a run has come to its end."""
    return (folder / RECORD_FILE).is_file() and "trained" in read_record(folder)


def whole_runs(folder: Path) -> dict[str, dict[int, Path]]:
    """The runs that have come to their ends, by row and seed, in the rows' order."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob("*.run")):
        if is_whole(path):
            record = read_record(path)
            found.setdefault(record["row"], {})[int(record["seed"])] = path
    return {row: found[row] for row in (*PROGRAMS, *found) if row in found}


def values_of(path: Path) -> Values:
    """The negative log-likelihood of every held-out window, nats per token."""
    return pd.read_csv(path / WINDOWS)["nll"].to_numpy(dtype=np.float64)


def rows_of(folder: Path) -> Iterator[list[str]]:
    """The table: a head, then a row for every architecture."""
    found = whole_runs(folder)
    yield [
        *("architecture", "parameters in layers", "in ends", "tokens", "seeds"),
        *("held-out loss (95%)", "its seeds", "perplexity"),
        *("minus dense (95%)", "its seeds"),
    ]
    for row, runs in found.items():
        record = read_record(next(iter(runs.values())))
        values = np.stack([values_of(path) for path in runs.values()])
        sizes = [f"{record['parameters_in'][part]:,}" for part in ("layers", "ends")]
        known = [row, *sizes, f"{record['tokens']:,}", str(len(runs))]
        loss = [_with_interval(values.mean(0)), _spread(values.mean(1)), f"{math.exp(values.mean()):.2f}"]
        yield [*known, *loss, *_against_dense(row, runs, found.get(DENSE, {}))]


def _against_dense(row: str, runs: dict[int, Path], dense: dict[int, Path]) -> list[str]:
    """The difference from the dense model over the same windows and seeds."""
    shared = sorted(runs.keys() & dense.keys())
    if row == DENSE or not shared:
        return ["", ""]
    apart = np.stack([values_of(runs[seed]) - values_of(dense[seed]) for seed in shared])
    return [_with_interval(apart.mean(0), "+"), _spread(apart.mean(1), "+")]


def _with_interval(values: Values, sign: str = "") -> str:
    """A mean over windows with its 95% interval."""
    low, high = interval(values)
    return f"{values.mean():{sign}.4f} ({low:{sign}.4f} to {high:{sign}.4f})"


def _spread(means: NDArray[np.float64], sign: str = "") -> str:
    """The least and the highest of some seeds' means."""
    return f"{means.min():{sign}.4f} to {means.max():{sign}.4f}"


def show(rows: Sequence[Sequence[str]]) -> None:
    """Print a table in markdown."""
    head, *others = rows
    for line in (head, [":--", *["--:"] * (len(head) - 1)], *others):
        print(f"| {' | '.join(line)} |")


def sweep(arguments: argparse.Namespace) -> None:
    """The dense model at several learning rates, judged by training text that no run learns from."""
    rows: list[list[str]] = [["learning rate", "held-out loss (95%)"]]
    for rate in arguments.sweep:
        folder = arguments.output / "sweep" / f"{DENSE}-{rate:g}.run"
        measure(ScratchRun(DENSE, 0, rate), arguments, folder, None)
        rows.append([f"{rate:g}", _with_interval(values_of(folder))])
        show(rows)


def _parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    def rates(text: str) -> list[float]:
        return [float(rate) for rate in text.split(",") if rate]

    def names(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in PROGRAMS]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no row; known: {', '.join(PROGRAMS)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rows", type=names, default=list(PROGRAMS), help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=96, help="of the dense model; a multiple of 24")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="windows in a step")
    parser.add_argument("--window", type=int, default=128, help="tokens in a window")
    parser.add_argument("--eval-tokens", type=int, default=16384)
    parser.add_argument("--rate", type=float, default=3e-3, help="the learning rate of all rows")
    parser.add_argument("--sweep", type=rates, default=[], help="learning rates to try: 1e-3,2e-3,4e-3")
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """As a command; `given` in place of its arguments."""
    arguments: Any = _parse(given)
    if arguments.sweep:
        sweep(arguments)
        return
    if not arguments.table:
        for run in (ScratchRun(row, seed, arguments.rate) for seed in range(arguments.seeds) for row in arguments.rows):
            measure(run, arguments, arguments.output / f"{run.row}-{run.seed}.run", DEMO)
    show(list(rows_of(arguments.output)))


if __name__ == "__main__":
    main()
