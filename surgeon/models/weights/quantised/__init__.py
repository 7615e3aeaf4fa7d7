"""The third way to store a matrix: in few bits, by several tensors that belong together."""

from surgeon.models.weights.quantised.find import quantised_matrices
from surgeon.models.weights.quantised.matrix import PackedTensor, Quantised, Scheme
from surgeon.models.weights.quantised.methods import rules_of

__all__ = ["PackedTensor", "Quantised", "Scheme", "quantised_matrices", "rules_of"]
