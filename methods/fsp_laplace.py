"""FSP-Laplace: a normal at the mode under a Gaussian process prior on the network's function.

Approximates the posterior under a prior on functions: each output of the network is a Gaussian process of
mean 0 and of one kernel k, known at M context points C. The task's prior on weights is not used. The mode w*
minimises the negative log likelihood plus half the sum over the outputs of f(C)^T K^-1 f(C), the squared norm
of the outputs in the kernel's space, with K = k(C, C). At w* the weights are a normal of precision J^T H J +
J_C^T K^-1 J_C, where J and J_C are the outputs' Jacobians at the training inputs and at C, and H is the
likelihood's Hessian in the outputs. Predictions are of the network linearised at w*.

Source: Cinquin, Pfoertner, Fortuin, Hennig and Bamler 2024, "FSP-Laplace: Function-Space Priors for the
Laplace Approximation in Bayesian Deep Learning", NeurIPS, arXiv 2407.13711.
Null space: directions that move no output at C have no precision under the prior. As published, the normal is
on the others alone, which span the rows of J_C; along the rest the weights stay at w*.
Deviations: the context points are drawn once, before training, and serve loss and covariance; there the loss
draws new ones at every step. There K^-1 is a truncated Lanczos approximation, and columns of the covariance
are dropped until no variance at C is above the prior's. Here K has a nugget of 1e-4 of the variance and is
inverted exactly, and decompositions are in float64; no variance at C is above the prior's then. Kernels and
their numbers are settings, none is fitted to the data. Distances are divided by the square root of the number
of inputs, so that one length scale serves inputs of any size.
Cost: as maximum a posteriori, with a pass over the M context points at every step; after the fit a Jacobian
per example and per context point, O((M C)^2 d) time for C outputs and d weights; M C d numbers are stored.
Valid for: every twice differentiable network of floating-point inputs whose outputs are a vector. Parameters
of a likelihood are point estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import optimizers
from bench.batches import few
from bench.contract import Batch, Method, Noise, Problem, Stored
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families import curvature
from bench.settings import Count, Positive, settings
from bench.weights import forward, linearised, ravel, unravel

NAMES: dict[str, dict[str, object]] = {"fsp_laplace": {}}
PRESETS = {"smoke": {"context_points": 10}}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "lengthscale": (0.1, 10.0, "log"),
    "kernel": ["rbf", "matern12", "matern32", "matern52"],
}

Kernel = Literal["rbf", "matern12", "matern32", "matern52"]

LARGEST = 100_000_000
"""Floats of the Jacobian at the context points, at most: 0.8 GB in float64, of which a few are held."""
_LOOKED_AT = 1000
"""Training inputs on disk, at most, that context points are made of."""
_NUGGET = 1e-4
"""What is added to the kernel matrix's diagonal, as a share of the variance."""
_MARGIN = 0.25
"""Share of its side by which the box of the inputs is widened, at either end."""


