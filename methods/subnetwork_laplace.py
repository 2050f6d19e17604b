"""Subnetwork Laplace: a full covariance over the weights that vary most, all others at the mode.

Approximates the posterior by a normal over k weights, whose precision is their block of the curvature at the
mode; every other weight is a point mass there.

Source: Daxberger et al. 2021, "Bayesian Deep Learning via Subnetwork Inference", ICML: the k weights of the
largest marginal variance under Laplace with a diagonal, which lose least in Wasserstein distance to the
posterior if weights are independent; the generalised Gauss-Newton matrix; predictions of the network
linearised at the mode.
Deviations: weights that move no output of any training example, as those of units that are never active,
come last: by their variance, the prior's, they would be the subnetwork. The prior is the task's; no precision
is tuned on validation data. Published subnetworks are as large as memory allows, 42,438 weights of ResNet-18;
here `largest` says how large.
What is wrong with it is known: a block of a precision, inverted, is the covariance of these weights given all
others. Variances are never larger than those of the whole normal, of weights or of linear predictions.
Cost: as maximum a posteriori; after the fit a Jacobian per example over all weights, another over the
subnetwork, and O(k^3) time; k^2 numbers are stored.
Valid for: every twice differentiable network and likelihood under a prior of independent normals. Parameters
of a likelihood are point estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from bench import optimizers
from bench.batches import few
from bench.contract import JOINT, Batch, Method, Noise, Problem
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families import curvature
from bench.priors import joined_normals
from bench.settings import Positive, settings
from bench.weights import forward, linearised, ravel, unravel

NAMES: dict[str, dict[str, object]] = {"subnetwork_laplace": {}}
PRESETS = {"smoke": {"largest": 20}}
SEARCH = {"learning_rate": (1e-4, 1e-2, "log"), "largest": [100, 300, 1000, 3000]}

Rows = Callable[[Tensor], Tensor]


@settings
class Settings:
    """Settings of subnetwork Laplace."""

    largest: Annotated[int, Field(ge=1, le=5000)] = 1000
    """k, weights of the subnetwork at most, from 1 to 5,000, for which matrices take 1 GB."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class SubnetworkLaplace(Method):
    """A normal over some weights at the mode; before `finish_fit` a point mass."""

    settings_class = Settings
    approximates = "the posterior by a normal over the weights that vary most, a point mass for all others"
    declares = "mode and curvature exact", {"learning_rate": 0.05, "largest": 64}
    provides = frozenset({"weight_samples", "moments", "weighted", "loss_terms"})
    validation_samples = 1
    settings: Settings
    chosen: Tensor  # [k], places in the ravelled vector, ascending
    root: Tensor  # [k, k], R of the covariance R R^T

    def __init__(self, problem: Problem, settings: Settings, start: SubnetworkLaplace | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the mode
        self._like = dict(self.network.named_parameters())
        if JOINT in self.prior or joined_normals(self.prior) is None:
            raise UsageError("subnetwork_laplace: the prior must be independent normals: pose another prior")
        curvature.must_linearise("subnetwork_laplace", self.network, few(self.problem.train))
        size = min(settings.largest, sum(p.numel() for p in self._like.values()))
        self.register_buffer("chosen", torch.arange(size))
        self.register_buffer("root", torch.zeros(size, size))
        if start is not None:
            self.load_state_dict(start.state_dict())

    # ---- after training

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """Chooses the weights by the curvature's diagonal, and inverts their block of it."""
        normals = joined_normals(self.prior)
        assert normals is not None
        prior = normals[1].double() ** -2  # precisions [d]
        diagonal = self._sum(loader, list(self._like), lambda rows: rows.square().sum(0))
        # Of a weight that moves no output the variance is the prior's, which is often the largest there is.
        precision = torch.where(diagonal > 0, diagonal + prior, torch.inf)
        chosen = precision.topk(len(self.chosen), largest=False).indices.sort().values
        names, places = self._places(chosen)
        block = self._sum(loader, names, lambda rows: rows[:, places].T @ rows[:, places])
        block.diagonal().add_(prior[chosen])
        values, vectors = torch.linalg.eigh(block)
        self.chosen.copy_(chosen)
        self.root.copy_(vectors * values.rsqrt())

    def _places(self, chosen: Tensor) -> tuple[list[str], Tensor]:
        """Tensors that hold chosen weights, and where these are among the weights of those alone."""
        names, places, first, before = [], list[Tensor](), 0, 0
        for name, w in self._like.items():
            own = chosen[(chosen >= first) & (chosen < first + w.numel())] - first
            first += w.numel()
            if len(own):
                names.append(name)
                places.append(own + before)
                before += w.numel()
        return names, torch.cat(places)

    def _sum(self, loader: Iterable[Batch], names: list[str], of: Rows) -> Tensor:
        """The sum over the full training set, in float64, of a function of the rows of R^T J `[N, k]`."""
        count, total = 0, torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in loader:
            for piece in curvature.pieces(batch):
                count += len(piece.inputs)
                for rows in self._rows(piece, names):
                    total = total + of(rows).double()
        return total * (self.problem.num_train / count)

    def _rows(self, piece: Batch, names: list[str]) -> Iterator[Tensor]:
        """Rows whose outer products add up to the Gauss-Newton matrix of these tensors, in chunks."""
        with torch.no_grad():
            at_mode = self.network(piece.inputs)
        roots = curvature.output_roots(self.likelihood, at_mode, piece)
        numbers = at_mode.shape[1] * sum(self._like[name].numel() for name in names)
        chunk = max(1, curvature.LARGEST // numbers)
        for examples, some in zip(piece.inputs.split(chunk), roots.split(chunk), strict=True):
            yield curvature.jacobians(self.network, names, examples, some).flatten(0, 1)

    # ---- the distribution

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws of the subnetwork among point masses, stacked `[S, *shape]`."""
        with torch.no_grad():
            mode = {name: p[None] for name, p in self.network.named_parameters()}
            draws = ravel(mode).repeat(num_samples, 1)
            empty = draws.new_empty(len(self.chosen))
            noise = torch.stack([empty.normal_(generator=generator).clone() for _ in range(num_samples)])
            draws[:, self.chosen] += noise @ self.root.T
            return unravel(draws, self._like)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight; a variance of 0 outside the subnetwork."""
        means = {name: p.detach() for name, p in self.network.named_parameters()}
        variance = torch.zeros_like(ravel({name: m[None] for name, m in means.items()}))
        variance[0, self.chosen] = self.root.square().sum(1)
        return means, {name: v[0] for name, v in unravel(variance, self._like).items()}

    # ---- loss and prediction

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood and negative log prior of the weights, in nats."""
        weights = {name: p[None] for name, p in self.network.named_parameters()}
        outputs = forward(self.network, weights, batch.inputs)
        prior_term = -log_prob(self.prior, weights).sum()
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), prior_term

    def outputs(self, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Of the network linearised at the mode."""
        return linearised(self.network, weights, inputs)
