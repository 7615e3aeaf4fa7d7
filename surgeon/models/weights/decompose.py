"""Methods that put two factors in the place of a matrix.

Every method finds directions of the outputs, orthonormal columns U with the most important one first, and keeps of a
matrix W, (out, in), U_r (U_r' W) with the first r of them. They differ in what makes a direction important:

    plain        the singular vectors of W: what is left out of the weights is smallest
    activation   those of W diag(m^alpha), m the mean size of each input (ASVD, Yuan et al. 2023, section 3.2)
    whitened     those of W S with S S' = X'X: what is left out of the outputs X W' is smallest (SVD-LLM, Wang et al.
                 2025, section 3.1)

Where D is what W is multiplied by and W D = U diag(s) V', U_r (U_r' W) equals the published U_r diag(s_r) V_r' inv(D)
but needs no inverse of D, which may have none, or one of few digits (as in COALA, Parkina et al. 2025). Directions are
nested, and so are factors: those of a lower rank are the first rows and columns. Everything is computed in float64. The
singular vectors of a large matrix come from the products of its rows or columns with each other, which takes less room
and time, and tells singular values down to a millionth of the largest one apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surgeon.language.operations.lowrank import Method
from surgeon.language.sublayer import Sublayer
from surgeon.models.weights.store import Factors, WeightMatrix
from surgeon.words import did_you_mean


class SecondMoment:
    """X'X over batches of inputs, in float64; the inputs themselves are not kept.

    Attributes:
        matrix: (in, in).
        samples: tokens taken in so far.
        noise: rounding of sums over so many products of the inputs, in parts of their size.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.zeros(features, features, dtype=torch.float64, device=device)
        self.samples = 0
        self.noise = 0.0

    def add(self, inputs: Tensor) -> None:
        """Take in a batch, (..., in), in the dtype that it was computed in."""
        rows = inputs.detach().flatten(0, -2).to(self.matrix)
        self.matrix.addmm_(rows.T, rows)
        self.samples += len(rows)
        # Sums are accumulated in float32 at least: their errors grow with the root of how many are added. What inputs
        # of tiny models have beyond what they should span lies below (768 features: in float32 by a factor of 17, in
        # bfloat16 of 1.4).
        precision = float(torch.finfo(inputs.dtype).eps)
        added = math.sqrt(len(self.matrix)) * min(precision, torch.finfo(torch.float32).eps)
        self.noise = max(self.noise, 2 * precision, 2 * added)

    def zero(self, largest: Tensor, rounding: float = 0.0) -> float:
        """Return the largest eigenvalue of this moment, with features scaled to size 1, that is rounding.

        Args:
            largest: of the eigenvalues.
            rounding: of other numbers that the moment was multiplied with, as `noise`.
        """
        sums = torch.finfo(torch.float64).eps * len(self.matrix) * float(largest)
        return max(self.noise**2, rounding**2, sums)


@dataclass(frozen=True)
class Whitening:
    """A factor S of a second moment, S S' = X'X.

    Attributes:
        factor: S, (in, rank), float64.
        how: "cholesky": S is the lower Cholesky factor. "eigenvalues": X'X has no inverse (fewer tokens than features,
            or features that within rounding are combinations of others), and S is D Q diag(sqrt(l)): D the features'
            sizes, Q and l eigenvectors and eigenvalues of inv(D) X'X inv(D) that are above rounding. Nothing is added
            to the diagonal in either case.
    """

    factor: Tensor
    how: Literal["cholesky", "eigenvalues"]

    @property
    def rank(self) -> int:
        """Independent directions of the inputs."""
        return self.factor.shape[1]


def whiten(moment: SecondMoment) -> Whitening:
    """Factor the second moment: by Cholesky where features are independent, else by eigenvalues."""
    matrix = moment.matrix
    sizes = matrix.diagonal().sqrt()
    if moment.samples >= len(matrix):
        lower, failed = torch.linalg.cholesky_ex(matrix)
        # Rounding can let Cholesky pass; what of a feature those before it do not explain then shows it.
        if not failed and bool(
            (lower.diagonal() ** 2 > moment.zero(sizes.new_ones(())) * sizes**2).all()
        ):
            return Whitening(lower, "cholesky")
    # Scaled, so that small features are not taken for rounding of large ones.
    scale = torch.where(sizes > 0, sizes, 1)
    eigenvalues, vectors = torch.linalg.eigh(matrix / torch.outer(scale, scale))
    kept = eigenvalues > moment.zero(eigenvalues[-1])
    return Whitening(scale[:, None] * vectors[:, kept] * eigenvalues[kept].sqrt(), "eigenvalues")


