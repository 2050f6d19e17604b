"""Conjugate Bayesian linear regression: the exact posterior of a network that is linear in its weights.

Approximates nothing: under normal noise of known size and a normal prior the posterior is normal, and its
mean, covariance and evidence are in closed form. It is the truth that other methods are held against.

Source: any textbook (Bishop 2006, section 3.3); Farquhar 2022, thesis "Understanding Approximation"
(docs/sources.md), appendix C.1 (the linear model of its studies).
Deviations: none.
Cost: one pass over the data and O(d^3) once for d weights; d + d^2 stored numbers. No training. R weightings
of the examples give R posteriors, of R times the numbers, in one pass that holds R times the batch.
Valid for: networks whose only weights are those of one linear layer at the end (fixed features may come
before it), Gaussian likelihoods of known sigma, one for all or one per example, and priors that are
independent normals or one normal over all weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from bench import priors
from bench.contract import JOINT, Batch, Method, Prediction, Prior, Problem, WeightDistribution
from bench.errors import UsageError
from bench.likelihoods import Gaussian
from bench.networks import Dropout
from bench.priors import joined_normals
from bench.settings import settings
from bench.weights import ravel, sampled_outputs, unravel

NAMES: dict[str, dict[str, object]] = {"linear": {}}


@settings
class Settings:
    """Settings of conjugate linear regression: there are none."""


class Linear(Method):
    """The exact normal posterior of linear regression."""

    settings_class = Settings
    approximates = "nothing: the exact posterior of a model that is linear in its weights"
    declares = "exact"
    provides = frozenset(
        {
            *("weight_samples", "density", "moments", "sequential", "weighted", "reweighted"),
            "exact_when_linear",
        }
    )
    trains = False
    seed_matters = False
    settings: Settings
    mean: Tensor
    scale_tril: Tensor
    evidence: Tensor
    LARGEST = 5_000
    """Weights above which a problem is refused."""

    def __init__(self, problem: Problem, settings: Settings, start: Linear | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()
        _last_layer(self.network)
        if not isinstance(self.likelihood, Gaussian) or list(self.likelihood.parameters()):
            raise UsageError("linear needs a Gaussian likelihood of known sigma")
        size = sum(p.numel() for p in self.network.parameters())
        if size > self.LARGEST:
            raise UsageError(f"linear needs a network of at most {self.LARGEST:,} weights, not {size:,}")
        # Without data the posterior is the prior, and the evidence is 1.
        mean, scale_tril = _joint_normal(self.prior)
        fits = _weightings(problem)  # (R,) if examples have R weights, else ()
        self.register_buffer(
            "mean", mean.expand(*fits, -1).clone()
        )  # [..., d], in the order of bench.weights.ravel
        self.register_buffer(
            "scale_tril", scale_tril.expand(*fits, -1, -1).clone()
        )  # [..., d, d], of the covariance
        self.register_buffer("evidence", torch.zeros(fits, dtype=torch.float64))

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """One pass over the data: posterior and evidence from sufficient statistics in float64."""
        features, layer = _last_layer(self.network)
        mean, scale_tril = (t.to(self.device) for t in _joint_normal(self.prior))
        inputs, outputs = layer.in_features, layer.out_features
        # Row k holds the places of output k's weights, and of its bias, in the ravelled vector.
        place = torch.arange(inputs * outputs, device=self.device).view(outputs, inputs)
        if layer.bias is not None:
            biases = inputs * outputs + torch.arange(outputs, device=self.device)
            place = torch.cat([place, biases[:, None]], 1)  # [K, P]

        # Of w - prior mean: precision and slope of the log likelihood at 0, and its value there; each
        # [..., *shape] with one axis more if examples have R weights.
        precision, slope = torch.zeros_like(self.scale_tril), torch.zeros_like(self.mean)
        value = torch.zeros_like(self.evidence)
        for batch in loader:
            design, targets, sigma, weights = self._in_double(features, batch, layer.bias is not None)
            residuals = targets - design @ mean[place].mT  # [B, K]
            per_noise = weights / sigma.square()  # [..., B, K]
            blocks = [design.mT @ (p[..., None] * design) for p in per_noise.unbind(-1)]  # K of [..., P, P]
            precision[..., place[:, :, None], place[:, None, :]] += torch.stack(blocks, -3)
            slope[..., place] += (per_noise * residuals).mT @ design
            log_scale = 0.5 * math.log(2 * math.pi) + sigma.log()
            value -= (weights * log_scale + 0.5 * per_noise * residuals.square()).sum((-2, -1))

        # In units of the prior, w = mean + scale_tril u, the posterior precision is at least the identity.
        whitened = torch.eye(len(mean), dtype=mean.dtype, device=self.device)
        whitened = whitened + scale_tril.mT @ precision @ scale_tril
        factor = MultivariateNormal(
            torch.zeros_like(mean), precision_matrix=whitened, validate_args=False
        ).scale_tril
        scale_tril = scale_tril @ factor
        shift = (scale_tril @ (scale_tril.mT @ slope[..., None])).squeeze(-1)
        self.mean.copy_(mean + shift)
        self.scale_tril.copy_(scale_tril)
        log_volume = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        self.evidence.copy_(value + 0.5 * (slope * shift).sum(-1) + log_volume)

    def _in_double(
        self, features: nn.Module, batch: Batch, bias: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Design `[B, P]`, targets and sigmas `[B, K]`, example weights `[..., B, K]`."""
        with torch.no_grad():
            design = features(batch.inputs.to(self.device)).double()
        targets = batch.targets.to(self.device).double()
        if bias:
            design = torch.cat([design, design.new_ones(len(design), 1)], 1)
        assert isinstance(self.likelihood, Gaussian)
        if self.likelihood.per_example:
            targets, sigma = targets.unbind(-1)
        else:
            sigma = self.likelihood.log_sigma.double().exp().expand_as(targets)
        weights = targets.new_ones(len(targets)) if batch.weights is None else batch.weights.to(targets)
        weights = weights.movedim(0, -1)[..., None]  # [..., B, 1]
        return design, targets, sigma, weights.expand(*weights.shape[:-1], targets.shape[1])

    def log_evidence(self) -> float:
        """Log marginal likelihood of the training targets, log E_prior[p(D | w)], in nats.

        Example weights stand in the exponents, log E_prior[prod_b p(y_b | x_b, w)^weight_b]: for whole
        weights the evidence of the examples repeated so often, for others no density of any targets.
        """
        return self.evidence.item()

    # ---- the distribution

    def posterior(self) -> WeightDistribution:
        """The normal over all weights, in float64."""
        return {JOINT: _normal(self.mean, self.scale_tril)}

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the posterior, stacked `[S, *shape]`; of R ones `[S * R, *shape]`, by equal noise."""
        kind: dict[str, Any] = {"device": self.mean.device, "dtype": self.mean.dtype}
        noise = torch.randn(num_samples, self.mean.shape[-1], generator=generator, **kind)
        draws = self.mean[..., None, :] + noise @ self.scale_tril.mT  # [..., S, d]
        return self._unravel(draws.movedim(-2, 0).reshape(-1, self.mean.shape[-1]))

    def _unravel(self, vectors: Tensor) -> dict[str, Tensor]:
        """Weights `[S, *shape]`, in the precision of the network, from vectors `[S, d]`."""
        parameters = dict(self.network.named_parameters())
        return {n: w.to(parameters[n].dtype) for n, w in unravel(vectors, parameters).items()}

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Log density of stacked weights, `[S]`, in nats."""
        return self.posterior()[JOINT].log_prob(ravel(weights).to(self.mean.dtype))

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight."""
        both = self._unravel(torch.stack([self.mean, self.scale_tril.square().sum(1)]))
        return {n: w[0] for n, w in both.items()}, {n: w[1] for n, w in both.items()}

    def as_prior(self) -> Prior:
        """The normal over all weights as it is now, in the precision of the network."""
        dtype = next(self.network.parameters()).dtype
        return priors.frozen({JOINT: (self.mean.to(dtype), self.scale_tril.to(dtype))}, _normal)

    # ---- prediction

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions under `num_samples` drawn functions, each shared by all inputs; of R posteriors R S."""
        outputs = sampled_outputs(self.network, self.sample_weights, inputs, num_samples, generator)
        # Sample after sample they were drawn, in pieces; posterior after posterior they are due.
        by_posterior = outputs.unflatten(0, (num_samples, -1)).transpose(0, 1).flatten(0, 1)
        return self.likelihood.predict(by_posterior)


