"""CLaSp: which layers a draft leaves out, chosen from the text's own hidden states.

    python scripts/bench/clasp.py [--model demo] [--left-out 4 6 8] [--prompts 4] [--new 64] [--ahead 4]

Chen et al. 2025, CLaSp: In-Context Layer Skip for Self-Speculative Decoding. A pass of the whole model leaves the
stream of the newest token before and behind each layer. Of the streams behind layer i with j layers left out, D(i, j)
is whichever of

    D(i - 1, j - 1)            layer i left out
    layer_i(D(i - 1, j))       layer i run, over the keys and values that the model has of the tokens before

has the greater cosine similarity with the model's own stream there. What D(L, j) left out is the draft of j layers
fewer. It costs about j passes of one token, which all j share as a batch, and can be chosen anew after each pass that
verifies.

The command prints what share of drafted tokens is right where layers are chosen once, by the prompt, and where they are
chosen anew after each pass; greedy text. Drafts read the model's keys and values of verified tokens, as in
`surgeon generate --draft`. Written in plain PyTorch on modules of transformers: it knows no program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from scripts.bench.decoding import prompts_of
from surgeon.checkpoint.read import locate

Layer = Callable[[Tensor], Tensor]  # streams of the newest tokens, (candidates, texts, hidden), before it and behind


class Context:
    """What the whole model computes of a text.

    Attributes:
        streams: before each layer and behind the last, (tokens, hidden) each.
        next: the likeliest token behind each of the text's.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        self._layers = model.get_decoder().layers
        self._model = model
        self._ways: list[dict[str, Any]] = []
        self.streams: list[Tensor] = []
        hooks = [layer.register_forward_pre_hook(self._note, with_kwargs=True) for layer in self._layers]
        last = self._layers[-1].register_forward_hook(lambda _, __, out: self.streams.append(_stream(out)[0]))
        scores = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        for hook in (*hooks, last):
            hook.remove()
        self.next: list[int] = scores.argmax(-1).tolist()

    def _note(self, _: Any, arguments: tuple[Any, ...], ways: dict[str, Any]) -> None:
        stream = arguments[0] if arguments else ways["hidden_states"]
        self.streams.append(stream[0])
        self._ways.append({name: value for name, value in ways.items() if name != "hidden_states"})

    def behind(self, number: int, own: Tensor, verified: int) -> Tensor:
        """A layer's outputs for tokens whose streams are not the model's, (candidates, tokens, hidden).

        Args:
            own: their streams before it.
            verified: tokens before them, whose keys and values are the model's own.
        """
        before = self.streams[number][:verified].expand(len(own), -1, -1)
        text = torch.cat((before, own), 1)
        ways = {name: _shortened(value, text.shape[1]) for name, value in self._ways[number].items()}
        return _stream(self._layers[number](text, **ways))[:, verified:]

    @torch.inference_mode()
    def drafts(self, verified: int, token: int, ahead: int, left_out: Sequence[int]) -> list[int]:
        """What follows a token behind so many verified ones, drafted without some layers.

        The context is of the text that the model writes, so that all positions are known to it.
        """
        tokens = [token]
        kept = [number for number in range(len(self._layers)) if number not in left_out]
        for _ in range(ahead):
            stream = self._model.get_input_embeddings()(torch.tensor([tokens]))
            for number in kept:
                stream = self.behind(number, stream, verified)
            norm = self._model.get_decoder().norm
            tokens.append(int(self._model.get_output_embeddings()(norm(stream[:, -1])).argmax()))
        return tokens[1:]

    def newest(self, position: int) -> tuple[list[Layer], list[Tensor]]:
        """Layers as functions of one token's stream, and the model's own streams of it, (1, hidden) each."""
        layers = [
            lambda streams, number=number: self.behind(number, streams, position) for number in range(len(self._layers))
        ]
        return layers, [stream[position : position + 1] for stream in self.streams]


