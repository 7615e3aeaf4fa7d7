"""Forms: how a program is stored as a checkpoint, in which layers, and how such a checkpoint is known and used."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING

from surgeon.checkpoint.forms.planning import TensorPlanner
from surgeon.checkpoint.imported import WRAPPERS
from surgeon.checkpoint.stored import WEIGHTS_KEY, Checkpoint, StoredModel, Wrapped
from surgeon.checkpoint.tensor_file import PlannedTensor
from surgeon.language.program import Fork, Node, Program, Step
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, Sublayer
from surgeon.models.edit import PROGRAM_KEY
from surgeon.models.families import Family
from surgeon.models.weights import FactorSource, indivisible
from surgeon.models.weights.layers import narrow_units, require_parts
from surgeon.words import did_you_mean, layer_list

if TYPE_CHECKING:  # takes seconds, and ranks do without
    from transformers import PreTrainedModel

FUTURE = "from __future__ import annotations\n"  # begins a module, behind its docstring
FAMILY_KEY = "surgeon_family"  # in config.json, beside the program
AROUND = "ForImageTextToText"  # ends names of classes around a text decoder
NOT_ON_VLLM = "vLLM runs no program"
BY_THE_FILE = "Unmodified vLLM, without surgeon, by the modeling file in this folder:"


@dataclass(frozen=True)
class RemoteCode:
    """A modeling file, and its classes by architecture.

    Attributes:
        module: the file's name without .py, the same here and in a checkpoint.
        stem: the beginning of its classes' names for a `model_type`; Config, Model or ForCausalLM follows.
        prefix: of its checkpoints' `model_type`, before the original's.
    """

    module: str
    stem: Callable[[str], str]
    prefix: str = ""

    @property
    def file_name(self) -> str:
        """The file's name in a checkpoint."""
        return f"{self.module}.py"

    def text(self) -> str:
        """Return the file as it lies in a checkpoint, with the text of modules of this package that it imports."""
        text = (Path(__file__).parents[1] / "remote_code" / self.file_name).read_text()
        for node in reversed(ast.parse(text).body):  # from the end, so that numbers of lines stay
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("surgeon."):
                lines = text.splitlines(keepends=True)
                own_imports = {line for line in lines if line.startswith(("import ", "from "))}
                inside = inspect.getsource(importlib.import_module(str(node.module)))
                moved = inside.partition(FUTURE)[2].lstrip().splitlines(keepends=True)
                lines[node.lineno - 1 : node.end_lineno] = [
                    *(line for line in moved if line not in own_imports),
                    "\n",
                ]
                text = "".join(lines)
        return text

    def class_name(self, model_type: str) -> str:
        """Return the name of the class with a language-model head, of an architecture or a wrapper."""
        return f"{self.stem(model_type)}{head_of(model_type)}"

    def auto_map(self, model_type: str) -> dict[str, str]:
        """Return the `auto_map` of a checkpoint's config.json."""
        head = head_of(model_type)
        suffixes = {"AutoConfig": "Config", "AutoModel": "Model", f"AutoModel{head}": head}
        if head == AROUND:
            del suffixes["AutoModel"]
        return {
            auto: f"{self.module}.{self.stem(model_type)}{suffix}" for auto, suffix in suffixes.items()
        }

    def entries(self, model_type: str) -> dict[str, Any]:
        """Return config.json's entries for the classes."""
        return {
            "architectures": [self.class_name(model_type)],
            "auto_map": self.auto_map(model_type),
            "model_type": self.prefix + model_type,
        }

    def model_class(self, model_type: str, folder: Path | None = None) -> type[PreTrainedModel]:
        """Return the class with a language-model head: this package's, or that of a folder's copy."""
        if folder is None:
            module = importlib.import_module(f"surgeon.checkpoint.remote_code.{self.module}")
        else:
            # Under a name of its own, and without a __pycache__ beside it, which would be a part of the checkpoint.
            module = ModuleType(f"surgeon_shipped_{self.module}")
            sys.modules[module.__name__] = module  # transformers looks classes' modules up there
            module.__file__ = str(folder / self.file_name)
            exec(compile((folder / self.file_name).read_bytes(), module.__file__, "exec"), vars(module))
        loaded: type[PreTrainedModel] = getattr(module, self.class_name(model_type))
        return loaded


def head_of(model_type: str) -> str:
    """Return the end of the names of an architecture's classes with a language-model head."""
    return AROUND if model_type in WRAPPERS else "ForCausalLM"


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


