"""What a checkpoint calls the tensors of its model, which differs from their paths in the model in three places.

A bare decoder is stored without the causal language model's own prefix, a few architectures store their head under
another name, and of tied embeddings one is enough: either of the two.
"""

from __future__ import annotations

from functools import cached_property

from surgeon.checkpoint.read import Checkpoint
from surgeon.families import Family


class Names:
    """The names of a checkpoint's tensors by their paths from the causal language model."""

    def __init__(self, checkpoint: Checkpoint, family: Family) -> None:
        self.checkpoint = checkpoint
        self.family = family

    @cached_property
    def _left_out(self) -> str:
        """What names begin with in the model, but not here."""
        path = self.family.layers
        first = path.partition(".")[0] + "."
        whole = any(name.startswith(f"{path}.") for name in self.checkpoint.names())
        bare = any(name.startswith(f"{path.removeprefix(first)}.") for name in self.checkpoint.names())
        return first if bare and not whole else ""

    def of(self, path: str) -> str:
        """The name of the tensor at a path, also where there is none.

        That of an embedding that is not stored is the head's, which stands for it where they are tied.
        """
        name = self.own(path)
        if path == f"{self.family.embedding}.weight" and name not in self.checkpoint:
            head = self.own(f"{self.family.head}.weight")
            return head if head in self.checkpoint else name
        return name

    def own(self, path: str) -> str:
        """The name of the tensor at a path where nothing else stands for it."""
        head, stored = f"{self.family.head}.", self.family.stored_head
        if not path.startswith(head):
            return path.removeprefix(self._left_out)
        renamed = f"{stored}.{path.removeprefix(head)}"
        return path if stored is None or renamed not in self.checkpoint else renamed

    def are_tied(self, wanted: bool) -> bool:
        """Whether embedding and head are the same matrix, as `transformers` finds it when it loads them.

        Args:
            wanted: whether the configuration says so. If it does and both are stored, they are what is stored.
        """
        embedding, head = (self.own(f"{path}.weight") for path in (self.family.embedding, self.family.head))
        both = embedding in self.checkpoint and head in self.checkpoint
        return wanted and (not both or self._are_equal(embedding, head))

    def _are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors are the same, bit for bit; they are read as far as they are."""
        held = self.checkpoint
        if (held.dtype(one), held.shape(one)) != (held.dtype(other), held.shape(other)):
            return False
        return all(a == b for a, b in zip(held.blocks(one), held.blocks(other), strict=True))


def layer_prefix(source: Checkpoint, family: Family) -> str:
    """What the names of the layers' tensors begin with; some checkpoints leave out the model's own name."""
    prefix = Names(source, family).of(f"{family.layers}.")
    if any(name.startswith(prefix) for name in source.names()):
        return prefix
    raise ValueError(
        f"{source.folder} has no tensors named {family.layers}.*, as {family.name} has; is its config.json right?"
    )
