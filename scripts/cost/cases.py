"""What each printed row of the papers' tables is: which program of which model, where, and what was timed.

A row's text names these things; how each paper ran them (graphs or not, which workload) is written down here, from the
papers. Where a paper does not say, the reading is an assumption, and `NOTES` says which.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Measure = Literal["first", "token", "rate", "compute", "exchange", "total"]

TRAINING = (
    # Rows of this use are no speeds of inference; scripts/cost/racks.py and scripts/gpu have these.
    "training"
)
_SLICES = "tracks as slices of the dense model"
NOTES = {
    "layer-parallelism 1": "eager, batch 1; the paper does not say which of its tasks: read as generating to 4k tokens",
    "layer-parallelism figure 8": "eager, batch 1; a forward pass and nothing else",
    "layer-parallelism 6": "as figure 8",
    "layer-parallelism 7": "printed in ms, read as µs: two layers of 0.4 GB take 217 µs on two RTX 4090",
    "ladder-residual 1": "gpt-fast with CUDA graphs; requests' own tokens/s, the first token included",
    "parallel-track 5": f"{_SLICES}; 256 sequences at a time",
    **{f"parallel-track {table}": _SLICES for table in (6, 7, 9, 10)},
    "deinfer 4": "no dense model in the table: over Base. First token: 128 prompts of 32 tokens at once. Further ones: "
    "Base's are as fast without NVLink as with it, which leaves no time for what 128 tokens would send; read as 16",
    "deinfer 5": "one layer as 512 tokens pass it (vLLM's chunk); over Base",
}


@dataclass(frozen=True)
class Run:
    """One thing that a paper ran.

    Attributes:
        model: a key of `models.CONFIGS`.
        system: "dense", "lp:PAIRS:END" (END: the first layer behind the pairs), "ladder", "parallel", "upper",
            "tracks:D", "base" or "deinfer".
        hardware: a name as `surgeon predict --hardware` takes it.
        link: of the hardware; None for its first.
        stack: whose software: constants of the host are a stack's.
        graphs: whether decoding runs as a captured graph.
        per_layers: measure so many layers alone, if above 0: the whole less the whole with so many layers fewer.
    """

    model: str
    system: str
    hardware: str
    ranks: int
    batch: int
    prompt: int
    new: int
    stack: str
    graphs: bool
    measure: Measure
    link: str | None = None
    per_layers: int = 0


@dataclass(frozen=True)
class Case:
    """A printed row.

    Attributes:
        group: paper and table.
        text: the row's own words.
        printed: its value, as it is printed.
        use: "fit" or "check".
        run: what was run.
        baseline: what it is compared with; None if the row is such a baseline itself.
        speedup: the printed value as times the baseline's speed; None for a baseline.
        seconds: what was printed, as seconds, where it is a time (of a baseline, too); None otherwise.
    """

    group: str
    text: str
    printed: float
    unit: str
    use: str
    run: Run
    baseline: Run | None = None
    speedup: float | None = None
    seconds: float | None = None

    @property
    def paper(self) -> str:
        """The paper's name."""
        return self.group.split()[0]


Row = Mapping[str, Any]
Reader = Callable[[str, Row], tuple[Run, Run | None]]


def read_cases(rows: Sequence[Row]) -> list[Case]:
    """The cases of all rows of inference, in their order.

    Raises:
        ValueError: for a row that is of no known table, or whose baseline is not among the rows.
    """
    cases = [_read(row) for row in rows if row["use"] != TRAINING]
    printed = {case.run: case.printed for case in cases if case.baseline is None}
    return [_with_speedup(case, printed) for case in cases]


def _read(row: Row) -> Case:
    group = f"{row['paper']} {row['table']}"
    if group not in READERS:
        raise ValueError(f"no known table: {group!r}; these are: {', '.join(READERS)}")
    run, baseline = READERS[group](row["what"], row)
    return Case(group, row["what"], row["value"], row["unit"], row["use"], run, baseline)


def _with_speedup(case: Case, printed: Mapping[Run, float]) -> Case:
    value = case.printed
    unit = case.unit
    scale = {"ms": 1e-3, "as printed": 1e-6}.get(unit)
    case = replace(case, seconds=value * scale if scale else None)
    if case.baseline is None:
        return case
    if unit == "times dense":
        return replace(case, speedup=value)
    if unit == "percent improvement":
        return replace(
            case, speedup=1 + value / 100 if case.run.measure == "rate" else 1 / (1 - value / 100)
        )
    if case.baseline not in printed:
        raise ValueError(f"the baseline of {case.text!r} is not among the rows")
    base = printed[case.baseline]
    return replace(case, speedup=value / base if unit == "tokens/s" else base / value)


def _matched(pattern: str, text: str) -> re.Match[str]:
    found = re.fullmatch(pattern, text)
    if found is None:
        raise ValueError(f"cannot read the row {text!r}; expected {pattern}")
    return found


# Layer Parallelism: figure 7 gives the layer behind the last pair of Llama (28 and 25); Qwen's ends four from the end.
_END = {"llama2-7b": 28, "llama3.2-3b": 25, "qwen3-4b": 33, "qwen3-14b": 37}
_LP = Run("", "dense", "a100-sxm", 2, 1, 4096, 2, "eager", False, "token")


def _lp(pattern: str, **told: Any) -> Reader:
    """Reads a model and its layers and effective depth, or twice its pairs."""

    def read(text: str, _row: Row) -> tuple[Run, Run]:
        model, *numbers = _matched(pattern, text).groups()
        pairs = int(numbers[0]) // 2
        if len(numbers) == 2:
            pairs = int(numbers[0]) - int(numbers[1])
        base = replace(_LP, model=model, **told)
        return replace(base, system=f"lp:{pairs}:{max(_END[model], 2 * pairs)}"), base

    return read


