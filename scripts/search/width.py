"""What narrowing a model costs by each order of its units, beside the same by hand; and what healing brings back.

    python scripts/search/width.py demo -o runs/width
    python scripts/search/width.py demo -o runs/width --heal 200 --trials 0

A row is a share of every layer's KV groups and neurons. Its columns are the divergence from the unedited model, nats
per token of a text that nothing was chosen on: of the model that surgeon narrows by each of its orders; then that of
one narrowed in plain PyTorch, with transformers and nothing of surgeon's, by LLM-Pruner's criterion (first order
Taylor, summed over the weights of a unit) and by Minitron's (mean activations), whose choices should be those of
`taylor` and `activation`; and that of what a search of the space `width` chooses with as many parameters. With --heal
each row, narrowed by activations, is trained back on as many tokens: by surgeon, and by a loop of a page that does as
Minitron; and so is what the search chose, by surgeon.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor, nn
from torch.nn import functional

import surgeon
from surgeon.opened import EditedModel, open_model
from surgeon.quality.data import load_windows
from surgeon.training.distill.distiller import Distillation
from surgeon.training.settings import TrainSettings

ORDERS = ("magnitude", "random", "activation", "wanda", "taylor")
BATCH = 8  # windows of a training step
RATE = 1e-4
Scores = list[tuple[Tensor, Tensor]]  # of each layer's KV groups, and of its neurons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", default="demo:train", help="to measure importance, to search and to train on")
    parser.add_argument("--eval-data", default="demo")
    parser.add_argument("--tokens", type=int, default=16384, help="that importance is measured on")
    parser.add_argument("--search-tokens", type=int, default=4096)
    parser.add_argument("--eval-tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--shares", nargs="+", default=["1/0.75", "1/0.5", "0.5/1", "0.5/0.5"], metavar="HEADS/NEURONS")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS, help="`by` of the operation width")
    parser.add_argument("--trials", type=int, default=40, help="of each search; 0: no search")
    parser.add_argument("--heal", type=int, default=0, metavar="STEPS")
    parser.add_argument("--seeds", type=int, default=1, help="of the order of the text that is trained on")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    hand = ByHand.of(given)
    by_method = {"Minitron": hand.by_activations()}
    if "taylor" in given.orders:
        by_method["LLM-Pruner"] = hand.by_gradients()
    columns = [*given.orders, *by_method, *(["search"] if given.trials else [])]
    print(f"{'heads':>6}{'neurons':>8}{'params':>7}" + "".join(f"{name:>11}" for name in columns))
    shares = [tuple(map(float, text.split("/"))) for text in given.shares]
    for heads, neurons in shares:
        edits = {by: narrowed(given, heads, neurons, by) for by in given.orders}
        found = {by: divergence(given, edited) for by, edited in edits.items()}
        for name, scores in by_method.items():
            found[name] = hand.divergence(hand.narrowed(scores, heads, neurons))
        left = share_left(next(iter(edits.values())))
        if given.trials:
            found["search"] = divergence(given, searched(given, left), "searched")
        numbers = "".join(f"{found[name]:>11.4f}" for name in columns)
        print(f"{heads:>6g}{neurons:>8g}{left:>7.3f}{numbers}", flush=True)
    if given.heal:
        columns = ["before", "surgeon", "by hand", *(["searched", "search's"] if given.trials else [])]
        print(f"\n{given.heal} steps of {BATCH} windows of {given.window}, towards the original's logits")
        print(f"{'heads':>6}{'neurons':>8}{'seed':>6}" + "".join(f"{name:>10}" for name in columns))
        for heads, neurons in shares:
            edited, name = narrowed(given, heads, neurons, "activation"), f"{heads:g}-{neurons:g}"
            chosen = searched(given, share_left(edited)) if given.trials else None
            found = pandas.DataFrame(columns=columns, dtype=float)
            for seed in range(given.seeds):
                by_hand = hand.healed(hand.narrowed(by_method["Minitron"], heads, neurons), given, seed)
                row = [divergence(given, edited), healed(given, edited, f"healed-{name}", seed)]
                row.append(hand.divergence(by_hand))
                if chosen is not None:
                    row.append(divergence(given, chosen, "searched"))
                    row.append(healed(given, chosen, f"healed-search-{name}", seed))
                found.loc[seed] = row
            for seed, values in [*found.iterrows(), ("mean", found.mean())]:
                cells = "".join(f"{value:>10.4f}" for value in values)
                print(f"{heads:>6g}{neurons:>8g}{seed:>6}{cells}", flush=True)


def narrowed(given: argparse.Namespace, heads: float, neurons: float, by: str) -> EditedModel:
    """What surgeon makes of the model, all layers of it."""
    model = open_model(given.model)
    asked: dict[str, Any] = {"layers": f"0:{model.num_layers}", "heads": heads, "neurons": neurons, "by": by}
    if by not in ("magnitude", "random"):
        asked["calibration"] = {"data": given.data, "tokens": given.tokens, "window": given.window}
    return surgeon.edit(model, width={key: value for key, value in asked.items() if value != 1})


def share_left(edited: EditedModel) -> float:
    """Of the parameters of all layers."""
    shapes = edited.model.shapes.layer_shapes
    return edited.program.parameters(shapes) / edited.model.program.parameters(shapes)


def divergence(given: argparse.Namespace, model: EditedModel | Path, kept: str = "evaluated", **more: Any) -> float:
    """From the unedited model, as `surgeon eval` has it.

    Args:
        kept: a folder, where what programs go by is kept that go by the same text.
    """
    sizes: dict[str, Any] = {"tokens": given.eval_tokens, "window": given.window}
    found = surgeon.evaluate(model, given.eval_data, output=given.output / kept, **sizes, **more).text
    assert found is not None
    assert found.divergence is not None
    return found.divergence


def searched(given: argparse.Namespace, left: float) -> EditedModel:
    """What a search finds with as many parameters."""
    folder = given.output / f"search-{left:.3f}"
    sizes = {"tokens": given.search_tokens, "window": given.window, "holdout": 0}
    budget = f"params={left:.4f}x"
    found = surgeon.search(given.model, given.data, folder, given.trials, space="width", budget=budget, **sizes)
    return surgeon.edit(open_model(given.model), found.recipe)


def healed(given: argparse.Namespace, edited: EditedModel, name: str, seed: int) -> float:
    """The divergence once surgeon has trained all weights towards the original's logits."""
    target = given.output / f"{name}-{seed}"
    settings = TrainSettings(
        scope="all", distillation=Distillation(), steps=given.heal, batch=BATCH, learning_rate=RATE, seed=seed
    )
    if not target.exists():
        surgeon.heal(edited, given.data, target, settings=settings, window=given.window, eval_data=given.eval_data)
    return divergence(given, target, against=given.model)


