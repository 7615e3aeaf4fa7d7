"""`surgeon generate`: text from a checkpoint, on one rank or several."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from surgeon.cli.options import (
    CheckpointArgument,
    CollectivesOption,
    ProgramOption,
    RanksDeviceOption,
    RanksOption,
)

if TYPE_CHECKING:
    from surgeon.runtime.collectives import Counts
    from surgeon.runtime.generate import Generation
    from surgeon.runtime.plan import Plan


def generate(
    model: CheckpointArgument,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add at most.")] = 64,
    tp: RanksOption = 1,
    program: ProgramOption = None,
    device: RanksDeviceOption = "auto",
    collectives: CollectivesOption = "auto",
) -> None:
    """Continue a text greedily on one or more ranks; the text goes to stdout, figures to stderr.

    The ranks are started here, on this machine. Every rank loads its own slices of the weights only. The tokens are
    the same for any number of ranks.
    """
    from surgeon.runtime.generate import generate as generate_tokens
    from surgeon.runtime.generate import load
    from surgeon.runtime.launch import Ranks, choose_collectives, choose_device
    from surgeon.runtime.prepare import make_plan
    from surgeon.runtime.text import Continuation, encode, open_tokenizer

    chosen = choose_device(device, tp)
    way = choose_collectives(collectives, chosen)
    tokenizer = open_tokenizer(model)
    tokens = encode(tokenizer, prompt)
    plan = make_plan(model, tp, len(tokens) + max_new_tokens, program, chosen)
    text = Continuation(tokenizer, tokens)
    with Ranks(tp, chosen, way) as ranks:
        ranks.call(load, plan)
        result = generate_tokens(
            ranks,
            plan,
            [tokens],
            max_new_tokens,
            notify=lambda newest: _write(
                "".join(text.add(output.token) for output in newest.outputs if output.token is not None)
            ),
        )
    _write(text.rest() + "\n")
    print(describe(result, plan, f"{chosen}, {way}"), file=sys.stderr)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def describe(result: Generation, plan: Plan, place: str) -> str:
    """The figures of a generation, a few lines of text."""
    first = result.figures[0]
    layers, vocabulary = result.layers_per_pass(), result.vocabulary_per_pass()
    expected = result.program.sync_points(result.ranks)
    agrees = "as the program has" if layers.all_reduces == expected else f"but the program has {expected}!"
    depth = result.program.effective_depth(plan.family.steps_per_layer)
    rate = f"{result.decode_rate:.1f} tokens/s" if result.decode_rate else "nothing after the first token"
    lines = [
        f"ranks    {result.ranks} ({place}, {str(plan.dtype).removeprefix('torch.')})",
        f"program  effective depth {depth:g} of {plan.layers} layers",
        f"prefill  {first.prefill.tokens} tokens at {result.prefill_rate:.1f} tokens/s",
        f"decode   {sum(map(len, result.tokens))} tokens at {rate}",
        f"sync     {_calls(layers)} per token, {agrees}; {layers.bytes} bytes per token and rank",
        f"vocab    {_calls(vocabulary)} per token; {vocabulary.bytes} bytes per token and rank",
    ]
    return "\n".join(lines)


def _calls(counts: Counts) -> str:
    kinds = {"all-reduce": counts.all_reduces, "all-gather": counts.all_gathers}
    words = [f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in kinds.items() if count]
    return " and ".join(words) or "0 all-reduces"
