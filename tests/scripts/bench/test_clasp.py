"""scripts/bench/clasp.py: which layers are left out, against all choices tried."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.bench.clasp import Context, accepted, choose, chosen_by, similarity, written
from tests.tiny_models import tiny_model

LAYERS, PROMPT = 5, [5, 9, 3, 17, 8, 4, 11]


def test_the_smallest_are_left_out_of_layers_that_go_their_own_ways() -> None:
    """Where no layer looks at what others have added the choice is the best of all, whatever the order."""
    sizes = torch.tensor([3.0, 1.0, 5.0, 2.0, 4.0])
    added = torch.diag(sizes)
    layers: Any = [lambda stream, own=own: stream + own for own in added]
    streams = [torch.ones(1, 5) + added[:number].sum(0) for number in range(6)]
    for number, found in enumerate(choose(layers, streams, 4)):
        every = list(combinations(range(5), number))
        without = [streams[-1] - added[list(each)].sum(0) for each in every]
        assert found == every[max(range(len(every)), key=lambda at: similarity(without[at], streams[-1]))]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", LAYERS)


@torch.inference_mode()
def behind(model: Any, left_out: tuple[int, ...]) -> Tensor:
    """The last token's stream behind all other layers, by the model's own attention over the whole model's cache."""
    cache = model(input_ids=torch.tensor([PROMPT[:-1]]), use_cache=True).past_key_values
    hooks = [model.model.layers[number].register_forward_hook(lambda _, inputs, __: inputs[0]) for number in left_out]
    found: list[Tensor] = []
    hooks.append(model.model.norm.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0])))
    model(input_ids=torch.tensor([PROMPT[-1:]]), past_key_values=cache)
    for hook in hooks:
        hook.remove()
    return found[0][0]


def test_a_choice_is_among_the_best_of_all(model: Any) -> None:
    whole = behind(model, ())
    for number, found in enumerate(chosen_by(model, [PROMPT], 2)):
        every = [similarity(behind(model, each), whole) for each in combinations(range(LAYERS), number)]
        own = similarity(behind(model, found), whole)
        assert len(found) == number
        assert sum(each > own + 1e-6 for each in every) <= 0.1 * len(every)


@torch.inference_mode()
def test_what_layers_say_of_candidates_is_what_the_model_says(model: Any) -> None:
    """Several at once, over the keys and values of the tokens before."""
    layers, streams = Context(model, PROMPT).newest(len(PROMPT) - 1)
    candidates = torch.stack((streams[0], 2 * streams[0]))
    for number, layer in enumerate(layers):
        if number != 2:
            candidates = layer(candidates)
    assert torch.allclose(candidates[0], behind(model, (2,)), atol=1e-5)


def test_drafts_without_anything_left_out_are_right(model: Any) -> None:
    context = written(model, PROMPT, 24)
    assert context.drafts(len(PROMPT), context.next[len(PROMPT) - 1], 4, ()) == context.next[len(PROMPT) :][:4]
    right, drafted = accepted(context, len(PROMPT), 3, 0, anew=True)
    assert right == drafted > 12


@pytest.mark.parametrize("anew", [False, True])
def test_drafts_of_fewer_layers_are_right_now_and_then(model: Any, anew: bool) -> None:
    right, drafted = accepted(written(model, PROMPT, 24), len(PROMPT), 3, 2, anew)
    assert 0 < right < drafted
