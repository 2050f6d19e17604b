"""Normals over a network's weights in blocks: independent weights, a Kronecker product a layer, all of them.

A block is a run of consecutive weights, read as a matrix. A curvature and a prior are precisions of a block,
`Term`; a `Block` is the normal whose precision is the sum of two; `Blocks` is the normal over all weights.

Source: Kronecker factors, Ritter et al. 2018; what is kept of the sum of two is said in `methods/laplace.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Size, Tensor, nn
from torch.distributions import Distribution, constraints


class Product(NamedTuple):
    """The precision left (x) right of a matrix of weights `[rows, columns]`: tr(M^T left M right)."""

    left: Tensor
    right: Tensor

    def partial_traces(self) -> tuple[Tensor, Tensor]:
        """Traces of the precision over the columns `[rows, rows]`, and over the rows `[columns, columns]`."""
        return self.left * self.right.trace(), self.right * self.left.trace()

    def diagonal(self, left: Tensor, right: Tensor) -> Tensor:
        """Diagonal of the precision `[rows, columns]` in the bases given as columns."""
        return torch.outer(((self.left @ left) * left).sum(0), ((self.right @ right) * right).sum(0))

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the precision `[rows * columns]`, none below 0."""
        return torch.outer(*(torch.linalg.eigvalsh(m).clamp(min=0) for m in self)).flatten()


class Rotated(NamedTuple):
    """The precision that is diagonal, `[rows, columns]`, in two bases, or, without them, as it is."""

    precision: Tensor
    bases: tuple[Tensor, Tensor] | None = None

    def partial_traces(self) -> tuple[Tensor, Tensor]:
        """Traces of the precision over the columns `[rows, rows]`, and over the rows `[columns, columns]`."""
        rows, columns = self.precision.sum(1), self.precision.sum(0)
        if self.bases is None:
            return rows.diag(), columns.diag()
        left, right = self.bases
        return (left * rows) @ left.T, (right * columns) @ right.T

    def diagonal(self, left: Tensor, right: Tensor) -> Tensor:
        """Diagonal of the precision `[rows, columns]` in the bases given as columns."""
        if self.bases is not None:
            left, right = self.bases[0].T @ left, self.bases[1].T @ right
        return left.square().T @ self.precision @ right.square()

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the precision `[rows * columns]`, none below 0."""
        return self.precision.flatten()


Term = Product | Rotated


def as_vectors(matrices: Tensor, bias: int) -> Tensor:
    """Matrices `[..., rows, columns]` as vectors; with a bias, their last column comes last."""
    parts = matrices.split([matrices.shape[-1] - bias, bias], -1)
    return torch.cat([part.flatten(-2) for part in parts], -1)


class Block(nn.Module):
    """A zero-mean normal over consecutive weights, seen as a matrix: left (std * z) right^T, z ~ N(0, I).

    A layer is the matrix `[out, in + 1]` of its weight and bias; a full covariance is one row; without bases
    the weights are independent. Before `settle` the standard deviations are 0.

    Args:
        rows: Rows of the matrix.
        columns: Its columns.
        bias: Whether the last column is a bias, which follows the weight in the vector.
        rotated: Whether there are bases.
    """

    std: Tensor
    left: Tensor
    right: Tensor

    def __init__(self, rows: int, columns: int, bias: bool = False, rotated: bool = False) -> None:
        super().__init__()
        self.bias, self.rotated, self.size = int(bias), rotated, rows * columns
        self.register_buffer("std", torch.zeros(rows, columns))
        if rotated:
            self.register_buffer("left", torch.eye(rows))
            self.register_buffer("right", torch.eye(columns))

    def matrix(self, vectors: Tensor) -> Tensor:
        """Vectors `[..., rows * columns]` as matrices."""
        rows, inputs = self.std.shape[0], self.std.shape[1] - self.bias
        weight, bias = vectors.split([rows * inputs, rows * self.bias], -1)
        return torch.cat([weight.unflatten(-1, (rows, inputs)), bias.unflatten(-1, (rows, self.bias))], -1)

    def vector(self, matrices: Tensor) -> Tensor:
        """Matrices `[..., rows, columns]` as vectors."""
        return as_vectors(matrices, self.bias)

    def settle(self, own: Term, prior: Term) -> None:
        """Takes the sum of two precisions, in float64, as its own."""
        if self.rotated:
            traces = zip(own.partial_traces(), prior.partial_traces(), strict=True)
            left, right = (torch.linalg.eigh(a + b)[1] for a, b in traces)
            precision = own.diagonal(left, right) + prior.diagonal(left, right)
            self.left.copy_(left)
            self.right.copy_(right)
        else:
            assert isinstance(own, Rotated)
            assert isinstance(prior, Rotated)
            precision = own.precision + prior.precision
        self.std.copy_(precision.rsqrt())

    def term(self) -> Rotated:
        """Precision of the normal, in float64."""
        bases = (self.left.double(), self.right.double()) if self.rotated else None
        return Rotated(self.std.double().square().reciprocal(), bases)

    def colour(self, noise: Tensor) -> Tensor:
        """Draws `[S, rows * columns]` from as much standard normal noise."""
        draws = self.std * self.matrix(noise)
        return self.vector(self.left @ draws @ self.right.T if self.rotated else draws)

    def variance(self) -> Tensor:
        """Variance of every weight `[rows * columns]`."""
        variance = self.std.square()
        if self.rotated:
            variance = self.left.square() @ variance @ self.right.square().T
        return self.vector(variance)

    def log_prob(self, deviations: Tensor) -> Tensor:
        """Log density at deviations from the mean `[S, rows * columns]`, `[S]`."""
        matrices = self.matrix(deviations)
        if self.rotated:
            matrices = self.left.T @ matrices @ self.right
        constant = self.std.log().sum() + 0.5 * self.size * math.log(2 * math.pi)
        return -0.5 * (matrices / self.std).square().sum((-2, -1)) - constant


class Blocks(Distribution):
    """A normal over all weights, its blocks independent of each other, over the ravelled vector `[d]`.

    Args:
        loc: Mean `[d]`.
        blocks: In the order of the weights.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, loc: Tensor, blocks: Sequence[Block]) -> None:
        self.loc, self.blocks = loc, list(blocks)
        super().__init__(Size(), loc.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of vectors `[S, d]`, `[S]`, in nats."""
        parts = (value - self.loc).split([b.size for b in self.blocks], -1)
        return torch.stack([b.log_prob(part) for b, part in zip(self.blocks, parts, strict=True)]).sum(0)
