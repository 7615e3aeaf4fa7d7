"""How scripts/gpu/check puts what it measured: a table of speeds, and a verdict in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.gpu.speeds import MEMORY
from surgeon.machine import show_size

Speeds = Mapping[str, Mapping[str, Any]]  # by row, as speeds.py yields them
SPEED_HEAD = (
    f"{'speed':<38}{'tokens/s':>9} {'ms each':>8} {'of bandwidth':>13}  most allocated (planned)"
)


def speed_line(row: str, speeds: Speeds) -> str:
    """A measured row of the table."""
    found = speeds[row]
    if row == MEMORY:
        return f"{row:<38}{found['rate'] / 1e9:>9.0f} GB/s"
    line = f"{row:<38}{found['batch'] / found['seconds']:>9.1f} {1e3 * found['seconds']:>8.2f}"
    share = bandwidth_share(row, speeds)
    shown = "" if share is None else f"{share:.0%}"
    return f"{line} {shown:>13}  {memory_words(found)}".rstrip()


def bandwidth_share(row: str, speeds: Speeds) -> float | None:
    """Of the measured bandwidth, what a pass reaches by what it has to read; None where that is not known."""
    found = speeds.get(row, {})
    if MEMORY not in speeds or "bytes" not in found:
        return None
    return float(found["bytes"] / found["seconds"] / speeds[MEMORY]["rate"])


def memory_words(found: Mapping[str, Any]) -> str:
    if "planned" not in found:
        return ""
    peak = show_size(found["peak"]) if "peak" in found else "not counted on a CPU"
    return f"{peak} ({show_size(found['planned'])})"


def verdict(rights: Mapping[str, bool], speeds: Speeds, failed: Sequence[str]) -> list[str]:
    """Sentences: what is right, how fast decoding is, how much memory it took, and what was not measured.

    Args:
        rights: by compared row, whether it is right.
        failed: rows of speeds that could not be measured.
    """
    wrong = [row for row, right in rights.items() if not right]
    said = f"{len(rights) - len(wrong)} of {len(rights)} comparisons are right"
    lines = [said + (f", {len(wrong)} WRONG: {'; '.join(wrong)}" if wrong else "")]
    lines += [_speed_words(row, speeds) for row in speeds if row.startswith("surgeon, ")]
    return lines + ([f"not measured: {'; '.join(failed)}"] if failed else [])


def _speed_words(row: str, speeds: Speeds) -> str:
    """A sentence about one load: the share of the bandwidth, and the time that others take beside surgeon's."""
    found = speeds[row]
    load = row.removeprefix("surgeon, ")
    share = bandwidth_share(row, speeds)
    texts, prompt = load.split(" x ")
    parts = [] if share is None else [f"reaches {share:.0%} of the measured bandwidth"]
    for other, measured in speeds.items():
        if other.endswith(f", {load}") and other != row:
            who = other.removesuffix(f", {load}")
            parts.append(f"is {measured['seconds'] / found['seconds']:.2f} times as fast as {who}")
    if "peak" in found:
        parts.append(f"allocates {found['peak'] / found['planned']:.2f} times what the memory plan says")
    what = f"decoding {texts} text{'s' if texts != '1' else ''} behind {prompt} tokens"
    return f"{what} {', '.join(parts) or 'was measured, and nothing to set it against'}"
