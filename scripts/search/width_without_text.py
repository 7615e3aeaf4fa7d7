"""What says which neurons and KV groups matter where there is no text: criteria of the weights alone, chance, own text.

    python scripts/search/width_without_text.py demo --data demo:train --eval-data demo

A row is a share of every layer's neurons, or KV groups, that is kept; a number the divergence from the unedited model,
nats per token of a text that nothing was chosen on. All of it is plain PyTorch (`ByHand` of width.py). The columns:

    chance      any units, the mean of three draws
    size        the weights' size: Frobenius norms, squared, of all matrices of a unit together
    product     the product of the norms of a unit's matrices
    out         the norm of its part of the matrix that writes to the stream
    expected    of neurons: |out| times the size that silu(g x) u x has of normed inputs x that point anywhere;
                of KV groups: the norm of what o and v do together, that of each query head's o v
    own text    by activations (Minitron) on text that the model itself draws
    a text      by activations on a text

The norm's gain counts as a part of the matrices in `expected` alone.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scripts.search.width import ByHand, Scores

CRITERIA = ("size", "product", "out", "expected")
DRAWS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--eval-data", required=True)
    parser.add_argument("--tokens", type=int, default=4096, help="of the texts that activations are measured on")
    parser.add_argument("--eval-tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.75, 0.5])
    parser.add_argument("--columns", nargs="+", default=["chance", *CRITERIA, "own text", "a text"])
    given = parser.parse_args()
    given.heal = 0
    hand = ByHand.of(given)
    groups = hand.model.config.num_key_value_heads
    print(f"{'kept':>8}{'':>6}" + "".join(f"{name:>10}" for name in given.columns))
    scores = {name: scores_by(name, hand, given) for name in given.columns}
    for of in ("neurons", "heads"):
        for share in given.shares:
            heads, neurons = (share, 1.0) if of == "heads" else (1.0, share)
            if of == "heads" and round(share * groups) == groups:
                continue  # all of them
            row = [
                sum(hand.divergence(hand.narrowed(each, heads, neurons)) for each in scores[name]) / len(scores[name])
                for name in given.columns
            ]
            print(f"{of:>8}{share:>6g}" + "".join(f"{value:>10.4f}" for value in row), flush=True)


def scores_by(name: str, hand: ByHand, given: argparse.Namespace) -> list[Scores]:
    """Of a column; several where it is a mean."""
    if name == "chance":
        return [drawn(hand, seed) for seed in range(DRAWS)]
    if name == "own text":
        written = own_text(hand.model, given.tokens // given.window, given.window)
        return [ByHand(hand.model, written, written, hand.unseen).by_activations()]
    if name == "a text":
        return [hand.by_activations()]
    layers = hand.model.model.layers
    return [[(of_groups(layer, name, hand.model.config), of_neurons(layer, name)) for layer in layers]]


def drawn(hand: ByHand, seed: int) -> Scores:
    """Of any units."""
    config, generator = hand.model.config, torch.Generator().manual_seed(seed)
    sizes = config.num_key_value_heads, config.intermediate_size
    draws = [[torch.rand(size, generator=generator) for size in sizes] for _ in hand.model.model.layers]
    return [(groups, neurons) for groups, neurons in draws]


@torch.no_grad()
def own_text(model: Any, texts: int, window: int) -> Tensor:
    """Tokens that the model draws behind one that is drawn from the vocabulary, (texts, window)."""
    torch.manual_seed(0)
    first = torch.randint(model.config.vocab_size, (texts, 1))
    found: Tensor = model.generate(
        first, max_new_tokens=window - 1, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0
    )
    return found


@torch.no_grad()
def of_neurons(layer: Any, name: str) -> Tensor:
    """The criterion of each neuron of a layer, (neurons,)."""
    mlp, gain = layer.mlp, layer.post_attention_layernorm.weight.double()
    gate, up, down = mlp.gate_proj.weight.double(), mlp.up_proj.weight.double(), mlp.down_proj.weight.double()
    reading, out = [gate.norm(dim=1), up.norm(dim=1)], down.norm(dim=0)
    if name == "size":
        return out.square() + sum(one.square() for one in reading)
    if name == "product":
        return out * reading[0] * reading[1]
    if name == "out":
        return out
    # What two rows give of an input that points anywhere are two normal numbers, as alike as the rows are.
    gate, up = gate * gain, up * gain
    alike = functional.cosine_similarity(gate, up)
    draws = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = draws[:, :1]
    second = alike * first + (1 - alike.square()).clamp(min=0).sqrt() * draws[:, 1:]
    size = (functional.silu(gate.norm(dim=1) * first) * up.norm(dim=1) * second).square().mean(0).sqrt()
    return size * out


@torch.no_grad()
def of_groups(layer: Any, name: str, config: Any) -> Tensor:
    """The criterion of each KV group of a layer, (groups,)."""
    attention, gain, groups = layer.self_attn, layer.input_layernorm.weight.double(), config.num_key_value_heads
    q, k, v = (
        one.weight.double().unflatten(0, (groups, -1)) for one in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    o = attention.o_proj.weight.double().T.unflatten(0, (groups, -1))  # (groups, features, out)
    norms = [one.flatten(1).norm(dim=1) for one in (q, k, v, o)]
    if name == "size":
        return sum((one.square() for one in norms), torch.zeros(()))
    if name == "product":
        return norms[0] * norms[1] * norms[2] * norms[3]
    if name == "out":
        return norms[3]
    by_head = o.unflatten(1, (-1, config.head_dim))  # (groups, heads, features, out)
    return torch.einsum("ghfo,gfi->ghoi", by_head, v * gain).flatten(1).norm(dim=1)


if __name__ == "__main__":
    main()
