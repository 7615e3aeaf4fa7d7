"""The tensors of a checkpoint to be written: names and shapes at once, values one at a time on demand.

Nothing here knows their form; a form that stores tensors in another way than the original has its own planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from surgeon.checkpoint.stored import Checkpoint, StoredModel
from surgeon.checkpoint.tensor_file import PlannedTensor, TensorFiles
from surgeon.language.sublayer import Sublayer
from surgeon.models.families import Family, Projection, SublayerSpec
from surgeon.models.weights import (
    Factored,
    Factorised,
    Factors,
    FactorSource,
    ModelWeights,
    Tensors,
    WeightMatrix,
    mean,
    pack_tensors,
)
from surgeon.models.weights.layers import StoredWeights, modules_of, own_path, taken_apart
from surgeon.models.weights.quantised import Quantised

# A tensor, or its rows in order, some at a time: what is computed of large tensors is never held as a whole.
Computed = Tensor | Iterator[Tensor]
Compute = Callable[[ModelWeights], Computed]
# Of modules without weights: causal masks and angles, which early checkpoints store. They follow from the config.
BUFFERS = ("bias", "masked_bias", "inv_freq")


def plan_copy(files: TensorFiles, name: str) -> PlannedTensor:
    """Plan a tensor that is written as it is stored, byte for byte."""
    stored = files[name]
    return PlannedTensor(
        name, stored.shape, stored.dtype, False, rows=stored.rows, sources=(name,), blocks=stored.blocks
    )


def some_of(name: str, matrix: Quantised, experts: tuple[int, ...]) -> list[PlannedTensor]:
    """Plan the tensors of some of a quantised stack's experts; none where one of them has several as one.

    Args:
        name: of the stack that they are.
    """
    found = []
    for ending, part in matrix.parts.items():
        place = matrix.arrangement.place(ending, 0)
        if place is None or place.per_element != 1:
            return []
        shape = list(matrix.store.shape(part))
        shape[place.dim] = len(experts)
        found.append(
            PlannedTensor(
                f"{name.removesuffix(matrix.scheme.stands_for)}{ending}",
                tuple(shape),
                matrix.store.dtype(part),
                rounded=False,
                rows=partial(_some, matrix, ending, place.dim, experts),
                sources=(part,),
                part_of=name,
            )
        )
    return found


def _some(matrix: Quantised, ending: str, dim: int, experts: tuple[int, ...]) -> Iterator[Tensor]:
    yield matrix.tensor(ending).index_select(dim, torch.tensor(experts))


@dataclass(frozen=True)
class OfExperts:
    """Computes some experts' part of a tensor, in which they lie one after the other."""

    whole: Compute
    experts: tuple[int, ...]

    def __call__(self, weights: ModelWeights) -> Tensor:
        whole = self.whole(weights)
        assert isinstance(whole, Tensor)
        return whole[list(self.experts)]


