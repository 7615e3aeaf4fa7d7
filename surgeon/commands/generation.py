"""The result of `surgeon.generate`: texts, and their figures in a few lines for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

from surgeon.language.program import Program
from surgeon.runtime.comm.collectives import Counts, Phase
from surgeon.runtime.model.engine import Figures
from surgeon.runtime.plan.placement import norm_sums
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.service import Answer
from surgeon.runtime.worker.rank import RankOptions
from surgeon.words import hang_indent, plural

_KEY = 9  # columns of what stands before a line


@dataclass(kw_only=True)
class GeneratedText(Answer):
    """The text after one prompt."""

    prompt: str

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of the tokens after the first one; None if there are none."""
        usage = self.usage
        if usage.seconds:
            return (usage.new - 1) / usage.seconds
        return None


@dataclass(frozen=True, repr=False)
class Generation:
    """Texts that go on from prompts, in their order, with the figures of all passes, by rank; as text, the figures."""

    texts: tuple[GeneratedText, ...]
    plan: Plan
    layers: int  # of the original, where the checkpoint has fewer
    ranks: RankOptions
    figures: Sequence[Figures]
    drafts: bool = False

    def table(self) -> pd.DataFrame:
        """One row per text: its prompt, the text, and its figures."""
        rows = [
            {
                "prompt": text.prompt,
                "text": text.text,
                "prompt_tokens": text.usage.prompt,
                "new_tokens": text.usage.new,
                "finish_reason": text.finish_reason,
                "tokens_per_second": text.tokens_per_second,
            }
            for text in self.texts
        ]
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        return f"<Generation: {plural(len(self.texts), 'text')} on {plural(self.plan.ranks, 'rank')}>"

    def __str__(self) -> str:
        plan = self.plan
        first = self.figures[0]
        program = Program.parse(plan.program)
        depth = program.effective_depth(plan.family.steps_per_layer)
        shared = ""
        if cached := self._total("cached"):
            shared = f" ({cached} more were shared)"
        texts = ""
        if len(self.texts) > 1:
            texts = f" of {len(self.texts)} texts"
        seconds = first.decode.seconds + first.drafting.seconds
        if first.decode.passes:
            rate = f"{first.decode.new / seconds:.1f} tokens/s"
        else:
            rate = "nothing after the first token"
        prefill = first.prefill
        lines = [
            f"ranks    {plan.ranks} ({self.ranks}, {plan.dtype})",
            f"program  effective depth {depth:g} of {plural(self.layers, 'layer')}",
            f"prefill  {plural(prefill.tokens, 'token')}{shared} at {prefill.tokens / prefill.seconds:.1f} tokens/s",
            f"decode   {plural(self._total('new'), 'token')}{texts} at {rate}",
        ]
        drafted = self._total("drafted")
        accepted = self._total("accepted")
        if plan.stretches:
            spans = ", ".join(f"{begin}:{end}" for begin, end in pairwise((0, *self.plan.stretches)))
            drafts = "none: one token of each text in flight"
            if drafted:
                drafts = (
                    f"{accepted} of {drafted} tokens of the coda's were right ({accepted / drafted:.0%})"
                )
            lines += [f"nodes    {spans}, a stretch on each rank", f"drafts   {drafts}"]
        elif self.drafts and drafted:
            phases = first.drafting, first.decode
            calls = sum(_calls(phase.layers) + _calls(phase.vocabulary) for phase in phases)
            passes = (
                f"{first.drafting.passes} passes of the draft beside {first.decode.passes} of the model"
            )
            new = self._total("new")
            per_pass = f"{new / (new - accepted):.2f} tokens of a text per pass"
            share = f"{accepted} of {drafted} tokens accepted ({accepted / drafted:.0%})"
            each = f"{calls / max(1, first.decode.new):.1f} collectives per token"
            lines += [
                f"drafts   {share}, {passes}, {per_pass}",
                f"sync     {each}, those of the vocabulary among them",
            ]
        elif self.drafts:
            lines.append("drafts   none: the texts were too short, or it would not have paid")
        else:
            lines += self._collectives(program)
        return "\n".join(hang_indent(line[:_KEY], line[_KEY:]) for line in lines)

    def _total(self, name: str) -> int:
        return sum(getattr(text.usage, name) for text in self.texts)

    def _collectives(self, program: Program) -> list[str]:
        unit = "token" if len(self.texts) == 1 else "pass"
        compression = self.ranks.compression
        layers, calls, sent = _per_pass(self.figures, lambda phase: phase.layers)
        ends, _, sent_at_ends = _per_pass(self.figures, lambda phase: phase.vocabulary)
        norms = norm_sums(self.plan)
        expected = program.sync_points(self.plan.ranks) + norms
        if norms:
            right = f"{norms} of them for norms of all heads"
        else:
            right = "as the program has"
        agrees = right if calls == expected else f"but the program has {expected}!"
        if calls > expected and any(sublayer.ranks for sublayer in program.sublayers()):
            # How they are shared out is not its own.
            agrees = f"{calls - expected:g} of them between factors"
        packed = ""
        if compression and "all-gather" in layers:
            packed = f" in {compression}"
        return [
            f"sync     {layers}{packed} per {unit}, {agrees}; {sent} bytes per token and rank",
            f"vocab    {ends} per {unit}; {sent_at_ends} bytes per token and rank",
        ]


def _per_pass(figures: Sequence[Figures], counts: Callable[[Phase], Counts]) -> tuple[str, float, int]:
    """Collectives of a forward pass, in words and their number, and bytes of a token, on the rank that has most.

    Of decoding passes, if there were any: a pass with prompts takes no logits of most of its tokens.
    """
    phases = [each.decode if each.decode.passes else each.prefill for each in figures]
    most = max(phases, key=lambda phase: (_calls(counts(phase)), counts(phase).bytes))
    own = counts(most)
    kinds = {"all-reduce": own.all_reduces, "all-gather": own.all_gathers}
    calls = {kind: count / most.passes for kind, count in kinds.items() if count}
    words = [f"{each:g} {kind}{'' if each == 1 else 's'}" for kind, each in calls.items()]
    return " and ".join(words) or "0 all-reduces", _calls(own) / most.passes, own.bytes // most.tokens


def _calls(counts: Counts) -> int:
    return counts.all_reduces + counts.all_gathers
