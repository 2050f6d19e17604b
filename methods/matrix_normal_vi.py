"""Matrix-normal variational inference: correlated rows and correlated columns of every weight matrix.

Approximates the posterior, tensor by tensor, by W ~ MN(M, U, V), that is vec W ~ N(vec M, V (x) U), which
maximises the evidence lower bound E_q[log p(D | w)] - KL(q || prior). U = A A^T and V = B B^T by lower
triangular factors with softplus on their diagonals, in units of which the rest of each row is. The kernel of
a convolution is the matrix of its output channels by the rest; a tensor of fewer than two dimensions (a bias,
a gain) has independent normals.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 3.3; Louizos and
Welling 2016 (whose U and V are diagonal).
Deviations: U and V are full. They are determined up to a factor, (c U, V / c) being the same distribution;
both start with half of the logarithm of the initial variance, and nothing fixes the factor later, because
neither draws nor KL depend on it.
Cost: O(S m n (m + n)) a step for a matrix of m x n and S forward and backward passes; mn + m^2 + n^2 stored
numbers, of which (m^2 + n^2 - m - n)/2 stay zero.
Valid for: every differentiable network and likelihood, up to 5,000 rows or columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.distributions import Distribution, Independent, constraints, register_kl
from torch.linalg import solve_triangular
from torch.nn.functional import softplus

from bench import optimizers, priors
from bench.contract import Batch, Noise, Prior, Problem
from bench.divergence import cross_entropy, weight_divergence
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families.variational import Variational
from bench.priors import normal_tensor
from bench.settings import Count, Positive, settings
from bench.weights import forward, reparametrise

NAMES: dict[str, dict[str, object]] = {"matrix_normal_vi": {}}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "initial_rho": (-9.0, -1.0, "linear"),
    "train_samples": [1, 4, 16],
}

LOG_TWO_PI = math.log(2 * math.pi)


class MatrixNormal(Distribution):
    """W = loc + A E B^T with standard normal E: the whole tensor is one event.

    Args:
        loc: Mean `[*shape]` of two or more dimensions; as a matrix m x n, m = shape[0].
        row_tril: A, lower factor of the covariance U of the rows, `[m, m]`.
        column_tril: B, lower factor of the covariance V of the columns, `[n, n]`.
        validate_args: As in every torch distribution.
    """

    arg_constraints = {
        "loc": constraints.real,
        "row_tril": constraints.lower_cholesky,
        "column_tril": constraints.lower_cholesky,
    }
    has_rsample = True

    def __init__(
        self, loc: Tensor, row_tril: Tensor, column_tril: Tensor, validate_args: bool | None = None
    ) -> None:
        self.loc, self.row_tril, self.column_tril = loc, row_tril, column_tril
        super().__init__(Size(), loc.shape, validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """Every real tensor of the event's shape."""
        return constraints.independent(constraints.real, self.loc.ndim)

    @property
    def mean(self) -> Tensor:
        """Mean of every weight."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Variance of every weight, U_ii V_jj."""
        rows, columns = (f.square().sum(1) for f in (self.row_tril, self.column_tril))
        return torch.outer(rows, columns).view_as(self.loc)

    def expand(self, batch_shape: Any, _instance: Distribution | None = None) -> MatrixNormal:
        """Only the empty batch shape is possible: the whole tensor is one event."""
        if Size(batch_shape) != Size():
            raise ValueError("MatrixNormal has no batch dimensions: its whole tensor is one event")
        return self

    def transform(self, noise: Tensor) -> Tensor:
        """Draws loc + A noise B^T, `[*sample_shape, *shape]`, from noise of that shape."""
        matrices = noise.flatten(1 - self.loc.ndim)
        return self.loc + (self.row_tril @ matrices @ self.column_tril.mT).reshape(noise.shape)

    def whiten(self, difference: Tensor) -> Tensor:
        """A^-1 difference B^-T, `[*sample_shape, m, n]`: `transform` undone, but for the mean."""
        matrices = difference.flatten(1 - self.loc.ndim)
        rows = solve_triangular(self.row_tril, matrices, upper=False)
        return solve_triangular(self.column_tril.mT, rows, upper=True, left=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Reparametrised draws `[*sample_shape, *shape]`."""
        return self.transform(torch.randn(self._extended_shape(sample_shape)).to(self.loc))

    @property
    def half_log_det(self) -> Tensor:
        """Half of log det (V (x) U): n log det A + m log det B."""
        rows, columns = (f.diagonal().log().sum() for f in (self.row_tril, self.column_tril))
        return len(self.column_tril) * rows + len(self.row_tril) * columns

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, `[*sample_shape]`, in nats."""
        if self._validate_args:
            self._validate_sample(value)
        squares = self.whiten(value - self.loc).square().sum((-2, -1))
        return -0.5 * (squares + self.loc.numel() * LOG_TWO_PI) - self.half_log_det

    def entropy(self) -> Tensor:
        """Entropy, a scalar, in nats."""
        return 0.5 * self.loc.numel() * (1 + LOG_TWO_PI) + self.half_log_det


@register_kl(MatrixNormal, Independent)
def _kl_matrix_independent(q: MatrixNormal, p: Independent) -> Tensor:
    return cross_entropy(q, p) - q.entropy()


@register_kl(MatrixNormal, MatrixNormal)
def _kl_matrix_matrix(q: MatrixNormal, p: MatrixNormal) -> Tensor:
    """The trace of a Kronecker product is the product of the traces."""
    if p.event_shape != q.event_shape:
        raise NotImplementedError
    rows = solve_triangular(p.row_tril, q.row_tril, upper=False).square().sum()
    columns = solve_triangular(p.column_tril, q.column_tril, upper=False).square().sum()
    squares = p.whiten(q.loc - p.loc).square().sum()
    return 0.5 * (rows * columns + squares - q.loc.numel()) + p.half_log_det - q.half_log_det


# ------------------------------------------------------------------------------------------- the method


@settings
class Settings:
    """Settings of matrix-normal variational inference."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    train_samples: Count = 1
    """Weight samples per training step, at least 1."""
    initial_rho: float = -3.0
    """Every weight starts at the standard deviation softplus(initial_rho), uncorrelated."""


class MatrixNormalVI(Variational):
    """A matrix normal over every weight tensor."""

    settings_class = Settings
    approximates = "the posterior by a normal with covariance V (x) U per weight matrix"
    declares = "optimum of KL among normals", {"learning_rate": 0.01, "train_samples": 8}
    provides = frozenset({"weight_samples", "density", "moments", "sequential", "weighted", "loss_terms"})
    settings: Settings
    stacks = True
    LARGEST = 5_000
    """Rows or columns of a matrix above which a problem is refused."""

    def __init__(self, problem: Problem, settings: Settings, start: MatrixNormalVI | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the means
        for rows, columns in filter(None, map(_sides, self.network.parameters())):
            if max(rows, columns) > self.LARGEST:
                gigabytes = 16e-9 * (rows**2 + columns**2)
                raise UsageError(
                    f"matrix_normal_vi needs {gigabytes:,.1f} GB for the factors of a matrix of {rows:,} x "
                    f"{columns:,} weights (with their gradients and two moments of Adam) and takes at most "
                    f"{self.LARGEST:,} rows or columns: take narrower layers"
                )
        # Per tensor: raw A and raw B of a matrix, or the rhos of anything else.
        self.factors = nn.ModuleList(
            nn.ParameterList(
                [p.new_full((n,), _root(settings.initial_rho)).diag() for n in _sides(p)]
                or [torch.full_like(p, settings.initial_rho)]
            )
            for p in self.network.parameters()
        )
        if start is not None:
            self.load_state_dict(start.state_dict())

    @classmethod
    def parameters_per_weight(cls, settings: Any) -> None:
        """None: the factors go by rows and columns, not by weights."""

    # ---- the distribution

    def _tensors(self) -> dict[str, tuple[Tensor, ...]]:
        """Mean, A and B of a matrix, mean and scale of anything else."""
        parts: Any = zip(self.network.named_parameters(), self.factors, strict=True)
        return {name: (m, *(_positive(f, m.ndim > 1) for f in factors)) for (name, m), factors in parts}

    def posterior(self) -> dict[str, MatrixNormal | Independent]:
        """Matrix normals, and independent normals for what is no matrix, with gradients."""
        return {name: _make(*tensors) for name, tensors in self._tensors().items()}

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the posterior, stacked `[S, *shape]`."""
        with torch.no_grad():
            noise = self.draw_noise(num_samples, generator)
            return {name: _transform(q, noise[name]) for name, q in self.posterior().items()}

    def as_prior(self) -> Prior:
        """The distributions as they are now."""
        return priors.frozen(self._tensors(), _make)

    # ---- loss

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Expected negative log likelihood and KL(q || prior), in nats."""
        posterior = self.posterior()
        weights = {name: _transform(q, noise[name]) for name, q in posterior.items()}
        outputs = forward(self.network, weights, batch.inputs)
        nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
        return nll, weight_divergence(posterior, self.prior, weights)


def _sides(tensor: Tensor) -> tuple[int, ...]:
    """Rows and columns of a tensor as a matrix; none if it has fewer than two dimensions."""
    return (len(tensor), tensor[0].numel()) if tensor.ndim > 1 else ()


def _root(rho: float) -> float:
    """The number whose softplus is the square root of softplus(rho)."""
    return math.log(math.expm1(math.sqrt(softplus(torch.tensor(rho, dtype=torch.float64)).item())))


def _positive(raw: Tensor, is_factor: bool) -> Tensor:
    """Scales, or a lower factor whose row i is in units of its diagonal entry, that is softplus(raw_ii)."""
    if not is_factor:
        return softplus(raw)
    scale = softplus(raw.diagonal())
    return scale[:, None] * raw.tril(-1) + scale.diag()


def _make(mean: Tensor, *scales: Tensor) -> MatrixNormal | Independent:
    return (
        MatrixNormal(mean, *scales, validate_args=False) if len(scales) == 2 else normal_tensor(mean, *scales)
    )


def _transform(q: MatrixNormal | Independent, noise: Tensor) -> Tensor:
    if isinstance(q, MatrixNormal):
        return q.transform(noise)
    return reparametrise(q.mean, q.base_dist.scale, noise)
