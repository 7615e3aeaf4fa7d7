"""Decoding with a coda against decoding without, and the wavefront over racks against sequential pipelined decoding.

    python scripts/bench/coda_drafts.py -o TABLE.md [--folder DIR] [--cut 8] [--depth 2] [--train-seconds 300]
                                   [--drafts 1 2 3 4 5 6] [--ranks 1 2] [--links 0us 200us 1ms] [--racks 2] [--rounds 5]

--folder is a checkpoint with codas; where there is none, it is made: the demo model with a coda behind layer --cut
(coda_training.py). One text at a time, greedy and drawn; prompts are of text that the demo model has not seen. All ways
of decoding take turns in every round, so that whatever else the machine does happens to all of them; tables have
medians over rounds and prompts. Greedy texts are compared: those that differ are counted. Beside the clock's seconds
there are the processor's (of rank 0, its prompt included), which other programs on the machine change less. A round
ends with the first token that was not drafted, or not rightly.

On a machine that is not alone, racks are measured in slow motion: --paces 10ms --links 20ms 100ms is 0.1 ms a node with
links of 0.2 and 1 ms, a hundred times slower.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from transformers.utils import logging

from scripts.bench.coda_training import demo_with_coda
from scripts.bench.decoding import write_tables
from scripts.bench.draft_runs import Run, on_ranks, over_racks, prompts_of
from scripts.bench.wavefront import even_racks, folder_plan
from surgeon.runtime.comm.link import Link, parse_seconds


def table(runs: Sequence[Run], title: str, unit: str, plain: int) -> Iterator[str]:
    """Medians by place, kind and number of drafts.

    Args:
        plain: the number that what is compared with has.
    """
    yield f"### {title}\n"
    columns = "accepted | tokens per round | tokens/s (range) | x | x, processor | other texts"
    yield f"| where | texts | {unit} | {columns} |"
    yield "|:--|:--|--:|--:|--:|--:|--:|--:|--:|"
    for place, kind in dict.fromkeys((run.place, run.kind) for run in runs):
        here = [run for run in runs if (run.place, run.kind) == (place, kind)]
        base = {(run.prompt, turn): run for turn, run in numbered(here, plain)}
        for drafts in dict.fromkeys(run.drafts for run in here):
            own = numbered(here, drafts)
            ratios = [run.rate / base[run.prompt, turn].rate for turn, run in own]
            known = [run.processor for _, run in own if run.processor]
            cheaper = median(base[run.prompt, turn].processor / run.processor for turn, run in own) if known else 0.0
            rates = sorted(run.rate for _, run in own)
            drafted, accepted = sum(run.drafted for _, run in own), sum(run.accepted for _, run in own)
            others = len({run.prompt for turn, run in own if run.tokens != base[run.prompt, turn].tokens})
            alpha = accepted / drafted if drafted else 0.0
            new = sum(len(run.tokens) - 1 for _, run in own)
            per_round = new / (new - accepted) if drafted else 1.0
            cells = [
                *(place, kind, str(drafts), f"{alpha:.0%}" if drafted else "", f"{per_round:.2f}"),
                f"{median(rates):.0f} ({rates[len(rates) // 10]:.0f} to {rates[-1 - len(rates) // 10]:.0f})",
                f"{median(ratios):.2f}",
                f"{cheaper:.2f}" if known else "",
                str(others) if kind == "greedy" else "",
            ]
            yield "| " + " | ".join(cells) + " |"
    yield ""


def numbered(runs: Sequence[Run], drafts: int) -> list[tuple[int, Run]]:
    """The runs with so many drafts, each with its round."""
    seen: dict[int, int] = {}
    found = []
    for run in runs:
        if run.drafts == drafts:
            seen[run.prompt] = seen.get(run.prompt, 0) + 1
            found.append((seen[run.prompt], run))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a checkpoint with codas; made where there is none")
    parser.add_argument("--cut", type=int, default=8)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--train-seconds", type=float, default=300)
    parser.add_argument("--drafts", nargs="*", type=int, default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--windows", nargs="*", type=int, default=[2, 3, 4, 6, 8], help="tokens in flight over racks")
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--links", nargs="*", type=parse_seconds, default=[0.0, 0.0002, 0.001], help="between racks")
    parser.add_argument("--rank-links", nargs="*", type=parse_seconds, default=[], help="between ranks, besides none")
    parser.add_argument(
        "--paces", nargs="*", type=parse_seconds, default=[0.0], help="seconds of a node (wavefront.py)"
    )
    parser.add_argument("--racks", nargs="*", type=int, default=[2])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, help="write the tables here too, every run beside it as JSON")
    options = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "demo-with-coda"
        demo_with_coda(folder, options.cut, options.depth, options.train_seconds)
        prompts = prompts_of(folder, options.prompts, options.prompt)
        plan = folder_plan(folder, options.prompt + options.new)
        assert plan.coda is not None
        nodes = plan.coda.nodes
        ranks: list[Run] = []
        for count in options.ranks:
            for link in (None, *(Link(delay) for delay in options.rank_links if count > 1)):
                ranks += on_ranks(plan, count, link, prompts, options)
        racks: list[Run] = []
        for count in options.racks:
            racks += over_racks(plan, even_racks(plan, count, nodes), options.links, prompts, options)
        load_average = f"Load average at the end: {os.getloadavg()[0]:.1f}.\n"
        name = f"rack 0 of {nodes} nodes, coda of {plan.coda.plan.layers} layers"
        texts = [
            "\n".join(table(ranks, f"Drafts of a coda, one text ({name})", "drafts", 0)),
            "\n".join(table(racks, f"Wavefront over racks, one text ({name})", "in flight", 1)),
            load_average,
        ]
        print("\n".join(texts))
        write_tables(options.output, texts, {"runs": [asdict(run) for run in (*ranks, *racks)]})


if __name__ == "__main__":
    main()
