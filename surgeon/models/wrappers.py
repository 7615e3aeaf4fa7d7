"""Wrappers: models around a text decoder, as data.

The text decoder is a causal language model of its own family. Vision towers, projectors and whatever else is around it
are written again as they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from surgeon.errors import shown
from surgeon.models.edit import PROGRAM_KEY, PROGRAM_PREFIX

Entries = dict[str, Any]  # of a config.json
# What names of tensors begin with, in files and in the text model alone; the first pair that fits counts.
Prefixes = tuple[tuple[str, str], ...]

# Most checkpoints on the hub have this prefix, and transformers writes it.
_BEFORE_ALL = (("language_model.", ""),)
_INSIDE = (("model.language_model.", "model."), ("lm_head.", "lm_head."))
# Of the whole model, where config.json says it of the text decoder, too.
_SHARED = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Wrapper:
    """One architecture around a text decoder.

    Attributes:
        name: as users know it.
        model_type: as `config.json` has it.
        decoder_type: the `model_type` of the text decoder, where its configuration does not say it.
        text: the entry of `config.json` that is the text decoder's configuration.
        decoder: path of the text decoder, where a causal language model has "model".
        head: path of what a causal language model has as "lm_head".
        names: ways in which checkpoints name tensors.
        tied: whether embedding and head are one matrix where `config.json` does not say.
        plainly_rotary: the `model_type` of a text decoder whose positions have three parts (time, height, width), all
            the same in a text: without them it is of that family.
        fed: the entry of the vision tower's configuration that has an item for each of the first layers with features
            of images added behind them.
    """

    name: str
    model_type: str
    decoder_type: str
    text: str = "text_config"
    decoder: str = "model.language_model"
    head: str = "lm_head"
    names: tuple[Prefixes, ...] = (_BEFORE_ALL, _INSIDE)
    tied: bool = True
    plainly_rotary: str | None = None
    fed: str | None = None

    def text_entries(self, entries: Entries) -> Entries:
        """Return the text decoder's `config.json` as a causal language model, or raise ValueError without one."""
        own = entries.get(self.text)
        if not isinstance(own, dict):
            raise ValueError(
                f"the config.json of a {self.name} has its text decoder's configuration as {self.text}, "
                f"not {shown(own)}; is it damaged?"
            )
        given = {"model_type": self.decoder_type} | own
        given |= {key: entries[key] for key in _SHARED if key in entries and own.get(key) is None}
        given |= {key: value for key, value in entries.items() if key.startswith(PROGRAM_PREFIX)}
        given["tie_word_embeddings"] = entries.get("tie_word_embeddings", self.tied)
        if self.plainly_rotary is None:
            return given
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := given.get(key), dict):
                kept = {name: value for name, value in rope.items() if not name.startswith("mrope")}
                if "mrope" in (kept.get("type"), kept.get("rope_type")):
                    kept |= {"type": "default", "rope_type": "default"}
                given[key] = kept
        return given | {"model_type": self.plainly_rotary}

    @property
    def places(self) -> Prefixes:
        """How paths begin in the wrapper, and in a causal language model."""
        return (f"{self.decoder}.", "model."), (f"{self.head}.", "lm_head.")

    def path_inside(self, path: str) -> str:
        """Return the path in the wrapper of what lies here in a causal language model."""
        return renamed(path, [(own, place) for place, own in self.places]) or path

    def path_around(self, name: str) -> str:
        """Return the path in the wrapper of what is not of the text decoder, by its stored name."""
        inside = self.decoder.startswith("model.") and not name.startswith("model.")
        if inside:
            return f"model.{name}"
        return name


def renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str | None:
    """Give a name another beginning; None if none of the prefixes is its own."""
    return next((new + name.removeprefix(old) for old, new in prefixes if name.startswith(old)), None)


def wrapper_of(entries: Entries) -> Wrapper | None:
    """Return the wrapper that a config.json describes; None if it is of a causal language model."""
    model_type = str(entries.get("model_type"))
    return WRAPPERS.get(
        model_type.removeprefix(PROGRAM_PREFIX) if PROGRAM_KEY in entries else model_type
    )


def text_entries(entries: Entries) -> Entries:
    """Return the entries of a config.json, or as `Wrapper.text_entries` those of the text decoder inside."""
    wrapper = wrapper_of(entries)
    if wrapper is None:
        return entries
    return wrapper.text_entries(entries)


WRAPPERS = {
    wrapper.model_type: wrapper
    for wrapper in (
        Wrapper("Mistral 3", "mistral3", "mistral"),
        Wrapper("Gemma 3", "gemma3", "gemma3_text"),
        Wrapper(
            "Qwen3-VL",
            "qwen3_vl",
            "qwen3_vl_text",
            tied=False,
            plainly_rotary="qwen3",
            fed="deepstack_visual_indexes",
        ),
        Wrapper("Qwen3.5", "qwen3_5", "qwen3_5_text", tied=False),
        Wrapper("Qwen3.5-MoE", "qwen3_5_moe", "qwen3_5_moe_text", tied=False),
        Wrapper(
            "Llama 4",
            "llama4",
            "llama4_text",
            decoder="language_model.model",
            head="language_model.lm_head",
            names=(_BEFORE_ALL,),
            tied=False,
        ),
    )
}