# The most portable one first; the room itself names them.
FORMS: dict[str, Form] = {}


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
        layers = stored_layers(program, family.steps_per_layer, partly=True)
        return [tuple(layer.sources) for layer in layers]

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
        return self.planner(original, dtype, factors).plan([layer.sublayers for layer in layout.layers])

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

    def stock_config(self, entries: dict[str, Any], family: Family) -> Any:
        """Return the `transformers` configuration of a config.json, without program and remote classes."""
        return config_beside(entries, CONFIG_MAPPING[family.model_type])

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
        model_class: Any = self.shipped.model_class(model_type, stored.folder)
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


def form_of(checkpoint: Checkpoint) -> Form:
    """Return the form that a checkpoint is in, by the mark in its config.json; without one it is plain."""
    marked = (form for form in FORMS.values() if form.is_marked(checkpoint.config))
    return next(marked, FORMS["plain"])


def lay_out(
    program: Program,
    family: Family,
    config: Any,
    form: str = "auto",
    among: Collection[str] = (),
    wrapped: Wrapped | None = None,
) -> Layout:
    """Choose the most portable form that holds the program exactly, or the form asked for.

    Args:
        config: the original's `transformers` configuration, for its widths and per-layer lists.
        form: "auto", or one of FORMS.
        among: the forms that "auto" looks at, all by default.
        wrapped: the wrapper that the layers are to stand in, if they are a text decoder's.
    """
    if form not in ("auto", *FORMS):
        raise ValueError(f"unknown form {form!r}; {did_you_mean(form, ('auto', *FORMS))}")
    refusals: dict[str, list[str]] = {}  # the forms that cannot hold it, by the reason
    copying: Layout | None = None
    for one in map(FORMS.__getitem__, among or FORMS if form == "auto" else (form,)):
        try:
            layout = one.lay_out(program, family, config)
            if wrapped is not None:
                layout = one.inside(wrapped, layout, family)
        except Inexpressible as refusal:
            refusals.setdefault(str(refusal), []).append(one.name)
            continue
        copies = "" if one.stored_once else _copies(layout)
        if copies and form == "auto":
            copying = copying or replace(layout, reason=f"{layout.reason}; {copies}")
            refusals.setdefault(
                f"{copies} there; ask for it if other software is to load it", []
            ).append(one.name)
        else:
            return replace(
                layout, reason="; ".join(filter(None, [layout.reason, copies, *_explain(refusals)]))
            )
    if copying is not None:
        return copying
    if form == "auto":
        what = "any form"
    else:
        what = f"the {form} form; leave form out for the most portable form that is exact"
    raise ValueError(f"this program cannot be written in {what} ({'; '.join(_explain(refusals))})")


def _copies(layout: Layout) -> str:
    """Say which sublayers a layout has several times; empty if none."""
    stored = Counter(sublayer for layer in layout.layers for sublayer in layer.sublayers)
    layers = [layer for sublayer, times in stored.items() if times > 1 for layer in sublayer.layers]
    which = f"layer{'s' * (len(set(layers)) > 1)} {layer_list(layers)}"
    if layers:
        return f"what runs several times, of {which}, is stored as often as it runs"
    return ""


def _explain(refusals: dict[str, list[str]]) -> list[str]:
    return [f"not {' or '.join(forms)}, because {reason}" for reason, forms in refusals.items()]


@dataclass(frozen=True)
class StoredLayer:
    """A layer of the written checkpoint: the sublayers side by side in it; of one kind there may be none."""

    attention: tuple[Sublayer, ...]
    feed_forward: tuple[Sublayer, ...]

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        return self.attention + self.feed_forward

    @property
    def has_stock_width(self) -> bool:
        """True if it is as wide as the layers of the original."""
        return self.is_single and all(
            one.width is None and one.experts is None for one in self.sublayers
        )

    @property
    def is_single(self) -> bool:
        """True if it is one attention and one feed-forward, each unsliced."""
        return all(
            len(side) == 1 and side[0].piece is None for side in (self.attention, self.feed_forward)
        )

    @property
    def lacks(self) -> list[str]:
        """The kinds that it has none of, in the words of `transformers`."""
        sides = {"attention": self.attention, "mlp": self.feed_forward}
        return [name for name, side in sides.items() if not side]

    @property
    def sources(self) -> list[int]:
        """The original's layers that it is made of, the attention's first one first."""
        return list(dict.fromkeys(layer for sublayer in self.sublayers for layer in sublayer.layers))