def _stream(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _shortened(value: Any, tokens: int) -> Any:
    """What a layer is told of each token, of the first tokens only."""
    if isinstance(value, tuple):
        return tuple(_shortened(each, tokens) for each in value)
    if isinstance(value, Tensor) and value.dim() == 4:  # a mask
        return value[..., :tokens, :tokens]
    if isinstance(value, Tensor) and value.dim() >= 2:  # positions, or the angles that follow from them
        return value[:, :tokens]
    return value[:tokens] if isinstance(value, Tensor) else value


class Candidate(NamedTuple):
    """A stream, and the layers that were left out for it."""

    stream: Tensor
    left_out: tuple[int, ...]


@torch.inference_mode()
def choose(layers: Sequence[Layer], streams: Sequence[Tensor], most: int) -> list[tuple[int, ...]]:
    """The layers to leave out, for each number of them up to `most`.

    Args:
        layers: of the newest token of each text.
        streams: the model's own of these tokens, before each layer and behind the last, (texts, hidden) each.
    """
    best = [Candidate(streams[0], ())]
    for number, (layer, wanted) in enumerate(zip(layers, streams[1:], strict=True)):
        run = layer(torch.stack([each.stream for each in best]))
        ways = [[each._replace(stream=stream)] for each, stream in zip(best, run, strict=True)] + [[]]
        for without, each in zip(ways[1:], best, strict=True):
            without.append(Candidate(each.stream, (*each.left_out, number)))
        best = [max(each, key=lambda one: similarity(one.stream, wanted)) for each in ways[: most + 1] if each]
    return [each.left_out for each in best]


def similarity(streams: Tensor, wanted: Tensor) -> float:
    """Their cosine similarity, the mean over texts."""
    return float(F.cosine_similarity(streams, wanted, dim=-1).mean())


def chosen_by(model: Any, prompts: Sequence[Sequence[int]], most: int) -> list[tuple[int, ...]]:
    """The same for all of some texts together, by the last token of each."""
    found = [Context(model, prompt).newest(len(prompt) - 1) for prompt in prompts]
    layers = [
        lambda streams, own=own: torch.cat([layer(streams[:, at : at + 1]) for at, layer in enumerate(own)], 1)
        for own in zip(*(layers for layers, _ in found), strict=True)
    ]
    return choose(layers, [torch.cat(own) for own in zip(*(streams for _, streams in found), strict=True)], most)


def accepted(context: Context, prompt: int, ahead: int, left_out: int, anew: bool) -> tuple[int, int]:
    """How many tokens are right, and how many are drafted, while a text is written.

    Args:
        context: of the prompt and all that the model writes.
        prompt: its tokens.
        anew: whether layers are chosen after each pass that verifies, and not by the prompt alone.
    """
    right = drafted = 0
    verified = prompt  # tokens whose streams are known
    without = choose(*context.newest(prompt - 1), left_out)[left_out]
    while verified + ahead < len(context.next):
        drafts = context.drafts(verified, context.next[verified - 1], ahead, without)
        same = [one == other for one, other in zip(drafts, context.next[verified:], strict=False)]
        good = next((number for number, each in enumerate(same) if not each), ahead)
        right, drafted, verified = right + good, drafted + min(ahead, good + 1), verified + good + 1
        if anew:
            without = choose(*context.newest(verified - 1), left_out)[left_out]
    return right, drafted


def written(model: Any, prompt: Sequence[int], new: int) -> Context:
    """A prompt and what the model writes behind it, greedily."""
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None)[0]
    return Context(model, ids.tolist())


def whole_model(folder: Path) -> Any:
    """As transformers has it, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--left-out", nargs="+", type=int, default=[4, 6, 8], metavar="N", help="layers")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--ahead", type=int, default=4, help="tokens that are drafted at a time")
    options = parser.parse_args()
    logging.disable_progress_bar()
    folder = locate(options.model)
    model = whole_model(folder)
    prompts = prompts_of(folder, options.prompts, options.prompt)
    contexts = [written(model, prompt, options.new) for prompt in prompts]
    print("| layers left out | right, chosen by the prompt | right, chosen anew after each pass |\n|--:|--:|--:|")
    for number in options.left_out:
        cells = []
        for anew in (False, True):
            counts = [accepted(context, options.prompt, options.ahead, number, anew) for context in contexts]
            right, drafted = map(sum, zip(*counts, strict=True))
            cells.append(f"{right / drafted:.0%} of {drafted}")
        print(f"| {number} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
