"""How much memory ranks take while they load a model, and then: against their share of the weights.

    python scripts/bench/loading.py [--layers 32] [--hidden 4096] [--ranks 2] [--folder DIR] [--dtype bfloat16]

Makes a random checkpoint of a 7B Llama's shape in bfloat16, in shards of 1 GB (in DIR, where it stays, or in a
temporary folder), has ranks load it without computing anything, and prints for each rank its share of the matrices,
the most memory it had of its own while loading, and what it has afterwards: anonymous memory (RssAnon), all of its
process, the libraries' own and all; pages of the files are the system's and not counted. Where a rank's peak is
more than 1.1 times its share, that is said below the table, and the exit status is 3. Twelve layers of this width take
5 GB of disk and as much memory on two ranks.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import pandas as pd
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.goals import MISSED, missed
from scripts.bench.large_model import make_model
from scripts.commands import add_defaults, make_parser
from scripts.markdown import print_table
from surgeon.machine import show_size
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import load

MOST = 1.1  # times its share, that a rank may take
SHARD_BYTES = 1 << 30
EVERY_SECONDS = 0.01


def anonymous(pid: int) -> int:
    """Bytes of memory that a process has of its own."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/{pid}/status has no RssAnon; this needs Linux")


class Watch:
    """The most memory that some processes have had of their own since it began."""

    def __init__(self, pids: list[int]) -> None:
        self.peaks = [anonymous(pid) for pid in pids]
        self._pids = pids
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            self.peaks = [
                max(peak, anonymous(pid)) for peak, pid in zip(self.peaks, self._pids, strict=True)
            ]

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self._thread.join()


def main() -> None:
    goal = f"a rank took more than {MOST} times its share"
    parser = make_parser(__doc__, epilog=f"Exit status {MISSED}: {goal}.")
    parser.add_argument("--folder", type=Path, help="keep the model here, and use it again")
    add_defaults(
        parser,
        layers=32,
        hidden=4096,
        neurons=11008,
        ranks=2,
        dtype=("bfloat16", "that the ranks hold the weights in"),
    )
    arguments = parser.parse_args()
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.neurons,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 128,
        num_key_value_heads=arguments.hidden // 128,
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "model"
        if not (folder / "config.json").is_file():
            make_model(folder, config, SHARD_BYTES)
        plan = make_plan(folder, arguments.ranks, 128, dtype=arguments.dtype)
        with Ranks(RankOptions(arguments.ranks)) as ranks:
            before = [anonymous(pid) for pid in ranks.pids]
            watch = Watch(ranks.pids)
            begun = time.perf_counter()
            ranks.call(load, plan)
            seconds = time.perf_counter() - begun
            watch.end()
            after = [anonymous(pid) for pid in ranks.pids]
        shares = footprint(plan).weights
    title = (
        f"{arguments.layers} layers of {arguments.hidden}, {arguments.dtype}, loaded in {seconds:.0f} s"
    )
    held = pd.DataFrame({"share": shares, "before": before, "peak": watch.peaks, "after": after})
    shown = held.map(show_size).assign(ratio=(held["peak"] / held["share"]).map("{:.3f}".format))
    print_table(title, ["rank", *held, "peak / share"], shown.itertuples(), left=())
    if (held["peak"] > MOST * held["share"]).any():
        raise missed(goal)


if __name__ == "__main__":
    main()