METHODS: tuple[Method, ...] = get_args(Method)
Need = Literal["moment", "magnitude"]
# What each method has to know of the text that a model is calibrated on.
NEEDS: dict[Method, Need | None] = {"plain": None, "activation": "magnitude", "whitened": "moment"}
ALPHA = 0.5  # of activation: that of ASVD's experiments

# X'X has 16 digits, so that its factor S has 8: smaller singular values of W S, next to the largest, are rounding.
_ROUNDING = torch.finfo(torch.float64).eps ** 0.5
_ACCURATE = 1e-6  # such ones of a large matrix have 4 digits: what products lose is squared
LARGE = 1 << 23  # numbers of a matrix; a singular value decomposition takes room for seven times as many
_BLOCK = 1 << 20  # numbers that are converted to float64 at a time


@dataclass(frozen=True)
class Statistics:
    """Calibration of a matrix's inputs, X over all tokens.

    Attributes:
        moment: X'X.
        magnitude: the mean of |x|, (in,).
    """

    moment: SecondMoment | None = None
    magnitude: Tensor | None = None


@dataclass(frozen=True)
class Decomposition:
    """Directions to truncate a matrix by.

    Attributes:
        values: singular values of the weighed matrix, largest first, (min(out, in),), float64.
        left: orthonormal columns, (out, at most min(out, in)), float64, that together span those of the matrix.
        reached: the number of columns that the inputs order; the others follow in the order of the plain ones.
    """

    values: NDArray[np.float64]
    left: Tensor
    reached: int


Decomposer = Callable[[Tensor], Decomposition]


def decomposer(method: Method, statistics: Statistics | None = None, alpha: float = ALPHA) -> Decomposer:
    """Make a function that decomposes the matrices that read these inputs.

    Args:
        alpha: of `activation`: from 0, which is plain, to 1.

    Raises:
        ValueError: if there is no such method.
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}; {did_you_mean(method, METHODS)}")
    own_statistics = statistics or Statistics()
    need = NEEDS[method]
    if need is None:
        return decompose
    given = getattr(own_statistics, need)
    assert given is not None, f"{method} needs the {need} of the inputs"
    if need == "moment":
        return partial(decompose, weighing=whiten(given).factor)
    return partial(decompose, weighing=given.double() ** alpha)


def decompose(matrix: Tensor, weighing: Tensor | None = None) -> Decomposition:
    """Decompose W, or W times what weighs its inputs.

    Where inputs do not reach all of the matrix (fewer tokens than features), the rest follows in the order of its plain
    singular values; at full rank the matrix is whole again, for inputs of every kind.

    Args:
        matrix: W, (out, in).
        weighing: (in, any), or the diagonal of such a matrix, (in,).
    """
    full_rank = min(matrix.shape)
    weighed = matrix
    if weighing is not None:
        weighing = weighing.to(matrix.device)
        if weighing.dim() == 2:
            weighed = matrix.double() @ weighing
        else:
            weighed = matrix.double() * weighing
    left, values = _left_singular(weighed)
    values = values[:full_rank]
    reached = full_rank
    if weighing is not None:
        reached = int((values > _ROUNDING * values[:1]).sum())  # there may be none
    left = left[:, :reached]
    if left.shape[1] < full_rank:
        # Orthonormal columns for the part of the matrix that the others do not span.
        exact = matrix.double()
        more, beyond = _left_singular(exact - left @ (left.T @ exact))
        more = more[:, beyond[: more.shape[1]] > _ROUNDING * torch.linalg.matrix_norm(exact)]
        left = torch.linalg.qr(torch.cat([left, more], dim=1)).Q
    padded = np.zeros(full_rank)
    padded[: len(values)] = values.cpu().numpy()
    return Decomposition(padded, left[:, :full_rank], reached)


def _left_singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute left singular vectors, (out, at most min(out, in)), and all singular values.

    Those of a large matrix are by eigenvectors of W W' or W'W, whichever is smaller; of W'W those that are no rounding.
    """
    if matrix.numel() <= LARGE:
        left, values, _ = torch.linalg.svd(matrix.double(), full_matrices=False)
        return left, values
    tall = len(matrix) > matrix.shape[1]
    lines = matrix if tall else matrix.T
    width = lines.shape[1]
    products = lines.new_zeros(width, width, dtype=torch.float64)
    for _, block in _blocks(lines):
        products.addmm_(block.T, block)
    squares, vectors = torch.linalg.eigh(products)
    del products
    values = squares.flip(0).clamp_min(0).sqrt()
    vectors = vectors.flip(1)
    if not tall:
        return vectors, values
    # The others are orthogonal to them but for rounding, and are found in what these leave of the matrix.
    accurate = int((values > _ACCURATE * values[0]).sum())
    vectors = vectors[:, :accurate] / values[:accurate]
    left = vectors.new_empty(len(lines), accurate)
    for rows, block in _blocks(lines):
        torch.mm(block, vectors, out=left[rows])
    del vectors
    # They are orthonormal but for rounding, and made so where they lie (Cholesky QR).
    products = left.new_zeros(accurate, accurate)
    for _, block in _blocks(left):
        products.addmm_(block.T, block)
    upper = torch.linalg.cholesky(products, upper=True)
    for rows, block in _blocks(left):
        left[rows] = torch.linalg.solve_triangular(upper, block, upper=True, left=False)
    return left, values


