"""Keys and values of an original that an edited model reads where it drafts for it.

A draft's attention has no keys of its own but of the tokens in flight (runtime/plan/drafts.py): the model that verifies
has written those before. So a draft is trained and judged on text in rounds: each token sees the original's keys and
values of all rounds before its own, and the edited model's of its own round. Attentions that the original does not have
see the edited model's of all tokens.

Shapes: B windows of T tokens, K KV heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, Sublayer
from surgeon.models.edit import EditedLayers, edit, input_device, restore
from surgeon.models.families import family_of
from surgeon.models.families.base import attention_windows
from surgeon.models.families.specs import unit_bounds
from surgeon.models.replacements import CACHES
from surgeon.models.weights import FactorSource

ROUND = 4  # tokens
# Token ids to an original's logits, and its draft's.
DraftOnText = Callable[[Tensor], tuple[Tensor, Tensor]]


class NoVerifiedKeys(ValueError):
    """Attentions cannot read keys and values that a model has written."""


class VerifiedKeys:
    """An original's keys and values of some windows of text, as `EditedLayers.verified` takes them.

    Attributes:
        own: attentions of the edited model that keep their own of all tokens.
    """

    def __init__(self, original: PreTrainedModel, cache: DynamicCache) -> None:
        self.own = frozenset[Sublayer]()
        layers: list[Any] = cache.layers
        self._layers: list[tuple[Tensor, Tensor]] = [(layer.keys, layer.values) for layer in layers]
        self._family = family_of(original.config)
        self._windows = attention_windows(self._family, original.config, len(self._layers))
        self._as_bools = original.config._attn_implementation == "sdpa"

    @classmethod
    def of(cls, original: PreTrainedModel, ids: Tensor) -> tuple[Tensor, VerifiedKeys]:
        """Run the original on token ids, (B, T).

        Args:
            original: whole, or without its head.

        Returns:
            Its logits, (B, T, vocabulary), or without a head the stream, (B, T, hidden); and its keys and values.

        Raises:
            NoVerifiedKeys: if its attentions keep something else, or see to it themselves which tokens they read.
        """
        if not original._supports_attention_backend:
            name = family_of(original.config).name
            raise NoVerifiedKeys(
                f"attentions of {name} cannot be given keys and values from elsewhere, as those of a draft are; take "
                "it as a model of its own"
            )
        # Without a configuration the cache keeps all tokens of attentions with a window.
        cache = DynamicCache()
        with torch.no_grad():
            found: Tensor = original(input_ids=ids, use_cache=True, past_key_values=cache)[0]
        return found, cls(original, cache)

    def replace_arguments(self, attention: Sublayer, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of an attention, in place of what the decoder has for it.

        Raises:
            NoVerifiedKeys: if it takes no cache.
        """
        name = next((name for name in CACHES if name in arguments), None)
        if name is None:
            raise NoVerifiedKeys(
                f"{self._family.name} has attentions without a cache, which drafts share"
            )
        if attention in self.own:
            return arguments
        (layer,) = attention.layers
        keys, values = self._layers[layer]
        first, end = unit_bounds({"kv_heads": keys.shape[1]}, "kv_heads", attention.piece)
        joined = _Joined(keys[:, first:end], values[:, first:end])
        # Both kinds of keys for each token, (1, 1, T, 2 T).
        tokens = torch.arange(keys.shape[2], device=keys.device)
        own = tokens[:, None]
        other = tokens[None]
        sees = other <= own
        if self._windows:
            window = self._windows[layer]
        else:
            window = None
        if window is not None:
            sees &= other >= (
                own // window * window if self._family.window.chunked else own - window + 1
            )
        in_flight = own // ROUND == other // ROUND
        mask = torch.cat([sees & ~in_flight, sees & in_flight], -1)[None, None]
        if not self._as_bools:
            mask = torch.zeros_like(mask, dtype=keys.dtype).masked_fill(~mask, -torch.inf)
        return arguments | {name: joined, "attention_mask": mask}


@dataclass(frozen=True, eq=False)
class _Joined:
    """Stands for a cache in one call of an attention, whose keys and values come behind the original's."""

    keys: Tensor
    values: Tensor

    def get_seq_length(self, *_: Any) -> int:
        """Count the tokens before those that are computed."""
        return 0

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Both kinds, (B, K, 2 T, width)."""
        before = (one.to(keys.device, keys.dtype) for one in (self.keys, self.values))
        joined_keys, joined_values = (
            torch.cat(both, 2) for both in zip(before, (keys, values), strict=True)
        )
        return joined_keys, joined_values


@contextmanager
def draft_with(model: nn.Module, keys: VerifiedKeys | None) -> Iterator[None]:
    """Have an edited model, or one that wraps it, read these keys and values inside; None for its own."""
    layers = next((module for module in model.modules() if isinstance(module, EditedLayers)), None)
    if layers is None:
        raise ValueError("the model runs no program, so that it is no draft; edit it")
    layers.verified = keys
    try:
        yield
    finally:
        layers.verified = None


def draft_on_text(
    model: PreTrainedModel, program: Program, factors: FactorSource | None = None
) -> DraftOnText:
    """Make a function from text to the logits of a model, and of a program over its weights as its draft.

    Args:
        model: edited back and forth; the program is left in it.
        factors: as `edit` takes them.

    Raises:
        NoVerifiedKeys: if attentions of the model or the program cannot be a draft's.
    """
    attentions = Counter(one for one in program.sublayers() if one.kind == ATTENTION)
    for one, times in attentions.items():
        if times > 1:
            raise NoVerifiedKeys(f"the model has no keys and values of its own for each {one}")
    own = frozenset(one for one in attentions if len(one.layers) > 1 or one.width is not None)

    def both(ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = ids.to(input_device(model))
        logits, keys = VerifiedKeys.of(restore(model), ids)
        keys.own = own
        with draft_with(edit(model, program, factors=factors), keys):
            return logits, model(input_ids=ids, use_cache=False).logits

    with torch.inference_mode():
        both(torch.zeros(1, 2, dtype=torch.long))  # what attentions refuse, they refuse of any text
    return both