class TensorPlanner:
    """Plans the tensors of a checkpoint made of another one's layers.

    Raises:
        ValueError: if the original has a tensor in a layer that is not known.
    """

    def __init__(
        self, original: StoredModel, dtype: torch.dtype | None, factors: FactorSource | None = None
    ) -> None:
        self.source = original.checkpoint
        self.family = original.family
        self.config = original.config
        self.dtype = dtype
        head_dim = self.family.head_dim(self.config)
        self.weights = ModelWeights(self.source, self.family, head_dim, factors)
        self.outlines = _Outlines(self.source, self.family, head_dim)
        self.prefix = self.weights.names.layers
        self.unquantised = original.dtype  # of what is computed of quantised matrices

    def plan(self, layers: Sequence[tuple[Sublayer, ...]]) -> list[PlannedTensor]:
        """Plan all tensors of layers, by their sublayers, in the order in which a forward pass needs them."""
        outside = [name for name in self.source.names() if not name.startswith(self.prefix)]
        embeddings = {path.rpartition(".")[2] for path in self.family.embeddings}
        first = [name for name in outside if embeddings & set(name.split("."))]
        last = [name for name in outside if name not in first]
        planned = [tensor for name in first for tensor in self._copy(name)]
        for index, layer in enumerate(layers):
            # One norm may be both's.
            computed = dict(chain.from_iterable(map(self._sublayer_tensors, layer)))
            for path, compute in computed.items():
                planned += self.plan_tensors(f"{self.prefix}{index}.{path}", compute)
        return planned + [tensor for name in last for tensor in self._copy(name)]

    def _copy(self, name: str) -> list[PlannedTensor]:
        """Plan a tensor outside the layers; tied embeddings are the embedding, as most software looks for."""
        embedding = f"{self.family.embedding}.weight"
        names = self.weights.names
        written = names.own(embedding) if name == names.stored_name(embedding) else name
        return self.plan_tensors(written, lambda weights: weights.store.tensor(name))

    def _sublayer_tensors(self, sublayer: Sublayer) -> Iterator[tuple[str, Compute]]:
        """Yield a sublayer's tensors by path from the layer, and how each is computed."""
        # Modules in which some matrix is stored as two factors are taken apart; the others are stored as they are.
        apart = taken_apart(self.weights.spec(sublayer), lambda role: sublayer.rank(role) is not None)
        for path in self.paths(sublayer):
            if path.startswith(tuple(f"{one.path}." for one in apart)):
                continue
            written = path if sublayer.experts is None else self._of_experts(sublayer, path)
            if written is not None:
                yield written, self.as_stored(sublayer, path)
        yield from self.apart(sublayer, apart)

    def as_stored(self, sublayer: Sublayer, path: str) -> Compute:
        """Return the computation of a tensor that is written in the way that its layers store it."""
        compute = partial(self.part, sublayer, path)
        spec = self.weights.spec(sublayer)
        if spec.mixture is None or sublayer.experts is None:
            return compute
        router = (own for name, own in spec.mixture.whole.items() if not name.startswith("shared"))
        stacked = (own for one in spec.projections if one.stacked for own in (one.weight, one.bias))
        if path in {self._source_path(sublayer, own) for own in (*router, *stacked)}:
            return OfExperts(compute, sublayer.experts)
        return compute

    def _of_experts(self, sublayer: Sublayer, path: str) -> str | None:
        """Return the path of a tensor of kept experts, counted from 0; None if its expert is dropped."""
        assert sublayer.experts is not None
        for stem in filter(None, (one.stored for one in self.weights.spec(sublayer).projections)):
            before, after = self._source_path(sublayer, f"{stem.replace('{}', '0')}.weight").split(".0.")
            expert = path.removeprefix(f"{before}.").partition(".")[0]
            if path.startswith(f"{before}.") and expert.isdecimal() and path.endswith(f".{after}"):
                if int(expert) in sublayer.experts:
                    return f"{before}.{sublayer.experts.index(int(expert))}.{after}"
                return None
        return path

    def _source_path(self, sublayer: Sublayer, path: str) -> str:
        """Return a path from the layer as the source has it."""
        names = self.weights.names
        prefix = f"{self.family.layers}.{sublayer.layers[0]}."
        return names.own(f"{prefix}{path}").removeprefix(f"{self.prefix}{sublayer.layers[0]}.")

    def apart(self, sublayer: Sublayer, apart: list[Projection]) -> Iterator[tuple[str, Compute]]:
        """Yield the tensors of modules that are taken apart; of experts stacked, one after the other."""
        spec = self.weights.spec(sublayer)
        for projection in apart:
            role = projection.role
            own = own_path(projection, spec)
            each = self.weights.each_expert(sublayer) if projection.stacked else None
            factors = () if sublayer.rank(role) is None else ("first", "second")
            for name in factors:
                yield f"{own}.{name}.weight", _each(each, sublayer, partial(_factor, role, name))
            if not factors:
                yield f"{own}.weight", _each(each, sublayer, partial(whole_matrix, role))
            if self.weights.bias(each[0] if each else sublayer, role) is not None:
                place = f"{own}.second.bias" if factors else f"{own}.bias"
                yield place, _each(each, sublayer, partial(_bias, role))

    def plan_tensors(self, name: str, compute: Compute) -> list[PlannedTensor]:
        """Plan a tensor of this name; its computation is traced on shapes alone.

        A quantised matrix that is copied stays one, in the tensors that hold it. A tensor computed of others is stored
        in the model's dtype.
        """
        outline, read = self.outlines.trace(compute)
        sources = tuple(read)
        matrices = [self.source.quantised[one] for one in sources if one in self.source.quantised]
        original = self.unquantised if matrices else self.source.dtype(sources[0])
        dtype = self.dtype if self.dtype is not None and original.is_floating_point else original
        whole = outline[0] is read[sources[0]]
        if whole and matrices and self.dtype is None:
            # The tensors that hold a quantised matrix stay as they are, for one of another name.
            module = name.removesuffix(matrices[0].scheme.stands_for)
            parts = ((f"{module}{ending}", part) for ending, part in matrices[0].parts.items())
            return [
                replace(plan_copy(self.source.raw, part), name=written, part_of=name)
                for written, part in parts
            ]
        if isinstance(compute, OfExperts) and matrices and self.dtype is None:
            outline, read = self.outlines.trace(compute.whole)
            some = some_of(name, matrices[0], compute.experts) if outline[0] is read[sources[0]] else []
            if some:
                return some
        return [
            PlannedTensor(
                name,
                tuple(join_rows(outline).shape),
                dtype,
                rounded=torch.promote_types(outline[0].dtype, dtype) != dtype,
                rows=lambda: _rows(compute(self.weights)),
                sources=sources,
                blocks=self.source[sources[0]].blocks
                if whole and not matrices and dtype == original
                else None,
                dequantised=bool(matrices),
            )
        ]

    def paths(self, sublayer: Sublayer) -> list[str]:
        """Return paths from the layer of the sublayer's tensors, without buffers."""
        spec = self.family.spec(sublayer.kind, sublayer.layers[0])
        prefix = f"{self.prefix}{sublayer.layers[0]}."
        names = [name.removeprefix(prefix) for name in self.source.names() if name.startswith(prefix)]
        roots = tuple(root for one in self.family.specs() for root in self._roots(one))
        for name in names:
            if not name.startswith(roots):
                raise ValueError(
                    f"{prefix}{name} is no tensor of {self.family.name} that surgeon knows; it cannot be exported"
                )
        modules = known_modules(spec)
        own = (name for name in names if name.startswith(self._roots(spec)))
        if spec.mixture is not None:
            return list(own)
        return [
            name
            for name in own
            if name.rpartition(".")[2] not in BUFFERS or name.rpartition(".")[0] in modules
        ]

    def _roots(self, spec: SublayerSpec) -> tuple[str, ...]:
        """Return the prefixes of a sublayer's tensors, behind those of the layer."""
        roots = tuple(f"{root}." for root in spec.stages)
        return roots + tuple(
            stored + root.removeprefix(own)
            for root in roots
            for own, stored in self.family.stored_names
            if root.startswith(own)
        )

    def part(self, sublayer: Sublayer, path: str, weights: ModelWeights) -> Tensor:
        """Return one tensor of an unsliced sublayer as its layers store it; an average in float32."""
        if len(sublayer.layers) == 1:
            return weights.stored_part(sublayer, path)
        tensors = (weights.tensor(f"{self.family.layers}.{layer}.{path}") for layer in sublayer.layers)
        return mean(tensors, averaging_dtype(sublayer))


