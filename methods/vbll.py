"""Variational Bayesian last layer: point features, and a normal over the weights that read them.

Approximates the posterior by a point mass for all weights before the last linear layer, and for each output k
of that layer N(m_k, S_k) over its weights and its bias. All of it maximises one lower bound on the evidence,
in closed form: no draws in training, and one forward pass a step.

Of the features f (a 1 among them for the bias) the output z_k is normal with mean m_k^T f and variance
v_k = f^T S_k f. The expected log likelihood is, under normal noise, log N(y | m, sigma^2) - v / (2 sigma^2),
which is exact; of classes at least m_y - logsumexp_k(m_k + v_k / 2), by Jensen's inequality; of two classes
by one score at least -softplus(v / 2 - m) for class 1, with the sign of m turned for class 0, likewise.

Source: Harrison, Willes and Snoek 2024, "Variational Bayesian Last Layers", theorems 1 (regression) and 2
(discriminative classification).
Deviations: two classes by one score are not in the source. The prior is the task's, on the features too, in
place of weight decay there and a scaled one on the last layer. Parameters of a likelihood have no prior: the
source puts an inverse Wishart on the noise. Class scores have no noise of their own. Predictions are draws of
the last layer, not their marginal. Several outputs of a regression have independent noise, so that each v_k
is divided by its own sigma_k^2.
Cost: as maximum a posteriori, and K P^2 per example and as many trained numbers for K outputs of P features
(diagonal: K P).
Valid for: networks whose outputs are those of a linear layer; Gaussian, Categorical and Bernoulli
likelihoods; priors of independent normals on that layer.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench import optimizers
from bench.contract import Batch, Likelihood, Method, Noise, Problem
from bench.divergence import log_prob
from bench.energy import full_nll
from bench.errors import UsageError
from bench.families import last_layer
from bench.likelihoods import Bernoulli, Categorical, Gaussian
from bench.priors import is_normal
from bench.settings import Positive, settings

NAMES: dict[str, dict[str, object]] = {"vbll": {}}
SEARCH = {"learning_rate": (1e-4, 1e-1, "log"), "initial_rho": (-6.0, -1.0, "linear")}


@settings
class Settings:
    """Settings of variational Bayesian last layers."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    covariance: Literal["dense", "diagonal"] = "dense"
    """Over the weights of one output: all of it, or its diagonal. Outputs are independent."""
    initial_rho: float = -3.0
    """Start of rho for every weight; correlations start at 0, standard deviations at softplus(rho)."""


