"""Forms: how a program is stored as a checkpoint, and how such a checkpoint is known and used."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from surgeon.checkpoint.forms.planning import PlannedTensor, TensorPlanner
from surgeon.checkpoint.forms.stored_layers import (
    Inexpressible,
    StoredLayer,
    per_layer_lists,
    stored_layers,
)
from surgeon.checkpoint.remote_code import FAMILY_KEY, RemoteCode
from surgeon.checkpoint.stored import WEIGHTS_KEY, Checkpoint, StoredModel, Wrapped
from surgeon.language.program import Program
from surgeon.models.edit import PROGRAM_KEY
from surgeon.models.families import Family
from surgeon.models.weights import FactorSource

NOT_ON_VLLM = "vLLM runs no program"
BY_THE_FILE = "Unmodified vLLM, without surgeon, by the modeling file in this folder:"


@dataclass(frozen=True)
class Layout:
    """The layers to be written.

    Attributes:
        reason: why this form, in a sentence for the user.
        layers: the layers of the checkpoint, in order.
        program: the program over those layers, where they do not simply run one after the other.
        wrapped: the wrapper that the layers are to stand in, if they are a text decoder's.
    """

    form: Form
    reason: str
    layers: tuple[StoredLayer, ...]
    program: Program | None = None
    wrapped: Wrapped | None = None


class Form(ABC):
    """One way to store a program; there is one object of each, in `FORMS`.

    Attributes:
        name: as users give it.
        model_types, mark: config.json of its checkpoints has one of these types, or this entry.
        shipped: the modeling file inside its checkpoints, if they need one.
        widths_differ: whether its layers may differ in width.
        stored_once: whether sublayers that run several times are stored once.
        why_code: why it needs the modeling file, for people who have to trust it.
        on_vllm: how vLLM runs it, in a sentence; `serving` says it of one checkpoint.
        planner: plans the tensors of its checkpoints.
    """

    name: str
    model_types: tuple[str, ...] = ()
    mark: str | None = None
    shipped: RemoteCode | None = None
    widths_differ = False
    stored_once = False
    why_code = ""
    on_vllm: str
    planner: type[TensorPlanner] = TensorPlanner

    def __str__(self) -> str:
        return self.name

    # What a program becomes.

    @abstractmethod
    def lay_out(self, program: Program, family: Family, config: Any) -> Layout:
        """Lay out the layers that hold the program exactly.

        Raises:
            Inexpressible: if there are none, saying why.
        """

    def inside(self, wrapped: Wrapped, layout: Layout, family: Family) -> Layout:  # noqa: ARG002
        """Return the same layout inside the wrapper of a text decoder.

        Raises:
            Inexpressible: if it cannot stand there, saying why.
        """
        if self.shipped is not None:
            raise Inexpressible(
                f"its modeling file makes a language model alone, not one inside a {wrapped.wrapper.name}"
            )
        return replace(layout, wrapped=wrapped)

    def names_inside(self, wrapped: Wrapped) -> tuple[Callable[[str], str], Callable[[str], str]]:
        """Return how tensors are named in a wrapper's files: the text decoder's, and those around it."""
        return wrapped.stored_name, str

    def sources(self, program: Program, family: Family, num_layers: int) -> list[tuple[int, ...]]:  # noqa: ARG002
        """For each layer of a checkpoint in this form, return the original's layers that it is made of.

        Args:
            num_layers: of the original.
        """
        return [tuple(layer.sources) for layer in stored_layers(program, family.steps_per_layer)]

    def tensors(
        self,
        original: StoredModel,
        layout: Layout,
        dtype: torch.dtype | None,
        factors: FactorSource | None = None,
    ) -> list[PlannedTensor]:
        """Plan all tensors of the checkpoint, in the order in which a forward pass needs them.

        Args:
            dtype: to store floating-point numbers in; None to keep each tensor's own.
            factors: of matrices that the program has a rank for.
        """
        return self.planner(original, dtype, factors).plan(layout.layers)

    def config(
        self,
        original: StoredModel,
        layout: Layout,
        tensors: list[PlannedTensor],  # noqa: ARG002
    ) -> dict[str, Any]:
        """Return config.json without class names: the original's, every per-layer entry following the layers."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config = copy.deepcopy(original.checkpoint.config)
        # Files of the original's, and its own program.
        for key in ("auto_map", WEIGHTS_KEY, PROGRAM_KEY, FAMILY_KEY):
            config.pop(key, None)
        if original.checkpoint.imported:  # whose class was another one
            config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[original.family.model_type]]
        if (
            type(original.config).from_dict(config).tie_word_embeddings
            != original.config.tie_word_embeddings
        ):
            # Most software takes it at its word.
            config["tie_word_embeddings"] = original.config.tie_word_embeddings
        aliases = original.config.attribute_map
        config[aliases.get("num_hidden_layers", "num_hidden_layers")] = len(layout.layers)
        sources = [layer.sources[0] for layer in layout.layers]
        for key, values in per_layer_lists(
            original.family, original.config, original.checkpoint.config
        ).items():
            config[key] = [values[source] for source in sources]
        feed_forwards = [(layer.feed_forward or layer.attention)[0].layers[0] for layer in layout.layers]
        return config | original.family.per_layer_entries(original.config, sources, feed_forwards)

    def class_entries(self, original: StoredModel, layout: Layout) -> dict[str, Any]:  # noqa: ARG002
        """Return config.json's entries for the classes that build the model, and its program."""
        return {}

    # What is in a folder.

    def is_marked(self, config: dict[str, Any]) -> bool:
        """Tell whether a config.json has this form's mark."""
        return config.get("model_type") in self.model_types or self.mark in config

    def stock_config(self, checkpoint: Checkpoint, family: Family) -> Any:
        """Return a checkpoint's `transformers` configuration, without program and remote classes."""
        return config_beside(checkpoint.config, CONFIG_MAPPING[family.model_type])

    def own_program(self, config: Any) -> Program | None:  # noqa: ARG002
        """Return the program of a checkpoint, where it is not its layers one after the other."""
        return None

    def model_class(self, stored: StoredModel) -> Any:  # noqa: ARG002
        """Return the class that `surgeon.load` builds, whose code is never the folder's own."""
        # This import takes seconds, and reading a configuration needs none of it.
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def written_class(self, stored: StoredModel) -> tuple[Any, Any]:
        """Return the class that others build, from the checkpoint's modeling file if any; its configuration."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        wrapped = stored.wrapped
        model_type = stored.config.model_type
        if self.shipped is None and wrapped is not None:
            config = CONFIG_MAPPING[wrapped.wrapper.model_type].from_dict(wrapped.entries)
            return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)], config
        if self.shipped is None:
            return MODEL_FOR_CAUSAL_LM_MAPPING[type(stored.config)], stored.config
        if wrapped is not None:
            model_type = wrapped.wrapper.model_type
        model_class: Any = self.shipped.model_class(
            model_type, stored.folder, around=wrapped is not None
        )
        return model_class, model_class.config_class.from_pretrained(stored.folder)

    # How it is used.

    def serving(self, stored: StoredModel, serve: str) -> tuple[str, str]:  # noqa: ARG002
        """Say how vLLM runs a checkpoint, and what to type, from `vllm serve` with the model's name."""
        return self.on_vllm, serve if self.shipped is None else f"{serve} --trust-remote-code"


def by_transformers(what: str, serve: str) -> tuple[str, str]:
    """Say how a checkpoint is served without vLLM; `serve` as of `Form.serving`."""
    name = serve.partition(" --")[0].removeprefix("vllm serve ")
    return f"{NOT_ON_VLLM} {what}. transformers does:", f"transformers serve {name} --trust-remote-code"


def config_beside(entries: dict[str, Any], config_class: Any) -> Any:
    """Read the entries of a config.json but for those that name a program, or classes in a file."""
    left_out = ("model_type", "auto_map", PROGRAM_KEY, FAMILY_KEY)
    return config_class.from_dict({key: value for key, value in entries.items() if key not in left_out})
