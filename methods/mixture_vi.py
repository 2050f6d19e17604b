"""Mixture of mean-field Gaussians (nn4post): variational inference with several modes.

Approximates the posterior by q(theta) = sum_i w_i prod_j N(theta_j; mu_ij, sigma_ij^2), w = softmax(logits),
sigma = softplus(rho), that maximises the evidence lower bound E_q[log p(D | theta) + log p(theta) - log q].

Source: shuiruge 2017, "Neural Network for Posterior", nn4post (docs/sources.md), sections 3 and 6 and
footnote 4; its a are the logits here, its zeta are rho.
Deviations: the expectation is stratified, sum_i w_i E_i[...] with the full mixture in log q: through draws
whose component is a constant the gradient to the logits is 0 in the mean. A mini-batch scales the likelihood
alone (section 4 scales the prior too). Where the source is silent: a loss is stable when the mean over
`stable_epochs` epochs is below that over as many before by no more than its standard error; a new component
starts where a fresh network starts, with `initial_rho`; a gain in the ELBO counts above two standard errors
and 0.01 nats.
Cost: N_c S forward and backward passes a step and N_c^2 S normal densities per weight; 2 N_c numbers per
weight. Every ELBO costs N_c `elbo_samples` forward passes over the training data.
Valid for: every differentiable network and likelihood.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Size, Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Normal, constraints
from torch.nn.functional import softplus
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bench import optimizers, priors
from bench.batches import OnDevice, batches, most_rows
from bench.contract import JOINT, Batch, Budget, Noise, Prior, Problem, WeightDistribution
from bench.divergence import is_normalised, log_prob, weight_divergence
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families.variational import Variational
from bench.priors import normal_tensor
from bench.settings import Count, Positive, settings
from bench.weights import forward, ravel, reparametrise, unravel

NAMES: dict[str, dict[str, object]] = {"mixture_vi": {}}
PRESETS = {"smoke": {"elbo_samples": 4}}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "initial_rho": (-9.0, -1.0, "linear"),
    "components": [1, 2, 4],
    "train_samples": [1, 4, 8],
}

Several = Annotated[int, Field(ge=2)]
_NEGLIGIBLE = 0.01
"""Nats by which the ELBO, or the loss of a stable fit, may rise without counting."""


@settings
class Settings:
    """Settings of the mixture of mean-field Gaussians."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    train_samples: Count = 1
    """Weight samples per component and training step, at least 1."""
    components: Count = 2
    """Components N_c of the mixture, at least 1; the largest number tried unless the choice is fixed."""
    initial_rho: float = -3.0
    """Start of rho for every weight; sigma = softplus(rho), so -3 is a standard deviation of 0.049."""
    choice: Literal["fixed", "searched", "grown"] = "fixed"
    """N_c of a run's first fit: as given; the best of 1, 2, ...; or one more whenever the loss is stable."""
    stable_epochs: Several = 10
    """Grown: epochs, at least 2, whose mean loss is compared with that of as many before."""
    elbo_samples: Several = 30
    """Draws per component, at least 2, behind every estimate of the ELBO over the full training set."""
    prior: Literal["task", "nn4post"] = "task"
    """The first prior: the task's, or the improper one of nn4post, flat on biases; it leaves no ELBO."""


class MeanSquare(Distribution):
    """nn4post's prior, section 2.3.1, for one tensor: log p = -1/2 mean of squares, or 0; not normalised.

    Over D weights the mean of their log densities, so N(0, D) but for its constant; biases are uniform.

    Args:
        shape: Of the tensor.
        flat: Whether log p = 0 everywhere.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    normalised = False

    def __init__(self, shape: Size, flat: bool) -> None:
        self.flat = flat
        super().__init__(Size(), shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of tensors `[S, *shape]` up to a constant, `[S]`, in nats."""
        mean_squares = value.flatten(1).square().mean(1)
        return mean_squares * (0.0 if self.flat else -0.5)