class Inexpressible(ValueError):
    """A form cannot hold this program exactly; the message says why."""


def stored_layers(
    program: Program, steps_per_layer: int, partly: bool = False
) -> tuple[StoredLayer, ...]:
    """Divide the program into layers of an attention and a feed-forward step, or of one step with both.

    Args:
        partly: whether layers may lack one of the two.
    """
    for sublayer in program.sublayers():
        if sublayer.ranks:
            raise Inexpressible(f"{sublayer} has factors in place of matrices, which no stock layer has")
    steps = list(map(_step_of_a_layer, program.nodes))
    if steps_per_layer == 1:
        return tuple(StoredLayer(*(_of_kind(step, kind, partly) for kind in KINDS)) for step in steps)
    if partly:
        return tuple(_partly_there(steps))
    for index, step in enumerate(steps):
        kind, what = ((ATTENTION, "an attention"), (FEED_FORWARD, "a feed-forward"))[index % 2]
        if {sublayer.kind for sublayer in step.sublayers} != {kind}:
            raise Inexpressible(f"{step} stands where a layer has {what} step")
    if len(steps) % 2:
        raise Inexpressible("the last attention step has no feed-forward step after it")
    return tuple(
        StoredLayer(a.sublayers, f.sublayers) for a, f in zip(steps[::2], steps[1::2], strict=True)
    )


def per_layer_lists(family: Family, config: Any, stored: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the configuration's lists with one entry per layer, by key.

    Args:
        config: as `transformers` reads it, which fills in some of them for some architectures.
        stored: config.json as it stands, with keys that `transformers` does not know too.
    """
    candidates = {key: getattr(config, key, None) for key in family.entries.lists} | stored
    return {
        key: value
        for key, value in candidates.items()
        if isinstance(value, list)
        and len(value) == config.num_hidden_layers
        and key != "architectures"
        and not key.endswith(("_token_id", "_token_ids"))
    }


def require_uniform(
    layers: tuple[StoredLayer, ...], family: Family, lists: dict[str, list[Any]]
) -> None:
    """Refuse layers stored as one whose entries in per-layer lists differ."""
    for key, values in lists.items():
        for layer in layers:
            # What says how far attention looks must be the same in the layers that an attention is made of.
            alike = layer.attention if key in family.entries.lists else layer.sublayers
            sources = [source for sublayer in alike for source in sublayer.layers]
            for other in sources[1:]:
                if values[other] != values[sources[0]]:
                    raise Inexpressible(f"layers {sources[0]} and {other} differ in the config's {key}")


def require_divisible(sublayers: Iterable[Sublayer], family: Family, config: Any) -> None:
    """Refuse slices without a whole number of heads and neurons."""
    for sublayer in sublayers:
        units = family.units(config, sublayer.layers[0])
        spec = family.spec(sublayer.kind, sublayer.layers[0])
        require_parts(sublayer, spec, family)
        own = {projection.unit: units[projection.unit] for projection in spec.projections}
        reason = indivisible(sublayer, narrow_units(sublayer, own))
        if reason is not None:
            raise ValueError(reason)


def _step_of_a_layer(node: Node) -> Step:
    if isinstance(node, Fork):
        raise Inexpressible(f"the fork {node} runs whole streams side by side")
    if node.late:
        raise Inexpressible(f"the step {node} is late")
    return node


def _partly_there(steps: list[Step]) -> Iterator[StoredLayer]:
    """Yield layers of an attention step and the feed-forward step behind it, or of one of them alone."""
    attention: tuple[Sublayer, ...] = ()
    for step in steps:
        kinds = {sublayer.kind for sublayer in step.sublayers}
        if len(kinds) > 1:
            raise Inexpressible(f"{step} has attention and feed-forward in one step")
        if kinds == {FEED_FORWARD}:
            yield StoredLayer(attention, step.sublayers)
            attention = ()
            continue
        if attention:
            yield StoredLayer(attention, ())
        attention = step.sublayers
    if attention:
        yield StoredLayer(attention, ())


def _of_kind(step: Step, kind: str, partly: bool) -> tuple[Sublayer, ...]:
    found = tuple(sublayer for sublayer in step.sublayers if sublayer.kind == kind)
    if not found and not partly:
        raise Inexpressible(
            f"{step} has no {'attention' if kind == ATTENTION else 'feed-forward'} beside the rest"
        )
    return found