class ModulePlanner(TensorPlanner):
    """Mixtures as their modules have them, experts stacked: where no stock class finds them one by one."""

    def _sublayer_tensors(self, sublayer: Sublayer) -> Iterator[tuple[str, Compute]]:
        spec = self.weights.spec(sublayer)
        if spec.mixture is None:
            yield from super()._sublayer_tensors(sublayer)
            return
        self.paths(sublayer)  # refuses a layer with what is not known
        tensors = self.outlines.weights.norms(sublayer) | self.outlines.weights.router(sublayer)
        for name in tensors:
            places = spec.norms | {"router": "", "shared_router": ""}
            path = (
                spec.mixture.whole.get(name)
                or f"{places[name.partition('.')[0]]}.{name.rpartition('.')[2]}"
            )
            yield path, partial(_beside, sublayer, name)
        apart = taken_apart(spec, lambda role: sublayer.rank(role) is not None)
        layer, *others = sublayer.layers
        is_whole = sublayer.width in (None, self.weights.stored_width(sublayer.kind, layer))
        is_whole = is_whole and not others and sublayer.piece is None
        for projections in modules_of(spec).values():
            like = projections[0]
            if like in apart:
                continue
            is_quantised = (
                like.stacked and f"{self.prefix}{layer}.{like.weight}" in self.source.quantised
            )
            if is_quantised and is_whole:  # which stays as it is stored
                for path in (like.weight, like.bias):
                    if f"{self.prefix}{layer}.{path}" in self.source:
                        yield path, self.as_stored(sublayer, path)
                continue
            each = self.weights.each_expert(sublayer) if like.stacked else None
            has_bias = self.weights.bias(each[0] if each else sublayer, like.role) is not None
            for path in (like.weight, like.bias) if has_bias else (like.weight,):
                yield path, _each(each, sublayer, partial(_pack, spec, projections, path))
        yield from self.apart(sublayer, apart)