def _weightings(problem: Problem) -> torch.Size:
    """`(R,)` if every example has R weights, else `()`."""
    weights = problem.train[0][2:]
    return torch.as_tensor(weights[0]).shape if weights else torch.Size()


def _normal(mean: Tensor, scale_tril: Tensor) -> MultivariateNormal:
    return MultivariateNormal(mean, scale_tril=scale_tril, validate_args=False)


def _last_layer(network: nn.Module) -> tuple[nn.Sequential, nn.Linear]:
    """The modules before the linear layer that holds all weights, and that layer.

    Raises:
        UsageError: If the network is anything else.
    """
    modules = _in_order(network)
    while modules and isinstance(modules[-1], nn.Identity | Dropout):
        modules.pop()
    last = modules.pop() if modules else None
    features = nn.Sequential(*modules)
    if not isinstance(last, nn.Linear) or list(features.parameters()):
        raise UsageError("linear needs a network whose only weights are those of one linear layer at its end")
    return features, last


def _in_order(network: nn.Module) -> list[nn.Module]:
    if isinstance(network, nn.Sequential) and type(network).forward is nn.Sequential.forward:
        return [module for child in network for module in _in_order(child)]
    return [network]


def _joint_normal(prior: WeightDistribution) -> tuple[Tensor, Tensor]:
    """Mean `[d]` and lower factor of the covariance `[d, d]` of a normal prior, in float64.

    Raises:
        UsageError: If the prior is anything else.
    """
    joint = prior.get(JOINT)
    if isinstance(joint, MultivariateNormal):
        return joint.loc.double(), joint.scale_tril.double()
    normals = joined_normals(prior)
    if normals is None:
        raise UsageError("linear needs a normal prior: independent per weight, or one over all weights")
    return normals[0].double(), normals[1].double().diag()
