"""The matrices of a model's layers, by role: choose them, read one, put another in its place for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from surgeon.language.sublayer import KINDS, ROLES, WRITING, Sublayer
from surgeon.models.edit import decoder_layers
from surgeon.models.families import Family, family_of
from surgeon.models.weights import Dense, ModelWeights, ModuleStore
from surgeon.words import did_you_mean

if TYPE_CHECKING:  # takes seconds, and who only names matrices does without
    from transformers import PreTrainedModel


@dataclass(frozen=True, order=True)
class Matrix:
    """A matrix of a model's layer, or of a sublayer of a program.

    Attributes:
        sublayer: not a slice; with all its ranks where a program has some for it.
        role: q, k, v, o, gate, up or down.
    """

    sublayer: Sublayer
    role: str

    @classmethod
    def of(cls, layer: int, role: str) -> Matrix:
        """Name a matrix of a layer as it is stored."""
        (kind,) = (kind for kind in KINDS if role in ROLES[kind])
        return cls(Sublayer(kind, (layer,)), role)

    def __str__(self) -> str:
        plain = len(self.sublayer.layers) == 1 and not self.sublayer.ranks
        return f"{self.role} of {f'layer {self.layer}' if plain else self.sublayer}"

    @property
    def layer(self) -> int:
        return self.sublayer.layers[0]

    @property
    def inputs(self) -> tuple[Sublayer, bool]:
        """Equal for matrices of equal inputs: the sublayer, and whether they read the stream, as q and up do."""
        return self.sublayer, self.role not in WRITING


class Matrices:
    """Reads and replaces the matrices of an unedited model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.family = family_of(model.config)
        layers = decoder_layers(model)
        assert isinstance(layers, nn.ModuleList)
        self.layers = layers
        store = ModuleStore(layers, f"{self.family.layers}.")
        self.weights = ModelWeights(store, self.family, self.family.head_dim(model.config))

    def module(self, matrix: Matrix) -> nn.Module:
        """The linear module that holds a matrix, perhaps with others packed beside it."""
        spec = self.family.spec(matrix.sublayer.kind, matrix.layer)
        return self.layers[matrix.layer].get_submodule(spec.projection(matrix.role).path)

    def read(self, matrix: Matrix) -> Tensor:
        return self.weights.matrix(matrix.sublayer, matrix.role).whole()

    @contextmanager
    def replace(self, matrix: Matrix, values: Tensor) -> Iterator[None]:
        """Run with another matrix, (out, in), in place of this one; the model's own parameter is back afterwards."""
        module = self.module(matrix)
        own = module.weight
        assert isinstance(own, nn.Parameter)
        place = self.weights.matrix(matrix.sublayer, matrix.role)
        assert isinstance(place, Dense)
        changed = (values.T if place.transposed else values).to(own).contiguous()
        if place.features is not None:
            changed = own.detach().index_copy(place.dim, place.features.to(own.device), changed)
        module.weight = nn.Parameter(changed, requires_grad=False)
        try:
            yield
        finally:
            module.weight = own

    def check(self, matrices: Sequence[Matrix]) -> None:
        """Refuse matrices that are no plain linear ones, not in memory, or not finite, by ValueError."""
        from transformers.pytorch_utils import Conv1D

        for matrix in matrices:
            module = self.module(matrix)
            plain = isinstance(module, nn.Linear | Conv1D) and type(module.weight) is nn.Parameter
            if not plain or {name for name, _ in module.named_parameters()} - {"weight", "bias"}:
                kind = type(module).__name__
                raise ValueError(
                    f"{matrix} is a {kind}, not a plain linear module; load the model without it"
                )
            if module.weight.is_meta:
                raise ValueError(
                    f"{matrix} is not in memory, where its weights have to be; load the model without offloading, on a "
                    "machine with more memory"
                )
            if not self.read(matrix).isfinite().all():
                raise ValueError(
                    f"{matrix} holds NaN or infinity; fetch or convert the checkpoint again"
                )


def choose_weights(family: Family, names: Sequence[str] | None) -> tuple[str, ...]:
    """The roles asked for, in the order of programs, or all; ValueError if the family has no such one."""
    inside = {
        projection.role
        for spec in family.specs()
        for projection in spec.projections
        if not projection.stacked
    }
    roles = [role for kind in KINDS for role in ROLES[kind] if role in inside]
    for name in names or ():
        if name not in roles:
            raise ValueError(f"{family.name} has no weight {name!r}; {did_you_mean(name, roles)}")
    if names is not None and not names:
        raise ValueError(f"no weight is named; name some of {', '.join(roles)}, as in q,k")
    return tuple(role for role in roles if names is None or role in names)


def find_matrices(family: Family, layers: range, weights: Sequence[str]) -> list[Matrix]:
    """List these weights of the layers that have them, in the order of their use; experts' are left out."""
    return [
        Matrix.of(layer, projection.role)
        for layer in layers
        for kind in KINDS
        for projection in family.spec(kind, layer).projections
        if projection.role in weights and not projection.stacked
    ]