@settings
class Settings:
    """Settings of FSP-Laplace."""

    kernel: Kernel = "rbf"
    """Of every output: rbf, or Matern of smoothness 1/2, 3/2 or 5/2."""
    lengthscale: Positive = 1.0
    """Of the kernel, above 0, in units of sqrt(D) for inputs of D numbers."""
    variance: Positive = 1.0
    """Prior variance of every output, above 0."""
    context: Literal["box", "train"] = "box"
    """Where context points lie: uniform in the box of the training inputs, a quarter wider at either end, or
    training inputs."""
    context_points: Count = 100
    """M, at least 1."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class FSPLaplace(Method):
    """A normal at the mode, on the span of the prior; before `finish_fit` a point mass."""

    settings_class = Settings
    approximates = "the posterior under a Gaussian process prior on functions, by a normal at its mode"
    declares = "none"
    provides = frozenset({"weight_samples", "moments", "weighted", "loss_terms"})
    validation_samples = 1
    settings: Settings
    points: Tensor  # [M, ...], the context points
    whiten: Tensor  # [M, M], L^-1 of the kernel matrix L L^T
    root: Tensor  # [d, r], S of the covariance S S^T

    def __init__(self, problem: Problem, settings: Settings, start: FSPLaplace | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the mode
        self._check_network()
        points = self._draw_context()
        matrix = gram(settings.kernel, points, points, settings.lengthscale)
        matrix.diagonal().add_(_NUGGET)
        factor = torch.linalg.cholesky(settings.variance * matrix)
        whiten = torch.linalg.solve_triangular(factor, torch.eye(len(points)).double(), upper=False)
        self.register_buffer("points", points)
        self.register_buffer("whiten", whiten.float())
        size, outputs = sum(p.numel() for p in self.network.parameters()), self._count_outputs()
        rows = len(points) * outputs
        if rows * size > LARGEST:
            raise UsageError(
                f"fsp_laplace: {len(points)} context points of {outputs} outputs by {size} weights are "
                f"{rows * size:.1e} numbers; the limit is {LARGEST:.0e}, take at most "
                f"{LARGEST // (outputs * size)} context points, or a smaller network"
            )
        self.register_buffer("root", torch.zeros(size, min(rows, size)))
        if start is not None:
            self.load_state_dict(start.state_dict())

    def _check_network(self) -> None:
        """Refuses a network that cannot be linearised, or of other inputs."""
        examples = few(self.problem.train)
        if not examples.is_floating_point():
            raise UsageError("fsp_laplace: a kernel needs inputs that are numbers with a distance")
        curvature.must_linearise("fsp_laplace", self.network, examples)

    def _count_outputs(self) -> int:
        with torch.no_grad():
            outputs = self.network(few(self.problem.train))
        if outputs.ndim != 2:
            raise UsageError("fsp_laplace: the network's outputs must be a vector for every example")
        return outputs.shape[1]

    def _draw_context(self) -> Tensor:
        """Context points `[M, ...]`, or as many as there are training inputs."""
        inputs, count = _inputs(self.problem.train), self.settings.context_points
        if self.settings.context == "train":
            return inputs[torch.randperm(len(inputs), generator=self.generator)[:count]]
        low, high = inputs.amin(0), inputs.amax(0)
        low, high = low - _MARGIN * (high - low), high + _MARGIN * (high - low)
        return low + (high - low) * torch.rand(count, *low.shape, generator=self.generator)

    # ---- training

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood, and half the squared norm of the outputs under the kernel, in nats."""
        weights = {name: p[None] for name, p in self.network.named_parameters()}
        outputs = forward(self.network, weights, batch.inputs)
        at_context = forward(self.network, weights, self.points)[0]  # [M, C]
        prior_term = 0.5 * (self.whiten @ at_context).square().sum()
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), prior_term

    # ---- after training

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """The covariance on the span of J_C: S S^T, the inverse there of the sum of both precisions."""
        basis, precisions = self._prior_span()
        own = torch.zeros(len(precisions), len(precisions)).to(basis)
        count = 0
        for batch in loader:
            for piece in curvature.pieces(batch):
                count += len(piece.inputs)
                for rows in self._rows(piece):
                    rows = rows.double() @ basis
                    own += rows.T @ rows
        whole = precisions.diag() + own * (self.problem.num_train / count)
        values, vectors = torch.linalg.eigh(whole)
        self.root.zero_()
        self.root[:, : len(values)] = basis @ (vectors * values.rsqrt())

    def _prior_span(self) -> tuple[Tensor, Tensor]:
        """An orthonormal basis `[d, r]` of the rows of L^-1 J_C, and the prior's precisions `[r]`."""
        with torch.no_grad():
            like = self.network(self.points[:1])
        eye = torch.eye(like.shape[1]).to(like).expand(len(self.points), -1, -1)
        names = [name for name, _ in self.network.named_parameters()]
        chunk = max(1, curvature.LARGEST // (like.shape[1] * len(self.root)))
        parts = zip(self.points.split(chunk), eye.split(chunk), strict=True)
        jacobian = torch.cat([curvature.jacobians(self.network, names, *part) for part in parts])
        rows = torch.einsum("nm,mcd->ncd", self.whiten.double(), jacobian.double()).flatten(0, 1)
        _, lengths, basis = torch.linalg.svd(rows, full_matrices=False)
        kept = lengths > 1e-6 * lengths.max().clamp(min=1e-30)
        return basis[kept].T, lengths[kept].square()

    def _rows(self, piece: Batch) -> Iterator[Tensor]:
        """Rows `[N, d]` whose outer products add up to the Gauss-Newton matrix, in chunks."""
        with torch.no_grad():
            at_mode = self.network(piece.inputs)
        roots = curvature.output_roots(self.likelihood, at_mode, piece)
        names = [name for name, _ in self.network.named_parameters()]
        chunk = max(1, curvature.LARGEST // (at_mode.shape[1] * len(self.root)))
        for examples, some in zip(piece.inputs.split(chunk), roots.split(chunk), strict=True):
            yield curvature.jacobians(self.network, names, examples, some).flatten(0, 1)

    # ---- the distribution

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the normal, stacked `[S, *shape]`; the s-th does not depend on how many follow it."""
        with torch.no_grad():
            like = dict(self.network.named_parameters())
            mode = ravel({name: p[None] for name, p in like.items()})
            empty = mode.new_empty(self.root.shape[1])
            noise = torch.stack([empty.normal_(generator=generator).clone() for _ in range(num_samples)])
            return unravel(mode + noise @ self.root.T, like)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight."""
        like = {name: p.detach() for name, p in self.network.named_parameters()}
        variances = unravel(self.root.square().sum(1)[None], like)
        return like, {name: v[0] for name, v in variances.items()}

    def outputs(self, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Of the network linearised at the mode."""
        return linearised(self.network, weights, inputs)


def _inputs(train: TensorDataset | Stored) -> Tensor:
    """Training inputs of a weight above 0 `[N, ...]`; of more on disk, `_LOOKED_AT` at even distances."""
    if isinstance(train, TensorDataset):
        inputs, _, *weights = train.tensors
        counts = weights[0] > 0 if weights else torch.ones(len(inputs)).bool()
        return inputs[counts] if counts.any() else inputs
    rows = torch.linspace(0, len(train) - 1, min(len(train), _LOOKED_AT)).long()
    return torch.stack([train[row][0] for row in rows.tolist()])


def gram(kernel: Kernel, a: Tensor, b: Tensor, lengthscale: float) -> Tensor:
    """Correlations `[A, B]` of a function at inputs `[A, ...]` and `[B, ...]`, in float64.

    Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", equations 4.9, 4.14 and 4.17.
    """
    a, b = a.flatten(1).double(), b.flatten(1).double()
    distance = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    distance = distance / (lengthscale * math.sqrt(a.shape[1]))
    if kernel == "rbf":
        return torch.exp(-0.5 * distance.square())
    if kernel == "matern12":
        return torch.exp(-distance)
    if kernel == "matern32":
        return (1 + math.sqrt(3) * distance) * torch.exp(-math.sqrt(3) * distance)
    return (1 + math.sqrt(5) * distance + 5 / 3 * distance.square()) * torch.exp(-math.sqrt(5) * distance)