def _blocks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield some rows at a time, in float64."""
    count = max(1, _BLOCK // matrix.shape[1])
    for first in range(0, len(matrix), count):
        rows = slice(first, min(first + count, len(matrix)))
        yield rows, matrix[rows].double()


def truncate(matrix: Tensor, left: Tensor, rank: int) -> Tensor:
    """Reduce W to at most this rank: U_r (U_r' W), (out, in), float64.

    Args:
        left: as in `Decomposition`.
    """
    leading = left[:, :rank]
    return leading @ (leading.T @ matrix.to(leading))


def factors_by(matrix: Tensor, left: Tensor, rank: int) -> Factors:
    """Make the two factors of `truncate`, float64, each direction's size divided evenly among them.

    Of plain directions that is equation 1 of DeInfer: U_r diag(sqrt(s_r)) and diag(sqrt(s_r)) V_r'. Zeros fill up a
    rank that the matrix does not have.

    Args:
        left: as in `Decomposition`.
    """
    leading = left[:, :rank]
    kept = leading.new_zeros(leading.shape[1], matrix.shape[1])
    for rows, block in _blocks(matrix):
        kept.addmm_(leading[rows].T, block)
    roots = torch.linalg.vector_norm(kept, dim=1).sqrt()
    first = torch.where(roots > 0, 1 / roots, 0)[:, None] * kept
    factors = Factors(first, leading * roots)
    if leading.shape[1] == rank:
        return factors
    missing = rank - len(factors.first)  # rows and columns of zeros
    pad = torch.nn.functional.pad
    return Factors(pad(factors.first, (0, 0, 0, missing)), pad(factors.second, (0, missing)))


def factorise(
    matrix: Tensor,
    rank: int,
    method: Method = "plain",
    statistics: Statistics | None = None,
    alpha: float = ALPHA,
) -> Factors:
    """Make two factors of this rank, float64, in the place of a matrix, (out, in).

    Args:
        statistics: of the inputs, as `NEEDS` of the method.

    Raises:
        ValueError: if there is no such method, or the rank is not from 1 to the full one.
    """
    if not 1 <= rank <= min(matrix.shape):
        size = " x ".join(map(str, matrix.shape))
        raise ValueError(
            f"the rank of a matrix of {size} must be from 1 to the lesser of these, not {rank}"
        )
    # A clone frees the rest of a large matrix.
    left = decomposer(method, statistics, alpha)(matrix).left[:, :rank].clone()
    return factors_by(matrix, left, rank)


@dataclass
class TruncatedSVD:
    """Makes the plain factors of any matrix; no text is needed.

    Args:
        remembers: whether directions of the layers that were asked for last are kept for other ranks of theirs. The
            model must stay as it is.
        room: bytes that may be taken by directions of other layers, too; those used last are kept.
    """

    remembers: bool = False
    room: int = 0
    kept: dict[tuple[tuple[int, ...], str], Tensor] = field(default_factory=dict, init=False)

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        """Make factors in the matrix's own dtype, but float32 at least.

        Raises:
            ValueError: if the matrix holds numbers that are not finite.
        """
        rank = sublayer.rank(role)
        assert rank is not None
        kept = torch.promote_types(matrix.dtype, torch.float32)
        whole = matrix.whole(kept)  # averages are not rounded in between
        if not whole.isfinite().all():
            raise ValueError(
                f"{role} of {sublayer} holds numbers that are not finite, so that it has no factors"
            )
        if self.remembers:
            key = sublayer.layers, role
            if key in self.kept:
                left = self.kept.pop(key)
            else:
                left = decompose(whole).left
            self.kept[key] = left  # used last
            others = [entry for entry in self.kept if entry[0] != sublayer.layers]
            taken = sum(self.kept[entry].nbytes for entry in others)
            for entry in others:
                if taken > self.room:
                    taken -= self.kept.pop(entry).nbytes
            first, second = factors_by(whole, left, rank)
        else:
            first, second = factorise(whole, rank)
        return Factors(first.to(kept), second.to(kept))


def fit_second_factor(
    matrix: Tensor,
    factors: Factors,
    moment: SecondMoment,
    cross: Tensor | None = None,
    kept: torch.dtype = torch.float64,
) -> Factors:
    """Fit the second factor, so that both best give W's outputs (SVD-LLM, section 3.2, in closed form).

    With Z the inputs that the factors get and X those that W got, it minimises |X W' - Z F' B'| over B, by the least
    change of the given B: it stays as it is where inputs do not reach. They do not where Z F' is small next to
    rounding, of
    the inputs or of the factors: B would answer to rounding there, with numbers that make as much of the next rounding.

    Args:
        matrix: W, (out, in).
        factors: F, (rank, in), and B, (out, rank).
        moment: Z'Z.
        cross: X'Z, (in, in); Z'Z where the inputs are the same.
        kept: the dtype that the factors will be rounded to.
    """
    first = factors.first.double()
    second = factors.second.double()
    gram = moment.matrix.to(first)
    reached = gram @ first.T
    normal = first @ reached
    missing = (
        matrix.to(first) @ (reached if cross is None else cross.to(first) @ first.T) - second @ normal
    )
    # What errors in parts of each input's size make of Z F', and those of each row of F by itself: rounding is so many
    # parts of it, whatever the direction.
    noise = (first * gram.diagonal()) @ first.T
    noise.diagonal().mul_(2)
    sizes = noise.diagonal().sqrt()
    scale = torch.where(sizes > 0, sizes, 1)
    lower = torch.linalg.cholesky(noise / torch.outer(scale, scale) + torch.diag((sizes == 0).to(noise)))
    whitened = torch.linalg.solve_triangular(lower, normal / torch.outer(scale, scale), upper=False)
    whitened = torch.linalg.solve_triangular(lower, whitened.T, upper=False)
    eigenvalues, vectors = torch.linalg.eigh(whitened)
    there = eigenvalues > moment.zero(eigenvalues[-1], 2 * torch.finfo(kept).eps)
    directions = torch.linalg.solve_triangular(lower.T, vectors[:, there], upper=True) / scale[:, None]
    return Factors(first, second + (missing @ directions / eigenvalues[there]) @ directions.T)


def truncation_loss(matrix: Tensor, factors: Factors, moment: SecondMoment) -> float:
    """Return the error of the outputs on X: |X W' - X (B F)'|, the Frobenius norm."""
    rest = matrix.double() - factors.second.double() @ factors.first.double()
    return float((rest @ moment.matrix.to(rest) * rest).sum().clamp_min(0).sqrt())
