"""Names of stored tensors, which differ from their paths in the model in four places.

A bare decoder is stored without the causal language model's own prefix, a few architectures store their head, or a
module of their layers, under another name, and of tied embeddings one is enough: either of the two.
"""

from __future__ import annotations

from functools import cached_property

from surgeon.language.sublayer import FEED_FORWARD
from surgeon.models.families import Family
from surgeon.models.weights.store import Store


class Names:
    """The names of stored tensors by their paths from the causal language model."""

    def __init__(self, store: Store, family: Family) -> None:
        self.store = store
        self.family = family

    @cached_property
    def _left_out(self) -> str:
        """The beginning of names in the model that is missing here."""
        path = self.family.layers
        first = path.partition(".")[0] + "."
        whole = any(name.startswith(f"{path}.") for name in self.store.names())
        bare = any(name.startswith(f"{path.removeprefix(first)}.") for name in self.store.names())
        if bare and not whole:
            return first
        return ""

    @property
    def prefix_of_layers(self) -> str | None:
        """The beginning of layers' names, or None if there are none."""
        prefix = self.own(f"{self.family.layers}.")
        if any(name.startswith(prefix) for name in self.store.names()):
            return prefix
        return None

    @cached_property
    def layers(self) -> str:
        """The beginning of layers' names, before the layer's number.

        Raises:
            ValueError: if there are none.
        """
        if (prefix := self.prefix_of_layers) is not None:
            return prefix
        prefix = self.own(f"{self.family.layers}.")
        raise ValueError(
            f"{self.store.where} has no tensors named {prefix}*, as {self.family.name} has; is its config.json right?"
        )

    def of(self, path: str) -> str:
        """Return the name of the tensor at a path, also where there is none.

        The head's stands for an embedding that is not stored, where they are tied.
        """
        name = self.own(path)
        if path == f"{self.family.embedding}.weight" and name not in self.store:
            head = self.own(f"{self.family.head}.weight")
            if head in self.store:
                return head
            return name
        return name

    def own(self, path: str) -> str:
        """Return the name of the tensor at a path where nothing else stands for it."""
        head = f"{self.family.head}."
        stored = self.family.stored_head
        if not path.startswith(head):
            name = path.removeprefix(self._left_out)
            if self.family.stored_names and name not in self.store:
                return self._stored_name(name)
            return name
        renamed = f"{stored}.{path.removeprefix(head)}"
        if stored is None or renamed not in self.store:
            return path
        return renamed

    def parts(self, path: str, experts: int) -> tuple[str, ...]:
        """Return the tensors that a parameter of the model is stored as: one, as a rule, or rows, one after the other.

        Args:
            experts: matrices stacked in it, if it is stacked.
        """
        name = self.own(path)
        if name in self.store or not path.startswith(f"{self.family.layers}."):
            return (name,)
        number, _, inside = path.removeprefix(f"{self.family.layers}.").partition(".")
        projections = self.family.spec(FEED_FORWARD, int(number)).projections if number.isdecimal() else ()
        alone = [one.stored for one in projections if one.stored is not None and one.weight == inside]
        layer = f"{self.family.layers}.{number}."
        each = tuple(self.own(f"{layer}{one.format(expert)}.weight") for expert in range(experts) for one in alone)
        return each or (name,)

    def below(self, layer: int, path: str) -> dict[str, str]:
        """Return the tensors of a module of a layer, or of one inside it, by their paths from the layer."""
        prefix = f"{self.layers}{layer}."
        found = dict[str, str]()
        for name in (name for name in self.store.names() if name.startswith(prefix)):
            inside = name.removeprefix(prefix)
            for own, stored in self.family.stored_names:
                inside = own + inside.removeprefix(stored) if inside.startswith(stored) else inside
            if inside.startswith(f"{path}."):
                found[inside] = name
        return found

    def _stored_name(self, name: str) -> str:
        """Return the name that files have for a layer's tensor, if they have it under another one."""
        number, _, inside = name.removeprefix(f"{self.family.layers}.").partition(".")
        for own, stored in self.family.stored_names:
            renamed = name.removesuffix(inside) + stored + inside.removeprefix(own)
            if number.isdecimal() and inside.startswith(own) and renamed in self.store:
                return renamed
        return name