class VBLL(Method):
    """A normal over the last layer, point estimates before it."""

    settings_class = Settings
    approximates = "the posterior by a normal over the last layer, a point mass before it"
    declares = "exact", {"learning_rate": 0.05}
    provides = frozenset({"weight_samples", "moments", "weighted", "loss_terms", "exact_when_linear"})
    stacks = True
    settings: Settings
    LARGEST = 50_000_000
    """Numbers of the covariances' factors above which a problem is refused: 0.8 GB with Adam's."""

    def __init__(self, problem: Problem, settings: Settings, start: VBLL | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the means, and the features' weights
        self.last = self._last()
        self.own = last_layer.names_of(self.network, self.last)
        if type(self.likelihood) not in (Gaussian, Categorical, Bernoulli):
            raise UsageError("vbll: needs a Gaussian, a Categorical or a Bernoulli likelihood")
        if not all(name in self.prior and is_normal(self.prior[name]) for name in self.own):
            raise UsageError("vbll: the prior of the last layer must be independent normals")
        rows, columns = self._mean.shape
        shape = [rows, columns, columns]
        if settings.covariance == "diagonal":
            shape.pop()
        elif (numbers := math.prod(shape)) > self.LARGEST:
            raise UsageError(
                f"vbll: {rows:,} covariances of {columns:,} weights take {16e-9 * numbers:,.1f} GB; "
                "take --method.covariance diagonal"
            )
        rho = self._mean.new_full((rows, columns), settings.initial_rho)
        self.rho = nn.Parameter(rho if settings.covariance == "diagonal" else rho.diag_embed())
        if start is not None:
            self.load_state_dict(start.state_dict())

    def _last(self) -> str:
        """Path of the layer whose outputs are the network's."""
        path, example = last_layer.last_linear(self.network), self.problem.train[0][0][None]
        if path is None or not last_layer.is_final(self.network, path, example):
            raise UsageError(
                "vbll: needs a network whose outputs are those of one linear layer, all of whose weights are "
                "free and used there alone"
            )
        return path

    @classmethod
    def parameters_per_weight(cls, settings: Settings) -> None:
        """None: the last layer alone has a covariance."""

    # ---- the distribution: K rows of P weights, the bias last

    def _rows(self, weights: dict[str, Tensor]) -> Tensor:
        """The last layer's tensors as `[..., K, P]`."""
        weight, *bias = (weights[name] for name in self.own)
        return torch.cat([weight, *(b[..., None] for b in bias)], -1)

    def _tensors(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows `[..., K, P]` as the last layer's tensors."""
        if len(self.own) == 1:
            return {self.own[0]: rows}
        return dict(zip(self.own, (rows[..., :-1], rows[..., -1]), strict=True))

    @property
    def _mean(self) -> Tensor:
        return self._rows(dict(self.network.named_parameters()))

    @property
    def factors(self) -> Tensor:
        """Lower factors L of the covariances L L^T, `[K, P, P]`; standard deviations `[K, P]` if diagonal.

        The diagonal is softplus(rho_ii), the rest of row i in units of that entry.
        """
        if self.settings.covariance == "diagonal":
            return functional.softplus(self.rho)
        scale = functional.softplus(self.rho.diagonal(dim1=-2, dim2=-1))
        return scale[..., None] * self.rho.tril(-1) + scale.diag_embed()

    def _variance(self, factors: Tensor) -> Tensor:
        """Variance of every weight, `[K, P]`."""
        return factors.square() if self.settings.covariance == "diagonal" else factors.square().sum(-1)

    def output_variance(self, features: Tensor) -> Tensor:
        """f^T S_k f, `[B, K]`, of features `[B, P]`, a 1 among them if there is a bias."""
        if self.settings.covariance == "diagonal":
            return features.square() @ self.factors.square().mT
        return torch.einsum("bp,kpq->bkq", features, self.factors).square().sum(-1)

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws of the last layer among point estimates, stacked `[S, *shape]`."""
        with torch.no_grad():
            mean, factors = self._mean, self.factors
            noise = torch.randn(
                num_samples, *mean.shape, generator=generator, device=mean.device, dtype=mean.dtype
            )
            if self.settings.covariance == "diagonal":
                rows = mean + factors * noise
            else:
                rows = mean + torch.einsum("kpq,skq->skp", factors, noise)
            points = {n: p.detach().expand(num_samples, *p.shape) for n, p in self.network.named_parameters()}
            return points | self._tensors(rows)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight; a variance of 0 before the last layer."""
        means = {name: p.detach() for name, p in self.network.named_parameters()}
        variances = {name: torch.zeros_like(m) for name, m in means.items()}
        return means, variances | self._tensors(self._variance(self.factors.detach()))

    # ---- the bound

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Bound on the expected negative log likelihood; KL(q || prior) less log prior of the features."""
        features, means = last_layer.features(self.network, self.last, batch.inputs)
        if len(self.own) == 2:
            features = torch.cat([features, features.new_ones(len(features), 1)], 1)
        expected = expected_log_prob(self.likelihood, means, self.output_variance(features), batch.targets)
        points = {n: p[None] for n, p in self.network.named_parameters() if n not in self.own}
        prior_term = self._divergence()
        if points:
            prior_term = prior_term - log_prob({n: self.prior[n] for n in points}, points).sum()
        return full_nll(expected, batch, self.problem.num_train), prior_term

    def _divergence(self) -> Tensor:
        """KL of the last layer's normals to the prior's, in nats."""
        loc = self._rows({name: self.prior[name].mean for name in self.own})
        scale = self._rows({name: self.prior[name].stddev for name in self.own})
        factors = self.factors
        own = factors if self.settings.covariance == "diagonal" else factors.diagonal(dim1=-2, dim2=-1)
        squares = ((self._mean - loc).square() + self._variance(factors)) / scale.square()
        return (0.5 * squares + scale.log() - own.log() - 0.5).sum()


def expected_log_prob(likelihood: Likelihood, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """At most E log p(y | z), `[B]`, in nats, of normal outputs z with these moments `[B, K]`.

    Of a Gaussian it is exact, of classes Jensen's bound.
    """
    if isinstance(likelihood, Gaussian):
        sigma = targets[..., 1] if likelihood.per_example else likelihood.log_sigma.exp()
        trace = 0.5 * (variance / sigma.square()).sum(-1)
        return likelihood.log_prob(mean[None], targets).squeeze(0) - trace
    if isinstance(likelihood, Bernoulli):
        signed = torch.where(targets.bool(), mean[:, 0], -mean[:, 0])
        return -functional.softplus(0.5 * variance[:, 0] - signed)
    score = mean.gather(1, targets[:, None]).squeeze(1)
    return score - (mean + 0.5 * variance).logsumexp(1)