@dataclass(frozen=True)
class ByHand:
    """The criteria, and narrowing and training by them, on transformers' Llama, with nothing of surgeon's.

    Attributes:
        text: that importance is measured on, (windows, tokens).
        longer: that is trained on, likewise.
        unseen: that is evaluated on, likewise.
    """

    model: Any
    text: Tensor
    longer: Tensor
    unseen: Tensor

    @classmethod
    def of(cls, given: argparse.Namespace) -> ByHand:
        from transformers import AutoModelForCausalLM

        opened = open_model(given.model)
        model = AutoModelForCausalLM.from_pretrained(opened.folder, dtype=torch.float32).eval()
        if model.config.model_type != "llama":
            raise SystemExit(f"by hand only Llamas are narrowed here, and {given.model} is none")
        trained_on = max(given.tokens, given.heal * BATCH * given.window)
        longer, unseen = (
            load_windows(opened.tokenizer, data, given.window, tokens).ids
            for data, tokens in ((given.data, trained_on), (given.eval_data, given.eval_tokens))
        )
        return cls(model, longer[: given.tokens // given.window], longer, unseen)

    def by_activations(self) -> Scores:
        """The mean norm of what heads give, summed over a KV head's; the mean |activation| of neurons."""
        seen: dict[nn.Module, Any] = {}

        def heads(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            each = inputs[0].unflatten(-1, (self.model.config.num_attention_heads, -1)).norm(dim=-1)
            seen[module] = seen.get(module, 0) + each.sum((0, 1))

        def neurons(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[module] = seen.get(module, 0) + inputs[0].abs().sum((0, 1))

        layers, groups = self.model.model.layers, self.model.config.num_key_value_heads
        hooks = [layer.self_attn.o_proj.register_forward_pre_hook(heads) for layer in layers]
        hooks += [layer.mlp.down_proj.register_forward_pre_hook(neurons) for layer in layers]
        with torch.no_grad():
            for window in self.text:
                self.model(window[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        return [(seen[layer.self_attn.o_proj].view(groups, -1).sum(1), seen[layer.mlp.down_proj]) for layer in layers]

    def by_gradients(self) -> Scores:
        """The sum of |w dL/dw| over all weights of a unit, L the loss of all windows."""
        model, groups = copy.deepcopy(self.model), self.model.config.num_key_value_heads
        for window in self.text:
            model(window[None], labels=window[None], use_cache=False).loss.backward()

        def of(linear: Any, dim: int) -> Tensor:
            salience: Tensor = (linear.weight * linear.weight.grad).detach().abs().sum(dim)
            return salience

        scores = []
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            reading = (of(one, 1) for one in (attention.q_proj, attention.k_proj, attention.v_proj))
            heads = [one.view(groups, -1).sum(1) for one in (*reading, of(attention.o_proj, 0))]
            neurons = of(mlp.gate_proj, 1) + of(mlp.up_proj, 1) + of(mlp.down_proj, 0)
            scores.append((torch.stack(heads).sum(0), neurons))
        return scores

    def narrowed(self, scores: Scores, heads: float, neurons: float) -> Any:
        """A copy with these shares of every layer's KV groups and neurons, those of the highest scores."""
        model = copy.deepcopy(self.model)
        width, shared = model.config.head_dim, model.config.num_attention_heads // model.config.num_key_value_heads
        for layer, (of_groups, of_neurons) in zip(model.model.layers, scores, strict=True):
            groups, units, attention = best(of_groups, heads), best(of_neurons, neurons), layer.self_attn
            keys, queries = (
                (groups[:, None] * size + torch.arange(size)).flatten() for size in (width, width * shared)
            )
            cut(attention.q_proj, queries, 0)
            cut(attention.k_proj, keys, 0)
            cut(attention.v_proj, keys, 0)
            cut(attention.o_proj, queries, 1)
            cut(layer.mlp.gate_proj, units, 0)
            cut(layer.mlp.up_proj, units, 0)
            cut(layer.mlp.down_proj, units, 1)
        return model

    @torch.no_grad()
    def divergence(self, model: Any) -> float:
        """KL(original || model) on the unseen text, the mean over predicted tokens, nats."""
        total = 0.0
        for window in self.unseen:
            wanted, found = (log_probabilities(one, window[None]) for one in (self.model, model))
            total += float(functional.kl_div(found, wanted, log_target=True, reduction="sum"))
        return total / (self.unseen.numel() - len(self.unseen))

    def healed(self, model: Any, given: argparse.Namespace, seed: int) -> Any:
        """Trained towards the original's logits (forward KL, as Minitron), all weights, by AdamW, to the rate 0."""
        optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
        order = torch.randperm(given.heal * BATCH, generator=torch.Generator().manual_seed(seed))
        for step in range(given.heal):
            batch = self.longer[order[BATCH * step : BATCH * (step + 1)]]
            with torch.no_grad():
                wanted = log_probabilities(self.model, batch)
            loss = functional.kl_div(log_probabilities(model, batch), wanted, log_target=True, reduction="batchmean")
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimiser.param_groups:
                group["lr"] = RATE * (1 - step / given.heal)
            optimiser.step()
            optimiser.zero_grad()
        return model


def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """Of every next token, (predicted tokens, vocabulary)."""
    found: Tensor = model(ids, use_cache=False).logits[:, :-1].flatten(0, 1).log_softmax(-1)
    return found


def best(scores: Tensor, share: float) -> Tensor:
    """The places of this share of the highest scores, at least one, ascending."""
    return scores.topk(max(1, round(share * len(scores)))).indices.sort().values


def cut(linear: Any, places: Tensor, dim: int) -> None:
    """Leave these outputs (0) or inputs (1) of a linear map."""
    linear.weight = nn.Parameter(linear.weight.detach().index_select(dim, places).clone())


if __name__ == "__main__":
    main()