class MixtureVI(Variational):
    """A mixture of independent normals over all weights.

    Of the `components` that the parameters have room for, the first `active` are the mixture.
    """

    settings_class = Settings
    approximates = "the posterior by a mixture of independent normals"
    declares = "optimum of KL within its family", {"learning_rate": 0.02, "train_samples": 8}
    provides = frozenset({"weight_samples", "density", "moments", "sequential", "weighted", "loss_terms"})
    settings: Settings
    active: Tensor
    elbo: Tensor
    elbo_error: Tensor
    initial: Tensor
    kept: Tensor
    kept_active: Tensor
    changed_at: Tensor
    settled: Tensor

    def __init__(self, problem: Problem, settings: Settings, start: MixtureVI | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network().requires_grad_(False)  # its weights are where component 1 starts
        room = settings.components
        networks = [self.network, *(problem.network() for _ in range(room - 1))]
        self.means = nn.Parameter(
            torch.stack([parameters_to_vector(n.parameters()).detach() for n in networks])
        )  # [N_c, d]
        self.rho = nn.Parameter(torch.full_like(self.means, settings.initial_rho))
        self.logits = nn.Parameter(self.means.new_zeros(room))
        self.is_first = start is None
        self.epochs_each = 1  # for every number of components; `spends` knows
        self.register_buffer("active", torch.tensor(room if settings.choice == "fixed" else 1))
        self.register_buffer("elbo", torch.full((room,), -torch.inf))  # [N_c - 1]: with N_c components
        self.register_buffer("elbo_error", torch.zeros(room))
        if settings.choice != "fixed":
            self._prepare_choice()
        if start is not None:
            self.load_state_dict(start.state_dict())
            self.elbo.fill_(-torch.inf)

    @classmethod
    def parameters_per_weight(cls, settings: Settings) -> float:
        """A mean and a rho of every component that there is room for; their few logits are left out."""
        return 2.0 * settings.components

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def make_prior(self, parameters: Mapping[str, Tensor]) -> WeightDistribution:
        """The task's prior, unless this is the run's first fit and the settings name another."""
        if self.is_first and self.settings.prior == "nn4post":
            return {n: MeanSquare(p.shape, flat=n.split(".")[-1] == "bias") for n, p in parameters.items()}
        return super().make_prior(parameters)

    # ---- the distribution

    def posterior(self) -> WeightDistribution:
        """The mixture over the ravelled vector; of one component, normals per tensor. With gradients."""
        logits, means, scales = self._components()
        if len(logits) == 1:
            scale_of = self._tensors(scales[0])
            return {name: normal_tensor(m, scale_of[name]) for name, m in self._tensors(means[0]).items()}
        return {JOINT: _mixture(logits, means, scales)}

    def _components(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits `[N_c]`, means and scales `[N_c, d]` of the active components."""
        n = int(self.active)
        return self.logits[:n], self.means[:n], softplus(self.rho[:n])

    def _unravel(self, vectors: Tensor) -> dict[str, Tensor]:
        """Vectors `[S, d]` as stacked weights `[S, *shape]`."""
        return unravel(vectors, dict(self.network.named_parameters()))

    def _tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """One vector `[d]` as tensors `[*shape]`."""
        return {name: tensor[0] for name, tensor in self._unravel(vector[None]).items()}

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """Standard normal noise `[S, N_c, *shape]` per tensor."""
        return self._noise((num_samples, int(self.active)), generator)

    def _noise(self, samples: tuple[int, ...], generator: torch.Generator) -> Noise:
        return {
            name: torch.randn(*samples, *p.shape, generator=generator, device=p.device, dtype=p.dtype)
            for name, p in self.network.named_parameters()
        }

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the posterior, stacked `[S, *shape]`: the component by its weight."""
        with torch.no_grad():
            logits, means, scales = self._components()
            noise = ravel(self._noise((num_samples,), generator))
            index = torch.multinomial(logits.softmax(0), num_samples, replacement=True, generator=generator)
            return self._unravel(means[index] + scales[index] * noise)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight under the mixture."""
        with torch.no_grad():
            logits, means, scales = self._components()
            shares = logits.softmax(0)[:, None]
            mean = (shares * means).sum(0)
            variance = (shares * (scales.square() + (means - mean).square())).sum(0)
            return self._tensors(mean), self._tensors(variance)

    def as_prior(self) -> Prior:
        """The mixture as it is now."""
        posterior = self.posterior()
        if JOINT in posterior:
            return priors.frozen({JOINT: self._components()}, _mixture)
        return priors.frozen({name: (q.mean, q.stddev) for name, q in posterior.items()}, normal_tensor)

    # ---- loss

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Expected negative log likelihood and KL(q || prior), stratified over the components, in nats."""
        logits, means, scales = self._components()
        shares = logits.softmax(0)
        standard = ravel({name: e.flatten(0, 1) for name, e in noise.items()})  # [S * N_c, d]
        draws = reparametrise(means, scales, standard.view(-1, *means.shape)).flatten(0, 1)
        weights = self._unravel(draws)
        outputs = forward(self.network, weights, batch.inputs).unflatten(0, (-1, len(means)))
        rows = self.problem.num_train
        nlls = [likelihood_term(self.likelihood, part, batch, rows) for part in outputs.unbind(1)]
        nll = torch.stack(nlls) @ shares
        posterior = self.posterior()
        if JOINT not in posterior:
            return nll, weight_divergence(posterior, self.prior, weights)
        ratios = posterior[JOINT].log_prob(draws) - log_prob(self.prior, weights)
        return nll, ratios.view(-1, len(means)).mean(0) @ shares

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """One draw of the loss per example and, of several components, the largest weight."""
        terms = super().training_step(batch, batch_idx)
        if self.settings.components > 1:
            terms["largest_weight"] = self._components()[0].detach().softmax(0).max()
        return terms

    # ---- the number of components

    def _prepare_choice(self) -> None:
        """State of the search: where it starts, the mixture to beat, and whether it is over."""
        prior = self.make_prior(dict(self.network.named_parameters()))
        if self.is_first and not is_normalised(prior):
            raise UsageError(
                "mixture_vi: this prior has no normaliser, so there is no ELBO to choose the components by;"
                " take --method.choice fixed or another prior"
            )
        everything = parameters_to_vector(self._trained()).detach()
        if self.settings.choice == "searched":
            self.register_buffer("initial", everything.clone())
        self.register_buffer("kept", everything.clone())
        self.register_buffer("kept_active", torch.tensor(0))
        self.register_buffer("changed_at", torch.tensor(0))
        self.register_buffer("settled", torch.tensor(False))

    @property
    def chooses(self) -> bool:
        """Whether this fit finds N_c; a later one keeps what the run's first fit has found."""
        return self.is_first and self.settings.choice != "fixed"

    def spends(self, budget: Budget) -> Budget:
        """Searched: the budget for each number of components. The ELBO chooses, so patience has no say."""
        if not self.chooses:
            return super().spends(budget)
        fits = self.settings.components if self.settings.choice == "searched" else 1
        self.epochs_each = budget.epochs
        return replace(budget, epochs=fits * budget.epochs, patience=None)

    def on_train_epoch_start(self) -> None:
        """Goes on to the next number of components where it is time."""
        super().on_train_epoch_start()
        if not self.chooses:
            return
        if self.settings.choice == "grown":
            self._grow()
            return
        if self.epoch > 0 and self.epoch % self.epochs_each == 0:
            self._compare()
            self._continue_from(self.initial, self.epoch // self.epochs_each + 1)

    def _grow(self) -> None:
        if self.settled or not self.agree(self._is_stable()):
            return
        is_better, n = self._compare(), int(self.active)
        self._continue_from(self.kept, int(self.kept_active))
        if is_better and n < self.settings.components:
            with torch.no_grad():
                self.logits[n] = self.logits[:n].max()
            self.active.fill_(n + 1)
        else:
            self.settled.fill_(True)

    def _is_stable(self) -> bool:
        window = self.settings.stable_epochs
        losses = torch.tensor([row["loss"] for row in self.history[int(self.changed_at) :]])
        if len(losses) < 2 * window:
            return False
        before, now = losses.double()[-2 * window :].split(window)
        error = ((before.var() + now.var()) / window).sqrt().item()
        return (before.mean() - now.mean()).item() <= max(error, _NEGLIGIBLE / self.problem.num_train)

    def _continue_from(self, parameters: Tensor, active: int) -> None:
        """Trains on with these parameters and an optimiser that has seen nothing."""
        vector_to_parameters(parameters.clone(), self._trained())
        self.active.fill_(active)
        self.changed_at.fill_(self.epoch)
        optimizer: Any = self.optimizers(use_pl_optimizer=False)  # the one that `configure_optimizers` made
        optimizer.state.clear()

    def _compare(self) -> bool:
        """Estimates the ELBO; keeps the present mixture if it is better than the one kept, or is that one."""
        n, rival = int(self.active), int(self.kept_active)
        self._estimate_elbo()
        is_better = rival in (0, n)
        if not is_better:
            error = self.elbo_error[n - 1].hypot(self.elbo_error[rival - 1])
            is_better = bool(self.elbo[n - 1] - self.elbo[rival - 1] > 2 * error + _NEGLIGIBLE)
        if is_better:
            self.kept.copy_(parameters_to_vector(self._trained()))
            self.kept_active.fill_(n)
        return is_better

    def _estimate_elbo(self) -> None:
        """The ELBO over the full training set and its standard error, with equal draws for equal N_c."""
        generator = torch.Generator(self.means.device).manual_seed(0)
        train, device = self.problem.train, self.means.device
        loader = OnDevice(batches(train, min(1000, most_rows(train)), None, device=device), device)
        elbos = []
        with torch.no_grad():
            for _ in range(self.settings.elbo_samples):
                noise = self.draw_noise(1, generator)
                rows, losses = zip(
                    *((len(b.inputs), sum(self.loss_terms(b, noise))) for b in loader), strict=True
                )
                elbos.append(-sum(r * loss for r, loss in zip(rows, losses, strict=True)) / sum(rows))
        values = torch.stack(elbos).double()
        self.elbo[int(self.active) - 1] = values.mean()
        self.elbo_error[int(self.active) - 1] = values.std() / len(values) ** 0.5

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """The ELBO of what was found; of two mixtures that were compared, the better one stays."""
        if not is_normalised(self.prior):
            return
        if not self.chooses:
            self._estimate_elbo()
            return
        self._compare()
        vector_to_parameters(self.kept.clone(), self._trained())
        self.active.copy_(self.kept_active)

    def diagnostics(self, inputs: Tensor | None = None) -> dict[str, float]:
        """Components found, their weights, and ELBO and its standard error for every N_c tried, in nats."""
        if inputs is not None:
            return {}
        shares = self._components()[0].detach().softmax(0)
        found = {"components": float(len(shares)), "largest_weight": shares.max().item()}
        found |= {f"weight_{i}": share for i, share in enumerate(shares.tolist(), 1)}
        tried = zip(self.elbo.tolist(), self.elbo_error.tolist(), strict=True)
        for n, (elbo, error) in enumerate(tried, 1):
            if elbo > -torch.inf:
                found |= {f"elbo_{n}": elbo, f"elbo_error_{n}": error}
        return found


def _mixture(logits: Tensor, means: Tensor, scales: Tensor) -> MixtureSameFamily:
    """The mixture over vectors `[d]`, from logits `[N_c]`, means and scales `[N_c, d]`."""
    components = Independent(Normal(means, scales, validate_args=False), 1, validate_args=False)
    return MixtureSameFamily(Categorical(logits=logits, validate_args=False), components, validate_args=False)
