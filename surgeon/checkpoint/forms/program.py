"""The program form: the layers that a program uses, as they are, with its text in config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

from surgeon.checkpoint.forms.base import (
    BY_THE_FILE,
    FAMILY_KEY,
    NOT_ON_VLLM,
    Form,
    Inexpressible,
    Layout,
    RemoteCode,
    StoredLayer,
    by_transformers,
    require_divisible,
)
from surgeon.checkpoint.forms.planning import ModulePlanner
from surgeon.checkpoint.stored import StoredModel, Wrapped
from surgeon.checkpoint.tensor_file import PlannedTensor
from surgeon.language.program import Program
from surgeon.language.sublayer import KINDS
from surgeon.models.edit import PROGRAM_KEY, PROGRAM_PREFIX
from surgeon.models.families import Family
from surgeon.models.weights import (
    FactorSource,
    Groups,
    absent_sublayers,
    family_entry,
    leave_out,
    make_room,
)


class ProgramForm(Form):
    """Layers as they are, with a program that a modeling file runs."""

    name = "program"
    mark = PROGRAM_KEY
    shipped = RemoteCode(
        "modeling_surgeon_program",
        lambda model_type: f"Program{CONFIG_MAPPING[model_type].__name__.removesuffix('Config')}",
        prefix=PROGRAM_PREFIX,
    )
    planner = ModulePlanner
    stored_once = True
    why_code = "no class of transformers runs its program"
    on_vllm = (
        "With surgeon installed beside vLLM (from a clone or a wheel), which finds surgeon's plugin by itself and "
        "then knows this model; the modeling file in this folder is not used:"
    )

    def lay_out(self, program: Program, family: Family, config: Any) -> Layout:
        if family.model_type not in CONFIG_MAPPING_NAMES:
            raise Inexpressible(
                f"the modeling file that travels inside builds on transformers' own classes, and there are none for "
                f"{family.name}"
            )
        groups = _groups(program)
        layers = []
        for group in groups.groups:
            held = [group.sublayer(kind) for kind in KINDS]
            # Of mixtures there are no averages: beside one stands that of its first layer.
            if family.mixture is not None:
                held = [
                    one if one.kind in group.used else replace(one, layers=one.layers[:1])
                    for one in held
                ]
            layers.append(StoredLayer(*((one,) for one in held)))
        require_divisible(program.sublayers(), family, config)
        renumbered = program.map_sublayers(lambda sublayer: sublayer.stored_in(groups.place(sublayer)))
        why_plugin = needs_plugin(renumbered, family, config, len(layers))
        why_not = family.apart(program)
        if why_plugin or why_not:
            who = "transformers loads"
        else:
            who = "transformers and unmodified vLLM load"
        reason = (
            f"{who} it with the modeling file inside (trust_remote_code=True), which runs the program"
        )
        if why_not:
            reason += f"; {NOT_ON_VLLM} of {why_not}"
        elif why_plugin:
            reason += f"; vLLM needs surgeon's plugin, because {why_plugin}"
        return Layout(self, reason, tuple(layers), renumbered)

    def inside(self, wrapped: Wrapped, layout: Layout, family: Family) -> Layout:
        wrapper = wrapped.wrapper
        program = layout.program
        assert program is not None
        fed = len(wrapped.entries.get("vision_config", {}).get(wrapper.fed, ()))
        if fed and program.whole() != Program.dense(len(layout.layers), family.steps_per_layer):
            raise Inexpressible(
                f"a {wrapper.name} adds features of images behind its first {fed} layers, and the program is another "
                "than one layer after the other"
            )
        reason = (
            f"transformers loads it with the modeling file inside (trust_remote_code=True), which runs the program "
            f"inside a {wrapper.name}"
        )
        return replace(layout, reason=reason, wrapped=wrapped)

    def names_inside(self, wrapped: Wrapped) -> tuple[Callable[[str], str], Callable[[str], str]]:
        # As its class calls them: `transformers` renames tensors for stock classes only.
        return wrapped.wrapper.path_inside, wrapped.wrapper.path_around

    def sources(self, program: Program, family: Family, num_layers: int) -> list[tuple[int, ...]]:  # noqa: ARG002
        return [group.layers for group in _groups(program).groups]

    def tensors(
        self,
        original: StoredModel,
        layout: Layout,
        dtype: torch.dtype | None,
        factors: FactorSource | None = None,
    ) -> list[PlannedTensor]:
        planned = super().tensors(original, layout, dtype, factors)
        family = original.family
        if family.stored_head is None:
            return planned
        # The output head as the model itself calls it: `transformers` renames it for stock classes only.
        own = f"{family.head}."
        stored = f"{family.stored_head}."
        return [
            replace(tensor, name=own + tensor.name.removeprefix(stored))
            if tensor.name.startswith(stored)
            else tensor
            for tensor in planned
        ]

    def class_entries(self, original: StoredModel, layout: Layout) -> dict[str, Any]:
        family = original.family
        config = original.config
        entry = family_entry(family, config)._asdict()
        runs: dict[str, Any] = {PROGRAM_KEY: str(layout.program), FAMILY_KEY: entry}
        if layout.wrapped is not None:
            wrapper = layout.wrapped.wrapper
            entry["inside"] = (wrapper.text, wrapper.decoder)
            return self.shipped.entries(wrapper.model_type) | runs
        if (scale := family.scales.logits(config)) is not None:
            # By this name vLLM's transformers backend, which has a head of its own, knows it.
            runs["logit_scale"] = scale
        return self.shipped.entries(family.model_type) | runs

    def model_class(self, stored: StoredModel) -> Any:
        stock: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(stored.config)]
        as_wide = all(one.width is None and one.experts is None for one in stored.program.sublayers())
        gone = absent_sublayers(stored.weights, stored.program, stored.num_layers)
        if as_wide and not gone and not stored.weights.has_factors():
            return stock

        # Models of this class have the stored factors, narrower layers and fewer experts.
        def build(model: Any, config: Any, *arguments: Any, **options: Any) -> None:
            stock.__init__(model, config, *arguments, **options)
            make_room(model, stored.weights, stored.program)
            leave_out(model, stored.weights, stored.program)

        return type(stock.__name__, (stock,), {"__init__": build, "__module__": stock.__module__})

    def serving(self, stored: StoredModel, serve: str) -> tuple[str, str]:
        name = serve.partition(" --")[0].removeprefix("vllm serve ")
        if stored.wrapped is not None:
            what = f"a text decoder inside a {stored.wrapped.wrapper.name}"
            return by_transformers(f"of {what}", serve)
        if (why_not := stored.family.apart(stored.program)) is not None:
            return by_transformers(f"of {why_not}", serve)
        if (why := stored.family.off_vllm) is not None:
            return (
                f"{NOT_ON_VLLM} of these attentions: {why}. Ranks of surgeon's own do:",
                f"surgeon serve {name}",
            )
        if needs_plugin(stored.program, stored.family, stored.config, stored.num_layers) is None:
            return BY_THE_FILE, f"{serve} --trust-remote-code"
        return self.on_vllm, f"pip install --no-deps PATH_OF_SURGEON\n{serve}"


PROGRAM = ProgramForm()


def needs_plugin(program: Program, family: Family, config: Any, num_layers: int) -> str | None:
    """Say why unmodified vLLM cannot run a program on several ranks; None if it can.

    Its transformers backend runs the stock decoder with projections that are each divided by columns, by rows or not at
    all, as the modeling file's plan says.

    Args:
        program: over stored layers.
        num_layers: that are stored.
    """
    if family.mixture is not None:
        return "its layers are mixtures of experts, which the modeling file does not divide among ranks"
    if any(sublayer.width is not None for sublayer in program.sublayers()):
        return "its layers are of other widths than config.json says, which vLLM goes by"
    if program.whole() != Program.dense(num_layers, family.steps_per_layer):
        return "the program is another than one layer after the other"
    if family.head_bias:
        return (
            f"{family.name}'s output head has a bias, which vLLM's backend for transformers leaves out"
        )
    if family.attention.counts:
        return f"{family.name}'s attention in transformers goes by the number of all heads, of which a rank has some"
    if family.attention.why_whole is not None:
        return f"in {family.name} {family.attention.why_whole}, of which a rank has some"
    if family.units(config)["kv_heads"] == 1:
        return "ranks cannot divide one KV head"
    return None


def _groups(program: Program) -> Groups:
    """Return the layers that the program's sublayers are stored as, in the original's order."""
    return Groups(sorted(program.sublayers(), key=lambda sublayer: sublayer.layers), by_count=False)