class _Outlines:
    """The source's tensors and factors without values, by which computations are traced.

    A store and a source of factors (and units) of its own `ModelWeights`, which records reads.
    """

    def __init__(self, source: Checkpoint, family: Family, head_dim: int) -> None:
        self.where = source.where
        self.names = source.names
        self.shape = source.shape
        self.dtype = source.dtype
        self._source = source
        self._read: dict[str, Tensor] = {}
        self.weights = ModelWeights(self, family, head_dim, self)

    def trace(self, compute: Compute) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return a computation's rows, and the stored tensors that it takes, in the order of reading."""
        self._read = {}
        return list(_rows(compute(self.weights))), self._read

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def tensor(self, name: str) -> Tensor:
        self._read[name] = torch.empty(self.shape(name), dtype=self.dtype(name), device="meta")
        return self._read[name]

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        return self.tensor(name).narrow(dim, first, end - first)

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        rank = sublayer.rank(role)
        like = matrix.whole(torch.float32)
        assert rank is not None
        return Factors(like.new_empty(rank, like.shape[1]), like.new_empty(like.shape[0], rank))

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        return torch.arange(weights.stored_width(kind, layer))


def _each(
    experts: tuple[Sublayer, ...] | None,
    sublayer: Sublayer,
    compute: Callable[[Sublayer, ModelWeights], Tensor],
) -> Compute:
    """Compute something of a sublayer; or of a mixture's experts, stacked, one at a time."""
    if experts is None:
        return partial(compute, sublayer)
    return lambda weights: (compute(expert, weights)[None] for expert in experts)


def _pack(
    spec: SublayerSpec,
    projections: list[Projection],
    path: str,
    sublayer: Sublayer,
    weights: ModelWeights,
) -> Tensor:
    """Return a module's parameter that some projections are packed in; of a mixture, one expert's part of it."""
    tensors: Tensors = {}
    for projection in projections:
        found = weights.matrix_tensors(sublayer, projection.role, None)
        tensors |= {
            name: tensor[None] if projection.stacked else tensor for name, tensor in found.items()
        }
    made = pack_tensors(tensors, spec, weights.unit_width(sublayer.kind))[path]
    if projections[0].stacked:
        return made[0]
    return made


def _beside(sublayer: Sublayer, name: str, weights: ModelWeights) -> Tensor:
    """Return a tensor of a mixture that is no projection's."""
    return (weights.norms(sublayer) | weights.router(sublayer))[name]


def _factor(role: str, name: str, sublayer: Sublayer, weights: ModelWeights) -> Tensor:
    matrix = weights.matrix(sublayer, role)
    assert isinstance(matrix, Factored | Factorised)
    factor: Tensor = getattr(matrix.factors(), name)
    return factor


def whole_matrix(role: str, sublayer: Sublayer, weights: ModelWeights) -> Tensor:
    """Return a sublayer's weight of a role, (out_features, in_features)."""
    return weights.matrix(sublayer, role).whole(averaging_dtype(sublayer))


def _bias(role: str, sublayer: Sublayer, weights: ModelWeights) -> Tensor:
    bias = weights.bias(sublayer, role, averaging_dtype(sublayer))
    assert bias is not None
    return bias


def averaging_dtype(sublayer: Sublayer) -> torch.dtype | None:
    """Return float32 for averages, which are rounded when they are written; None for other sublayers."""
    if len(sublayer.layers) > 1:
        return torch.float32
    return None


def _rows(computed: Computed) -> Iterator[Tensor]:
    if isinstance(computed, Tensor):
        return iter([computed])
    return computed


def join_rows(rows: list[Tensor]) -> Tensor:
    """Join all rows of a tensor, without a copy where they come as one."""
    if len(rows) == 1:
        return rows[0]
    return torch.cat(rows)


def known_modules(spec: SublayerSpec) -> set[str]:
    """Paths of the modules that have weights."""
    return {*spec.norms.values(), *(projection.path for projection in spec.projections)}
