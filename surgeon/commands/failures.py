"""The line and the exit code of a command that fails or is interrupted.

1 is something the user can mend (a ValueError, an OSError, a missing extra, too little memory or disk), 2 wrong usage
(an unknown command or option, a missing argument), 70 a defect of surgeon's, 130 an interruption, 141 a closed pipe.
"""

from __future__ import annotations

import os
from pathlib import Path

from surgeon.errors import full_place, is_full_disk, is_out_of_memory

MENDABLE = 1
INTERNAL = 70
INTERRUPTED = 130
CLOSED_PIPE = 141

# Of commands that keep what they have found as they go.
_GOES_ON = "run the same command again to go on"
_KEEPS_NOTHING = "nothing was written"
_ANEW = f"{_KEEPS_NOTHING}; the same command would begin anew"
_INTERRUPTED = {
    "export": f"no checkpoint was written, and factors that were made are kept; {_GOES_ON}",
    "generate": "the text is not finished",
    "chat": "the conversation is lost",
    "serve": "requests that were running are lost",
    "bench": _ANEW,
    "calibrate": _ANEW,
}
_INTERRUPTED |= dict.fromkeys(
    ["explore", "scan", "sensitivity", "spectrum", "search", "heal", "train", "eval", "demo"], _GOES_ON
)
_INTERRUPTED |= dict.fromkeys(
    ["check", "families", "similarity", "show", "card", "predict", "report"], _KEEPS_NOTHING
)


def explain(error: BaseException, output: str | None = None) -> tuple[str, int]:
    """Put an exception into one line, with its exit code; for a full disk without a file names the output."""
    if is_full_disk(error) and not (isinstance(error, OSError) and error.errno is None):
        place = full_place(error) or output
        disk = ""
        if place is not None and "://" not in place:
            path = Path(place).absolute()
            mount = next(
                parent
                for parent in (path, *path.parents)
                if os.path.ismount(parent) or parent == parent.parent
            )
            if mount != mount.parent:  # there are several
                disk = f" on {mount}"
        line = f"error: no space left for {place or 'the output'}; free some space{disk} and run the same command again"
        return line, MENDABLE
    if is_out_of_memory(error):
        advice = "use a smaller model or a smaller limit, or close other programs"
        return f"error: out of memory ({_text(error)}); {advice}", MENDABLE
    if isinstance(error, OSError | ValueError | ImportError):
        return f"error: {_text(error)}", MENDABLE
    kind = type(error).__name__
    return f"internal error: {kind}: {_text(error)}; run again with --debug for the traceback", INTERNAL


def explain_interruption(command: str, output: str | None = None) -> str:
    """Say what became of an interrupted command's work."""
    words = _INTERRUPTED.get(command)
    if command == "eval" and output is None:
        words = "no answers were kept, as they are with --output"
    return "interrupted" if words is None else f"interrupted; {words}"


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    lines = str(error).strip().splitlines()
    # A traceback of another process ends in the error.
    if any(line.startswith("Traceback ") for line in lines):
        lines = lines[-1:]
    return " ".join(" ".join(lines).split()) or type(error).__name__
