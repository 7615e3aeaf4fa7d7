"""What a further worker of a search runs: the same search, all of it but its end."""

from __future__ import annotations

import sys

from surgeon.commands.searching import join_search
from surgeon.gpus import avoid_cudnn_attention
from surgeon.searches.question import Question
from surgeon.searches.workers import given_to_worker
from surgeon.threads import wait_asleep

INTERRUPTED = 130  # as a shell has it


def main() -> int | str:
    """Work until there is nothing left to do; returns what the process exits with."""
    wait_asleep()
    avoid_cudnn_attention()
    index, given = given_to_worker()
    try:
        join_search(given["model"], Question.from_json(given["question"]), index)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError) as error:
        return f"error: {error}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
