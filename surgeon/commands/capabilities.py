"""Capabilities of a model: every question is put to the code that would refuse it later, on shapes alone."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from surgeon.analysis.engine.machine import TOKENS_AT_ONCE, working_bytes
from surgeon.analysis.engine.sharing import SharedPlan, share
from surgeon.analysis.factors.matrices import choose_weights
from surgeon.analysis.scan import SCANNED, select, selected_cells
from surgeon.checkpoint.config import CONFIG, DEMO, find_config
from surgeon.checkpoint.forms import per_layer_lists
from surgeon.checkpoint.forms.base import NOT_ON_VLLM
from surgeon.checkpoint.forms.fused import FUSED
from surgeon.checkpoint.random_weights import RandomCheckpoint, RandomFactors
from surgeon.checkpoint.stored import QUANTIZATION
from surgeon.checkpoint.tensor_file import read_json
from surgeon.commands.opening import draft_program
from surgeon.exports.export import check_exportable, layout_of
from surgeon.exports.prove import original_model
from surgeon.findings.check import AREAS, NO, PARTLY, YES, Verdict
from surgeon.findings.program import outline_text
from surgeon.language.operations.base import HEATMAPS, VARIANTS, show_range
from surgeon.language.operations.variants import variant
from surgeon.language.program import Program
from surgeon.machine import show_size
from surgeon.models.edit import as_stored, decoder_layers, edit, require_pairs, restore
from surgeon.models.families.base import rotated_layers, windowed_layers
from surgeon.models.weights.quantised import rules_of
from surgeon.named import is_gguf, on_disk
from surgeon.opened import Model, StreamedLayers, open_model, require_streamable
from surgeon.runtime.batching.blocks import PASS_TOKENS
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_draft
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.specification import Plan
from surgeon.searches.mixture import Mixture
from surgeon.searches.spaces import SPACES, parse_spaces
from surgeon.training.racks.model import require_known
from surgeon.training.racks.partition import Racks, allowed_cuts
from surgeon.training.scope import BYTES, shapes_to_train, training_bytes
from surgeon.training.settings import SCOPES, TrainSettings
from surgeon.words import join_words, plural

LENGTH = 2  # layers of the stretches that maps are tried on
ADAPTER_RANK = 16
PAIRS = "lp"
FACTORS = "lowrank"  # maps

# By what it returns: a statement on something that works, perhaps with the memory that it takes; else nothing is said.
Question = tuple[str, Callable[[], object]]
# Layers that a program changes, the program, and the number of places whose layers are of the same kinds.
Example = tuple[str, Program, int]


@dataclass(frozen=True)
class Capabilities:
    """Everything that can be asked of a model with the shapes of its tensors, on numbers of ranks, in a dtype."""

    model: Model
    ranks: Sequence[int]
    dtype: str
    draft: str | Path | None = None

    def verdicts(self, areas: Sequence[str] = AREAS) -> Iterator[Verdict]:
        for area in areas:
            for what, ask in self.questions(area):
                yield answer(area, what, ask)

    def questions(self, area: str) -> Iterator[Question]:
        questions = {
            "load": self.loading,
            "scan": self.measuring,
            "search": self.searching,
            "export": self.exporting,
            "ranks": self.on_ranks,
            "vllm": self.on_vllm,
            "train": self.training,
        }
        return questions[area]()

    def loading(self) -> Iterator[Question]:
        for where in ("cpu", "cuda"):
            dtype = str(self.model.compute_dtype(where)).removeprefix("torch.")
            yield (
                {"cpu": "CPU", "cuda": "GPU"}[where],
                partial(lambda *said: said, dtype, self.model.bytes_on(where)),
            )
        if self.model.folder.is_dir():
            yield "tokenizer", lambda: f"{len(self.model.tokenizer):,} tokens"

    # What measures.

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model without numbers; it may run some program."""
        return original_model(self.model, buffers=False)[0]

    @cached_property
    def kinds(self) -> list[str]:
        """The kind of each layer: its entries of lists in the configuration, and the shapes of its weights."""
        model = self.model
        family = self.model.family
        lists = per_layer_lists(family, model.config, model.checkpoint.config).values()
        said = [*lists, windowed_layers(family, model.config), rotated_layers(family, model.config)]
        layers = decoder_layers(restore(self.skeleton))
        shapes = [[(name, one.shape) for name, one in layer.named_parameters()] for layer in layers]
        return [str((*(entries[k] for entries in said), own)) for k, own in enumerate(shapes)]

    @cached_property
    def map_names(self) -> list[str]:
        is_mixture = self.model.family.mixture is not None
        return [name for name, heatmap in HEATMAPS.items() if is_mixture or not callable(heatmap.values)]

    @cached_property
    def maps(self) -> dict[str, list[Example] | ValueError]:
        """By map of a scan, the shortest stretches that differ in their layers; or why it has none."""
        found: dict[str, list[Example] | ValueError] = {}
        model = self.model
        for name in self.map_names:
            heatmap = HEATMAPS[name]
            length = min(max(LENGTH, heatmap.group), model.num_layers)
            shortest = 1 if heatmap.varied else length
            try:
                chosen = select([name], model.num_layers, max_length=length)
                shapes = model.layer_shapes
                cells = selected_cells(
                    [chosen], model.num_layers, 0, model.family.steps_per_layer, shapes, model.own
                )
            except ValueError as refusal:
                found[name] = refusal
                continue
            alike: dict[tuple[str, ...], dict[range, Program]] = {}
            for cell in cells:
                if len(cell.layers) == shortest:
                    kinds = tuple(self.kinds[layer] for layer in cell.layers)
                    alike.setdefault(kinds, {}).setdefault(cell.layers, cell.program)
            places = [
                (show_range(first := next(iter(some))), some[first], len(some))
                for some in alike.values()
            ]
            found[name] = places or ValueError("it changes nothing of this model")
        return found

    def measuring(self) -> Iterator[Question]:
        tokens = TOKENS_AT_ONCE["cpu"]
        said = f"on a CPU, {tokens:,} tokens at a time"
        yield (
            "in memory",
            lambda: (
                said,
                self.model.bytes_on("cpu") + working_bytes(self.skeleton, self._plan, tokens),
            ),
        )
        yield "layer by layer", lambda: (said, self._streaming_bytes(tokens))
        for name in self.map_names:
            yield (
                name,
                partial(
                    self._over,
                    name,
                    lambda program: edit(self.skeleton, program, factors=RandomFactors("meta")),
                ),
            )
        yield "similarity", self._similarity
        own = self.model.own
        yield (
            "sensitivity",
            lambda: require_pairs(restore(self.skeleton) if own is None else edit(self.skeleton, own)),
        )
        yield "spectrum", lambda: f"of {', '.join(choose_weights(self.model.family, None))}"

    @cached_property
    def _plan(self) -> SharedPlan:
        found = [places for name in SCANNED if isinstance(places := self.maps[name], list)]
        return share([self.model.program, *(program for places in found for _, program, _ in places)])

    def _streaming_bytes(self, tokens: int) -> int:
        require_streamable(self.model)
        layers = decoder_layers(restore(self.skeleton))
        assert isinstance(layers, nn.ModuleList)
        streamed = StreamedLayers(layers, self.model, torch.device("cpu"))
        outside = self.model.shapes.outside_layers * self.model.compute_dtype("cpu").itemsize
        return outside + working_bytes(self.skeleton, self._plan, tokens, streamed)

    def _similarity(self) -> None:
        with as_stored(edit(self.skeleton, self.model.program)):
            pass

    # What changes it.

    def searching(self) -> Iterator[Question]:
        for name, space in SPACES.items():
            if self.model.family.mixture is not None or not space.of_mixtures:
                yield name, partial(self._space, name)

    def _space(self, name: str) -> str:
        mixture = Mixture(parse_spaces(name, max(2, self.ranks[0])), self.model)
        mixture.require_edits()
        return plural(len(mixture.edits), "edit")

    def exporting(self) -> Iterator[Question]:
        if self.unexportable is not None:
            yield "all programs", lambda: self.unexportable
            return
        yield from ((name, partial(self._over, name, self._form)) for name in self.map_names)
        yield "pairs as one layer", partial(self._over, PAIRS, self._as_one_layer)

    @cached_property
    def unexportable(self) -> Verdict | None:
        """None if the model can be exported."""
        found = answer("", "", partial(check_exportable, self.model))
        if found.works == NO:
            return found
        return None

    def _form(self, program: Program) -> str:
        layout = layout_of(self.model, program)
        # The form refuses layouts that it cannot store.
        layout.form.tensors(self.model, layout, None, RandomFactors("meta"))
        return f"{layout.form} form"

    def _as_one_layer(self, program: Program) -> str:
        layout = FUSED.lay_out(program, self.model.family, self.model.config)
        if self.model.wrapped is not None:
            FUSED.inside(self.model.wrapped, layout, self.model.family)
        return ""

    # Where it runs.

    def on_ranks(self) -> Iterator[Question]:
        for count in self.ranks:
            yield plural(count, "rank"), partial(self._check_sharing, count)
        if self.draft is not None:
            yield (
                "draft",
                partial(
                    self._on_each,
                    lambda ranks: with_draft(
                        self._plan_on(ranks), self.model, draft_program(self.model, self.draft) or ""
                    ),
                ),
            )
        longest = self.model.positions
        yield f"texts of {longest:,} tokens", partial(self._plan_on, self.ranks[0], None, longest)
        if self.model.own is None:
            asked = (name for name in VARIANTS if max(self.ranks) > 1 or not _for_several(name))
            yield from ((name, partial(self._variant, name)) for name in asked)
        if isinstance(places := self.maps[FACTORS], list):
            factors = partial(self._plan_on, program=places[0][1])
            yield "two factors", partial(self._on_each, factors)

    def _plan_on(self, ranks: int, program: Program | None = None, tokens: int | None = None) -> Plan:
        return make_plan(self.model, ranks, tokens, program, dtype=self.dtype)

    def _check_sharing(self, ranks: int) -> tuple[str, float]:
        plan = self._plan_on(ranks)
        sizes = footprint(plan, self.model.weights)
        blocks = sizes.blocks(1, plan.max_tokens, PASS_TOKENS["cuda"])
        weights = max(sizes.weights)
        cache = blocks * max(sizes.block)
        said = f"{show_size(weights)} weights, {show_size(cache)} cache of a text of {plan.max_tokens:,} tokens"
        return f"{said}, {self.dtype}, on each", weights + cache

    def _variant(self, name: str) -> Verdict:
        every = range(self.model.num_layers)
        own = _for_several(name)
        numbered = name
        if VARIANTS[name].argument is not None:
            numbered = f"{name.partition(':')[0]}:{LENGTH}"

        def plan(ranks: int) -> Plan:
            return self._plan_on(ranks, variant(numbered, self.model.program, every, ranks))

        return self._on_each(plan, own)

    def _on_each(self, ask: Callable[[int], object], sliced: bool = False) -> Verdict:
        counts = [count for count in self.ranks if count > 1 or not sliced]
        return _together([(plural(count, "rank"), 1, partial(ask, count)) for count in counts])

    def on_vllm(self) -> Iterator[Question]:
        if self.unexportable is not None:
            return iter([("all programs", lambda: self.unexportable)])
        return ((name, partial(self._over, name, self._check_serving)) for name in self.map_names)

    def _check_serving(self, program: Program) -> str:
        layout = layout_of(self.model, program)
        config = copy.copy(self.model.config)
        sources = [layer.sources[0] for layer in layout.layers]
        entries = self.model.family.per_layer_entries(config, sources) | {
            "num_hidden_layers": len(sources)
        }
        for name, value in entries.items():
            setattr(config, name, value)
        how, command = layout.form.serving(
            replace(self.model, config=config, own=layout.program), "vllm serve DIR"
        )
        if how.startswith(NOT_ON_VLLM):
            raise ValueError(how.partition(". ")[0])
        return f"{re.split(r'[,:]| [(]', how)[0]}, {command.splitlines()[-1]}"

    # What trains it.

    def training(self) -> Iterator[Question]:
        pairs = self.maps[PAIRS]
        program = self.model.own or (pairs[0][1] if isinstance(pairs, list) else self.model.program)
        # The last one is of mixtures alone.
        for scope in SCOPES if self.model.family.mixture else SCOPES[:-1]:
            yield f"heal {scope}", partial(self._check_healing, program, scope)
        yield "heal by adapters", partial(self._check_healing, program, "edited", ADAPTER_RANK)
        yield "rack by rack", partial(self._racks, program)

    def _check_healing(self, program: Program, scope: str, rank: int | None = None) -> tuple[str, float]:
        settings = TrainSettings(scope, lora=rank)
        student = shapes_to_train(self.model, program, settings)
        size = training_bytes(student)
        if rank is not None:  # under adapters quantised matrices stay as they are stored
            checkpoint = self.model.checkpoint
            flat = {name: one.shape for name, one in checkpoint.quantised.items() if len(one.shape) == 2}
            size -= sum(
                BYTES * math.prod(shape) - checkpoint[name].num_bytes for name, shape in flat.items()
            )
        return f"{settings.method}, activations on top", size

    def _racks(self, program: Program) -> str:
        cuts = allowed_cuts(program)
        middle = cuts[len(cuts) // 2] if cuts else 1
        Racks.parse([f"0:{middle}", f"{middle}:{self.model.num_layers}"], program)
        require_known(restore(self.skeleton))
        return f"they may begin at {plural(len(cuts), 'layer')}"

    def _over(self, name: str, ask: Callable[[Program], object]) -> Verdict:
        places = self.maps[name]
        if not isinstance(places, list):
            raise places
        return _together(
            [(f"layers {layers}", times, partial(ask, program)) for layers, program, times in places]
        )


def _for_several(name: str) -> bool:
    return VARIANTS[name].ranks is not None or VARIANTS[name].over is not None


def answer(area: str, what: str, ask: Callable[[], object]) -> Verdict:
    """Ask one question; the answer is in the words of the code that does it, or that refuses it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there is to know of things that work
            said = ask()
    except (ValueError, OSError, ImportError) as refusal:
        return Verdict(area, what, NO, " ".join(str(refusal).split()))
    if isinstance(said, Verdict):
        return said._replace(area=area, what=what)
    if isinstance(said, tuple):
        return Verdict(area, what, YES, *said)
    return Verdict(area, what, YES, said if isinstance(said, str) else "")


def _together(questions: Sequence[tuple[str, int, Callable[[], object]]]) -> Verdict:
    """One answer for several places, or numbers of ranks; questions come with the number of places that are alike."""
    given = [(answer("", what, ask), count) for what, count, ask in questions]
    total = sum(count for _, count in given)
    said = dict[str, int]()
    for one, count in given:
        if one.works == YES:
            said[one.why] = said.get(one.why, 0) + count
    refused = [(one, count) for one, count in given if one.works == NO]
    if not said:
        return refused[0][0]
    parts = [
        f"{why} ({count} of {total} places)" if len(said) > 1 else why for why, count in said.items()
    ]
    if not refused:
        return Verdict("", "", YES, "; ".join(parts))
    first = refused[0][0]
    lost = sum(count for _, count in refused)
    listed_all = lost == len(refused)
    if listed_all:
        where = join_words(one.what for one, _ in refused)
    else:
        where = f"{lost} of {total} places, as {first.what}"
    return Verdict("", "", PARTLY, "; ".join([*filter(None, parts), f"not {where}: {first.why}"]))


def with_shapes(model: str | Path | Model) -> Model:
    """A model with the shapes of its tensors, by the headers of its files, or without these by its class."""
    if isinstance(model, Model) and model.files is not None:
        return model
    name = model.name if isinstance(model, Model) else str(model)
    folder = on_disk(name)
    if not isinstance(model, Model) and (
        name == DEMO or is_gguf(name) or (folder is not None and any(folder.glob("*.safetensors*")))
    ):
        return open_model(name)
    if isinstance(model, Model) and (folder is None or folder.is_dir()):
        return Model(name, RandomCheckpoint(Path(name), config=model.config), model.config, model.own)
    path = find_config(name)
    if "model_type" not in read_json(path):
        raise ValueError(
            f"{path} has no model_type, so that it says of no architecture; give the {CONFIG} of a model"
        )
    source = model if isinstance(model, Model) else open_model(name, weights=False)
    return Model(name, RandomCheckpoint(path), source.config, source.own)


def facts_of(model: Model) -> dict[str, str]:
    """Describe a model, by label."""
    shapes = model.shapes
    stored = str(model.dtype).removeprefix("torch.")
    positions = model.family.positions
    rope = positions.rope(model.config) if positions.rotary else None
    digits = 1 if model.parameters < 1e7 else 0
    facts = {
        "model": f"{model.label}: {shapes.family.name}, {plural(shapes.layers, 'layer')} {shapes.hidden} wide, "
        f"{plural(shapes.heads, 'head')} of {shapes.head_dim} over {plural(shapes.kv_heads, 'KV head')}, "
        f"{shapes.neurons} neurons, vocabulary {shapes.vocabulary}, {'tied to' if shapes.tied else 'with'} the head",
        "weights": f"{model.parameters / 1e6:,.{digits}f}M parameters, {show_size(model.size)}, {stored}",
        "positions": f"{model.positions:,}, {_list_entries(rope) if rope else 'learned'}",
    }
    if windows := [window for window in shapes.windows if window is not None]:
        facts["windows"] = (
            f"of {max(windows):,} tokens in {len(windows)} of {plural(shapes.layers, 'layer')}"
        )
    if (mixture := shapes.family.mixture) is not None:
        of = f"{getattr(model.config, mixture.count)} in a layer"
        facts["experts"] = f"{of}, {mixture.routing(model.config).top_k} of them for each token"
    if model.wrapped is not None:
        facts["inside"] = f"{model.wrapped.wrapper.name}, of which the rest stays as it is"
    if quantised := model.checkpoint.config.get(QUANTIZATION):
        try:
            schemes = dict.fromkeys(rule.scheme.description for rule in rules_of(quantised))
            dequantised = "dequantised as they are read, which takes the memory said here"
            facts["quantised"] = f"{', '.join(schemes)}; {dequantised}"
        except ValueError as refusal:
            facts["quantised"] = f"not supported: {refusal}"
    if model.own is not None:
        facts["program"] = outline_text(model.own, shapes.layers, shapes.family.steps_per_layer)
    return facts


def _list_entries(entries: Mapping[str, Any]) -> str:
    said = []
    for name, value in entries.items():
        if isinstance(value, Mapping):
            said.append(f"{name}: {_list_entries(value)}")
        else:
            said.append(f"{name} {f'{len(value)} numbers' if isinstance(value, list) else value}")
    return ", ".join(said)