_PARTS: dict[str, Measure] = {"total": "total", "all-reduce": "exchange", "compute": "compute"}


def _lp_profile(text: str, _row: Row) -> tuple[Run, Run | None]:
    way, part = _matched(r"two layers, (tp|lp), (total|all-reduce|compute), 2 x RTX 4090", text).groups()
    base = replace(
        _LP, model="llama3.2-3b", hardware="rtx-4090", graphs=True, stack="graphs", prompt=128
    )
    base = replace(base, measure=_PARTS[part], per_layers=2)
    if way == "tp":
        return (base, None)
    return (replace(base, system="lp:14:28"), base)


_LADDER = Run("llama3-70b", "dense", "h100-sxm", 8, 4, 1024, 512, "graphs", True, "rate")
_LADDER_MODELS = {
    "1b": "llama3.2-1b",
    "3b": "llama3.2-3b",
    "8b": "llama3-8b",
    "34b": "llama-34b",
    "70b": "llama3-70b",
    "176b": "bloom-176b",
    "405b tp16": "llama3-405b",
}
_P2P = {"with P2P": None, "p2p": None, "without P2P": "nvlink-off", "no p2p": "nvlink-off"}


def _ladder_sizes(text: str, _row: Row) -> tuple[Run, Run]:
    pattern = r"(\S+b(?: tp16)?), ladder, batch 4, prompt 1024, 512 new, TP (\d+),.* H100, (with P2P|without P2P)"
    size, ranks, p2p = _matched(pattern, text).groups()
    base = replace(_LADDER, model=_LADDER_MODELS[size], ranks=int(ranks), link=_P2P[p2p])
    return replace(base, system="ladder"), base


def _ladder_phases(text: str, _row: Row) -> tuple[Run, Run]:
    pattern = (
        r"70b, (upper|parallel|ladder) (p2p|no p2p), batch 1, TP 8, H100, (prefill|decode|tokens/s)"
    )
    system, p2p, phase = _matched(pattern, text).groups()
    measures: dict[str, Measure] = {"prefill": "first", "decode": "token", "tokens/s": "rate"}
    base = replace(_LADDER, batch=1, link=_P2P[p2p], measure=measures[phase])
    return replace(base, system=system), base


# Both servers have all-reduces of their own for small messages.
_TRACKS = Run("track-30b", "dense", "h100-sxm", 8, 1, 0, 0, "", True, "token", link="nvlink-direct")


def _tracks(text: str, _row: Row) -> tuple[Run, Run | None]:
    pattern = r"30b \(.*\), (trtllm|vllm)_(throughput|ttft_ms|tpot_ms), (\d+)(?:/(\d+))?, (dense|D(\d)), 8 x H100"
    stack, measure, prompt, new, _, depth = _matched(pattern, text).groups()
    measures: dict[str, Measure] = {"throughput": "rate", "ttft_ms": "first", "tpot_ms": "token"}
    base = replace(
        _TRACKS, stack=stack, prompt=int(prompt), new=int(new or 1), measure=measures[measure]
    )
    base = replace(base, batch=256 if measure == "throughput" else 1)
    if depth is None:
        return (base, None)
    return (replace(base, system=f"tracks:{depth}"), base)


_DEINFER = Run("llama3-70b", "base", "a800-sxm", 2, 128, 32, 256, "deinfer", False, "token")
_DECODED = 16  # see NOTES
_WIRES = {"none": "nvlink-off", "nvlink": None, "no NVLink": "nvlink-off", "NVLink": None}


def _deinfer_serving(text: str, _row: Row) -> tuple[Run, Run | None]:
    pattern = r"(70b|65b|opt30b) (none|nvlink) (ttft|itl) (base|deinfer), tp(\d), A800"
    size, wires, measure, way, ranks = _matched(pattern, text).groups()
    model = {"70b": "llama3-70b", "65b": "llama-65b", "opt30b": "opt-30b"}[size]
    base = replace(_DEINFER, model=model, link=_WIRES[wires], ranks=int(ranks))
    base = replace(base, measure="first") if measure == "ttft" else replace(base, batch=_DECODED)
    if way == "base":
        return (base, None)
    return (replace(base, system="deinfer"), base)


def _deinfer_layer(text: str, _row: Row) -> tuple[Run, Run | None]:
    pattern = (
        r"llama3-70b layer at 40%, TP (\d), (no NVLink|NVLink), A800, (base|deinfer) (compute|comm)"
    )
    ranks, wires, way, part = _matched(pattern, text).groups()
    base = replace(_DEINFER, ranks=int(ranks), link=_WIRES[wires], batch=16, new=1, per_layers=1)
    base = replace(base, measure="compute" if part == "compute" else "exchange")
    if way == "base":
        return (base, None)
    return (replace(base, system="deinfer"), base)


READERS: dict[str, Reader] = {
    "layer-parallelism 1": _lp(r"(\S+), (\d+) layers, effective depth (\d+), 2 x A100 SXM4 80GB"),
    "layer-parallelism figure 8": _lp(
        r"(\S+) delta(\d+), one token after 4k, 2 x A100 SXM4 80GB", stack="forward"
    ),
    "layer-parallelism 6": _lp(
        r"(\S+), delta (\d+), 4 x A100 PCIe", hardware="a100-pcie", ranks=4, stack="forward"
    ),
    "layer-parallelism 7": _lp_profile,
    "ladder-residual 1": _ladder_sizes,
    "ladder-residual 2": _ladder_phases,
    **{f"parallel-track {table}": _tracks for table in range(5, 11)},
    "deinfer 4": _deinfer_serving,
    "deinfer 5": _deinfer_layer,
}
