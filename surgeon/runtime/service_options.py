"""Options of a service."""

from __future__ import annotations

from dataclasses import dataclass, field

from surgeon.language.program import Program
from surgeon.processes.watchdog import PATIENCE_SECONDS
from surgeon.runtime.plan.drafts import named_draft
from surgeon.runtime.plan.specification import Ways
from surgeon.runtime.worker.options import RankOptions

CODA = "coda"
LOOKUP = "lookup"


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service; what needs no model to check it is checked as it is made.

    Attributes:
        program: in place of the checkpoint's own.
        max_batch: requests that are computed together.
        max_tokens: of prompt and output of a request together; by default the model's positions.
        blocks: of the cache; by default enough for `max_batch` of the longest requests, as far as they fit.
        memory: bytes of weights and cache, of all ranks together (of each on GPUs); by default most of the free.
        max_waiting: requests that may be open beyond `max_batch`.
        patience: seconds without any progress after which busy ranks are given up.
        dtype, decoding, low_rank, kv: as of `Ways`.
        halves: whether passes are computed in two halves, one while the other's reductions are on their way: "on" or
            "off".
        draft: a program over the same weights, or a variant by name ("lp"), that drafts tokens, which the model
            verifies; "coda" for the checkpoint's first rack and its coda; "lookup" for a text's own tokens behind its
            last few ones. Greedy tokens and those of a seed stay the same (up to rounding), and others keep their
            distribution.
        draft_tokens: at a time; by default as many as pay (runtime/batching/ahead.py).
        pipeline: each rank holds a stretch of the program, and works while the others go on with other texts, or with
            drafts of the coda of the checkpoint's first rack. Texts are the same.

    Raises:
        ValueError: if the ranks are not connected, a number is too small, there are no such drafts or not of another
            program, or a pipeline cannot do what is asked of it besides.
    """

    ranks: RankOptions = field(default_factory=RankOptions)
    program: Program | str | None = None
    max_batch: int = 8
    max_tokens: int | None = None
    blocks: int | None = None
    memory: int | None = None
    max_waiting: int = 64
    patience: float = PATIENCE_SECONDS
    dtype: str = "auto"
    decoding: str = "auto"
    low_rank: str = "auto"
    kv: str = "auto"
    halves: str = "off"
    draft: Program | str | None = None
    draft_tokens: int | None = None
    pipeline: bool = False

    def __post_init__(self) -> None:
        self._check_pipeline()
        if self.draft == CODA:
            if self.program is not None:
                raise ValueError(
                    "codas draft for the checkpoint's own program; leave the other program or the drafts out"
                )
        elif isinstance(self.draft, str) and self.draft != LOOKUP:
            named_draft(self.draft)
        elif self.draft is None and self.draft_tokens is not None:
            raise ValueError(
                "draft_tokens says how many tokens to draft; say with what, too: a program, or coda"
            )
        if self.draft_tokens and self.max_tokens and self.draft_tokens >= self.max_tokens:
            raise ValueError(
                f"draft_tokens {self.draft_tokens} are more than any text has room for behind its first token, of "
                f"{self.max_tokens} tokens at most; draft fewer"
            )
        if self.ranks.collectives == "none":
            raise ValueError(
                "collectives none leave the ranks unconnected, and their text would be wrong; use auto (surgeon bench "
                "measures with none)"
            )
        least_of = {"max_batch": 1, "max_waiting": 0, "max_tokens": 2, "blocks": 1, "draft_tokens": 1}
        for name, least in least_of.items():
            number = getattr(self, name)
            if number is not None and number < least:
                raise ValueError(f"{name} must be at least {least}, not {number}")
        if not self.patience > 0:
            raise ValueError(f"patience must be above 0 seconds, not {self.patience:g}")

    def _check_pipeline(self) -> None:
        if not self.pipeline:
            return
        if self.draft is not None:
            raise ValueError(
                "a pipeline drafts with the coda of the checkpoint's first rack, and with nothing else; leave the "
                "draft out"
            )
        if self.ranks.device != "cpu":
            raise ValueError("pipelines run on CPU ranks only, so far; use the device cpu")
        if self.ranks.compression is not None:
            raise ValueError(
                "a pipeline sends streams as they are, and sums nothing; leave the compression out"
            )
        if self.halves == "on":
            raise ValueError("halves hide reductions, and a pipeline has none; use halves off")

    @property
    def ways(self) -> Ways:
        return {"dtype": self.dtype, "decoding": self.decoding, "low_rank": self.low_rank, "kv": self.kv}

    @property
    def most_open(self) -> int:
        return self.max_batch + self.max_waiting
