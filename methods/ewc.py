"""Elastic weight consolidation: the mode, held near earlier modes by a penalty weighted with the Fisher.

Approximates the posterior by a point mass at its mode and, as the next prior, by a quadratic around it: the
precision of a weight is the prior's plus `strength` times the diagonal of the Fisher information.

Source: Kirkpatrick et al. 2017; Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md),
section 5.1; one penalty around the last mode, Huszar 2018.
Deviations: the thesis does not give the strength (lambda). The default of 1 is untuned and is sequential
Laplace with the diagonal Fisher as Hessian, so Fishers are sums over a task's examples, not means. For the
same reason the first prior stays in every later penalty, its precision not scaled by the strength: around the
last mode with `anchors` last, around its own mean with `every`. Not offered: dropping the first prior after
the first fit. The penalties of `every` are kept as one quadratic, around the mean of the modes weighted by
precision: their number costs nothing.
Cost: as maximum a posteriori; after the fit one gradient per example, with the exact Fisher one per example
and class. Two numbers per weight, three with `every`.
Valid for: every differentiable network under a first prior of independent normals; the exact and the sampled
Fisher for categorical, Bernoulli and Gaussian likelihoods. Parameters of a likelihood have no penalty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Size, Tensor
from torch.distributions import Distribution, constraints
from torch.func import functional_call, grad, vmap

from bench import likelihoods, optimizers, priors
from bench.contract import Batch, Method, Noise, Prediction, Prior, Problem
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.priors import is_normal
from bench.settings import NonNegative, Positive, settings
from bench.weights import forward, ravel, unravel

NAMES: dict[str, dict[str, object]] = {"ewc": {}}
SEARCH = {"learning_rate": (1e-4, 1e-1, "log"), "strength": (0.1, 1e9, "log")}

_CPU_CHUNK, _CHUNK = 4_000_000, 100_000_000
"""Floats of per-example gradients held at once, on a CPU (they stay near its cache) and elsewhere."""


def penalty(
    theta: Tensor | Mapping[str, Tensor],
    theta_star: Tensor | Mapping[str, Tensor],
    fisher: Tensor | Mapping[str, Tensor],
    strength: float = 1.0,
) -> Tensor:
    """(strength / 2) sum_i F_i (theta_i - theta*_i)^2, a scalar, in nats.

    Args:
        theta: Weights: a tensor of any shape, or tensors by name.
        theta_star: The mode, alike.
        fisher: Diagonal of the Fisher information, alike.
        strength: Lambda.
    """
    if isinstance(theta, Mapping):
        assert isinstance(theta_star, Mapping)
        assert isinstance(fisher, Mapping)
        parts = [penalty(theta[name], theta_star[name], fisher[name], strength) for name in theta]
        return torch.stack(parts).sum()
    assert isinstance(theta_star, Tensor)
    assert isinstance(fisher, Tensor)
    return 0.5 * strength * (fisher * (theta - theta_star).square()).sum()


class Quadratic(Distribution):
    """The density exp(-least - 1/2 sum precision (w - loc)^2), without normaliser; one tensor is one event.

    Args:
        loc: Centre `[*shape]`.
        precision: Precision of every weight `[*shape]`, 0 or more.
        least: The penalty at the centre, a scalar, in nats.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    normalised = False

    def __init__(self, loc: Tensor, precision: Tensor, least: Tensor) -> None:
        self.loc, self.precision, self.least = loc, precision, least
        super().__init__(Size(), loc.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Minus the penalty of tensors `[*sample_shape, *shape]`, `[*sample_shape]`, in nats."""
        stacked = value.reshape(-1, *self.loc.shape)
        penalties = torch.stack([penalty(w, self.loc, self.precision) for w in stacked])
        return (-self.least - penalties).reshape(value.shape[: value.ndim - self.loc.ndim])

    def plus(self, loc: Tensor, precision: Tensor) -> Quadratic:
        """The sum of this penalty, whose precisions are above 0, and another."""
        total = self.precision + precision
        move = precision / total * (loc - self.loc)
        gap = penalty(loc, self.loc, self.precision * (precision / total))
        return Quadratic(self.loc + move, total, self.least + gap)


@settings
class Settings:
    """Settings of elastic weight consolidation."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    strength: NonNegative = 1.0
    """Lambda, the factor of every Fisher in the penalty, 0 or more; untuned: 1 is sequential Laplace."""
    fisher: Literal["empirical", "exact", "sampled"] = "empirical"
    """Labels of the squared gradients: the observed, the model's own in expectation, or one drawn of them."""
    anchors: Literal["last", "every"] = "last"
    """Centre of the penalty: the last mode for the sum of all Fishers, or for each Fisher its own mode."""


class EWC(Method):
    """A point mass at the mode, and a quadratic around it for the fits to come."""

    settings_class = Settings
    approximates = "the posterior by its mode, as next prior by a quadratic with the diagonal Fisher"
    declares = "mode and curvature exact", {"learning_rate": 0.05, "fisher": "exact"}
    provides = frozenset({"sequential", "weighted", "loss_terms"})
    settings: Settings
    quadratic: Tensor
    least: Tensor

    def __init__(self, problem: Problem, settings: Settings, start: EWC | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()
        known = likelihoods.Categorical | likelihoods.Bernoulli | likelihoods.Gaussian
        if settings.fisher != "empirical" and not isinstance(self.likelihood, known):
            raise UsageError(
                f"ewc has no {settings.fisher} Fisher for this likelihood; take --method.fisher empirical"
            )
        # The penalty that `as_prior` hands on: centre and precision `[2, d]`, its least value per tensor.
        prior = _quadratics(self.make_prior(dict(self.network.named_parameters())))
        self.register_buffer("quadratic", torch.empty(2, sum(p.numel() for p in self.network.parameters())))
        self.register_buffer("least", torch.empty(len(prior)))
        self._keep(prior)
        if start is not None:
            self.load_state_dict(start.state_dict())

    def _weights(self) -> dict[str, Tensor]:
        return {name: p[None] for name, p in self.network.named_parameters()}

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood, and negative log prior or the penalty of the earlier fits, in nats."""
        weights = self._weights()
        outputs = forward(self.network, weights, batch.inputs)
        prior_term = -log_prob(self.prior, weights).sum()
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), prior_term

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """Adds the Fisher of these examples, times the strength, to the penalty of the prior."""
        fisher = self.fisher_information(loader)
        penalties = _quadratics(self.prior)
        for name, p in self.network.named_parameters():
            mode, earlier, own = p.detach(), penalties[name], self.settings.strength * fisher[name]
            if self.settings.anchors == "every":
                penalties[name] = earlier.plus(mode, own)
            else:
                penalties[name] = Quadratic(mode, earlier.precision + own, torch.zeros_like(earlier.least))
        self._keep(penalties)

    def _keep(self, penalties: Mapping[str, Quadratic]) -> None:
        self.quadratic.copy_(ravel({n: torch.stack([q.loc, q.precision]) for n, q in penalties.items()}))
        self.least.copy_(torch.stack([q.least for q in penalties.values()]))

    def fisher_information(self, loader: Iterable[Batch]) -> dict[str, Tensor]:
        """Diagonal of the Fisher information at the weights, `[*shape]`, summed over the training examples.

        Args:
            loader: All training examples once; the weight of an example multiplies its share.
        """
        weights = {name: p.detach() for name, p in self.network.named_parameters()}

        def along(weights: dict[str, Tensor], one: Tensor, score: Tensor) -> Tensor:
            return (functional_call(self.network, weights, (one[None],))[0] * score).sum()

        gradients = vmap(grad(along), (None, 0, 0))
        floats = _CPU_CHUNK if self.quadratic.device.type == "cpu" else _CHUNK
        chunk = max(1, floats // self.quadratic.shape[1])
        fisher = {name: torch.zeros_like(w) for name, w in weights.items()}
        rows = 0
        for batch in loader:
            rows += len(batch.inputs)
            counts = self.quadratic.new_ones(len(batch.inputs))
            if batch.weights is not None:
                counts = counts * batch.weights
            pieces = (batch.inputs.split(chunk), batch.targets.split(chunk), counts.split(chunk))
            for inputs, targets, count in zip(*pieces, strict=True):
                with torch.no_grad():
                    scores = self._scores(self.network(inputs), targets)
                    for score in scores:
                        for name, g in gradients(weights, inputs, score).items():
                            fisher[name] += torch.tensordot(count, g.square_(), 1)
        return {name: f * (self.problem.num_train / rows) for name, f in fisher.items()}

    def _scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Vectors `[V, B, K]` whose outer products add up to each example's Fisher of the outputs.

        Args:
            outputs: `[B, K]`.
            targets: `[B, ...]`; the empirical Fisher alone looks at the observed labels.
        """
        likelihood, sampled = self.likelihood, self.settings.fisher == "sampled"

        def score(labels: Tensor) -> Tensor:
            return grad(lambda f: likelihood.log_prob(f[None], labels).sum())(outputs)

        if self.settings.fisher == "empirical":
            return score(targets)[None]
        if isinstance(likelihood, likelihoods.Gaussian):
            sigma = targets[..., 1] if likelihood.per_example else likelihood.log_sigma.exp()
            root = (1 / sigma).expand_as(outputs)
            if not sampled:
                return torch.diag_embed(root).transpose(0, 1)  # [K, B, K]
            noise = torch.empty_like(outputs).normal_(generator=self.generator)
            return (noise * root)[None]
        classes = 2 if isinstance(likelihood, likelihoods.Bernoulli) else outputs.shape[1]
        labels = torch.arange(classes, device=outputs.device)[:, None].expand(-1, len(outputs))  # [C, B]
        probs = torch.stack([likelihood.log_prob(outputs[None], y)[0] for y in labels]).exp()
        if sampled:
            return score(torch.multinomial(probs.T, 1, generator=self.generator)[:, 0])[None]
        return torch.stack([p.sqrt()[:, None] * score(y) for p, y in zip(probs, labels, strict=True)])

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """One prediction: S = 1 whatever `num_samples` says."""
        with torch.no_grad():
            return self.likelihood.predict(forward(self.network, self._weights(), inputs))

    def as_prior(self) -> Prior:
        """The penalty of all fits so far; the first prior's is in it."""
        parts = unravel(self.quadratic, dict(self.network.named_parameters()))
        named = zip(parts.items(), self.least, strict=True)
        return priors.frozen({name: (loc, p, least) for (name, (loc, p)), least in named}, Quadratic)


def _quadratics(prior: Mapping[str, Distribution]) -> dict[str, Quadratic]:
    """The penalty that each part of a prior stands for, up to the normaliser of a normal.

    Raises:
        UsageError: If a part is neither an independent normal nor a penalty of an earlier fit.
    """
    found = {}
    for name, p in prior.items():
        if is_normal(p):
            found[name] = Quadratic(p.mean, p.base_dist.scale.pow(-2), p.mean.new_zeros(()))
        elif isinstance(p, Quadratic):
            found[name] = p
        else:
            raise UsageError("ewc needs a prior of independent normals, whose precision enters its penalty")
    return found
