"""Invariance-abiding variational inference: mean-field draws, fitted without the cost of translations.

Approximates the posterior by independent normals q_0, as mean-field inference does, whose KL to the prior
counts only the directions in which weights change what a unit passes on.

Derivation. A unit with weights w (its bias among them, prior N(mu, Sigma), Sigma diagonal) that sees the
activations z passes on f = z'w. Moving w along the D - 1 directions with z'w fixed leaves f alone (eqs 20 to
22), so that the likelihood factor, averaged over these translations, depends on w by f alone, and

    q_mix(w | z) = prior(w | f) N(f; a, t),

which is the normal of eqs 23 and 25: mean mu + (a - z'mu) Sigma z / s and covariance
Sigma - (1 - t / s) Sigma z (Sigma z)' / s, with s = z' Sigma z. Hence KL(q_mix(. | z) || prior) is
KL(N(a, t) || N(z'mu, s)): one direction counts, in place of D. Where V is proportional to Sigma, eq. 7 holds
and a, t are the mean and variance of z'w under q_0 (eq. 9), whatever z is. So a layer's loss is

    E[-log p(D | w)] + sum over units of the mean over z of KL(q_0(z'w) || prior(z'w)).

Inputs that are multiples of one vector make all q_mix(. | z) one normal. The loss is then the negative bound
of q_mix, below q_0's by the gap KL(q_0 || q_mix) (eq. 10, whose left side is reversed in print), and q_mix at
the optimum is the true posterior of a linear model (eq. 18).

Source: Kurle et al. 2022, "On the detrimental effect of invariances in the likelihood for variational
inference" (docs/sources.md), section 5, which sketches the procedure and has no experiment.
Deviations, and choices that the source leaves open: what is trained are the means and scales of q_0, of which
m and V of eq. 6a are functions; a, t are those of q_0 also where V is not proportional to Sigma, since else
draws of q_0 would not predict what was fitted. Of the average of eqs 23 and 25 the KL is replaced by its
bound, the average of the KLs. The log likelihood of an example is taken under the normal of its own z (eq.
24). Layers take turns of `steps_per_layer` steps: those before draw z for every example by eqs 24 and 26,
those after stand at their means, which begin where the network does; sweeps go on to the end of the budget,
which counts for every layer. What no z touches stays where training began.
What would mislead: examples whose z differ in direction leave fewer translations than each of them alone, so
that the average over z counts too little: no bound on the evidence, and posteriors that are too narrow.
`points` > 1 keeps only what leaves as many activations unchanged; from the number of a unit's weights on it
is mean-field inference, the gap gone.
Cost: of one draw per example and layer, and `points` products with the scales; as many epochs of the task's
for every layer. Two numbers per weight.
Valid for: networks of linear layers on vectors, each used once; independent normal priors; every likelihood.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributions import Independent
from torch.func import functional_call
from torch.nn.functional import linear, softplus

from bench import optimizers
from bench.contract import Batch, Budget, Problem
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families import estimators
from bench.families.variational import Variational
from bench.priors import is_normal, normal_tensor
from bench.settings import Count, Factor, Positive, settings

NAMES: dict[str, dict[str, object]] = {"invariant_vi": {}}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "initial_rho": (-7.0, -1.0, "linear"),
    "points": [1, 2, 4, 8, 16],
}
_LEAST_VARIANCE = 1e-30
"""Keeps the slope of a standard deviation finite where all inputs of a unit without bias are 0."""


@settings
class Settings:
    """Settings of invariance-abiding variational inference."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    rate_decay: Factor = 1.0
    """Factor of the step size after every epoch, above 0, at most 1."""
    train_samples: Count = 1
    """Draws per example in a training step, at least 1."""
    initial_rho: float = -3.0
    """Start of rho for every weight; sigma = softplus(rho) prior sigmas, so -3 is 0.049 of them."""
    steps_per_layer: Count = 1
    """Steps on one layer before the next has its turn, at least 1."""
    points: Count = 1
    """Activations that one translation leaves unchanged, at least 1: eqs 23 to 26; more cost a unit more."""


class InvariantVI(Variational):
    """Independent normals over all weights, fitted layer by layer with the KL of what units pass on."""

    settings_class = Settings
    approximates = "the posterior by independent normals, without the cost of translations of weights"
    declares = "mean-field optimum of KL", {"learning_rate": 0.05, "rate_decay": 0.995, "points": 2}
    provides = frozenset({"weight_samples", "density", "moments", "weighted"})
    data_parallel = False  # a step trains one layer: the others have no gradients to share
    settings: Settings
    steps: Tensor  # taken so far, over all layers

    def __init__(self, problem: Problem, settings: Settings, start: InvariantVI | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the means of q_0
        reason = estimators.unsuited(self.network, problem.train[0][0][None], "local")
        if not all(is_normal(p) for p in self.prior.values()):
            reason = "needs a prior of independent normals"
        if reason is not None:
            raise UsageError(f"invariant_vi {reason}: take another method, such as mfvi")
        self.layers = [
            name
            for name, m in self.network.named_modules()
            if isinstance(m, nn.Linear) and next(m.parameters(), None) is not None  # not frozen
        ]
        self.rho = nn.ParameterList(
            torch.full_like(p, settings.initial_rho) for p in self.network.parameters()
        )
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        if start is not None:
            self.load_state_dict(start.state_dict())

    @classmethod
    def parameters_per_weight(cls, settings: Settings) -> float:
        """A mean and a rho."""
        return 2.0

    def spends(self, budget: Budget) -> Budget:
        """The task's epochs for every layer, whose turns an epoch shares out; patience alike."""
        count = len(self.layers)
        patience = None if budget.patience is None else budget.patience * count
        return replace(budget, epochs=budget.epochs * count, patience=patience)

    # ---- the distribution

    def posterior(self) -> dict[str, Independent]:
        """The independent normals q_0, with gradients to means and rhos."""
        means = self.network.named_parameters()
        return {
            name: normal_tensor(m, softplus(r) * self.prior[name].stddev)
            for (name, m), r in zip(means, self.rho, strict=True)
        }

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from q_0, stacked `[S, *shape]`."""
        with torch.no_grad():
            noise = self.standard_noise(num_samples, generator)
            return {name: q.mean + q.stddev * noise[name] for name, q in self.posterior().items()}

    # ---- training

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """A step on the layer whose turn it is: its loss per example."""
        turn = int(self.steps) // self.settings.steps_per_layer % len(self.layers)
        self.steps += 1
        nll, divergence = self.layer_terms(batch, turn, self._normal)
        scale = 1 / self.problem.num_train
        return {
            "loss": (nll + divergence) * scale,
            "likelihood_term": nll.detach() * scale,
            "prior_term": divergence.detach() * scale,
        }

    def _normal(self, like: Tensor) -> Tensor:
        """Standard normal noise from the generator that checkpoints hold."""
        return torch.randn(like.shape, generator=self.generator, device=like.device, dtype=like.dtype)

    def layer_terms(self, batch: Batch, turn: int, draw: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Expected negative log likelihood, and the mean over z of the KLs of a layer's units, in nats.

        Args:
            batch: Examples.
            turn: Number of the layer; its means and rhos, and the likelihood's parameters, get gradients.
            draw: Noise of mean 0 and variance 1, as many as its argument has entries; asked once a layer,
                `[S * B, out]`, from the first layer to this one.
        """
        posterior, name = self.posterior(), self.layers[turn]
        own = [n for n in posterior if n.rpartition(".")[0] == name]
        means = {n: q.mean if n in own else q.mean.detach() for n, q in posterior.items()}
        scales = {n: q.stddev if n in own else q.stddev.detach() for n, q in posterior.items()}
        seen: list[Tensor] = []

        def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            of = names[layer]
            variance = linear(args[0].square(), *(s.square() for s in _of_layer(scales, of)))
            if of == name:
                seen.append(args[0].detach())
            return torch.addcmul(output, variance.clamp(min=_LEAST_VARIANCE).sqrt(), draw(output))

        names = {self.network.get_submodule(n): n for n in self.layers[: turn + 1]}
        handles = [layer.register_forward_hook(hook) for layer in names]
        samples = self.num_train_samples
        rows = batch.inputs.repeat(samples, *[1] * (batch.inputs.ndim - 1))  # [S * B, ...]
        try:
            outputs = functional_call(self.network, means, (rows,)).unflatten(0, (samples, -1))
        finally:
            for handle in handles:
                handle.remove()
        nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
        prior_means = {n: p.mean for n, p in self.prior.items()}
        prior_scales = {n: p.stddev for n, p in self.prior.items()}
        parts = (_joined(t, name) for t in (means, scales, prior_means, prior_scales))
        biased = f"{_prefix(name)}bias" in means
        inputs = torch.cat([seen[0], seen[0].new_ones(len(seen[0]), 1)], 1) if biased else seen[0]
        weights = inputs.new_ones(len(inputs)) if batch.weights is None else batch.weights.repeat(samples)
        return nll, passed_on_divergence(inputs, weights, *parts, points=self.settings.points)


# ------------------------------------------------------------------------------------------------ helpers


def passed_on_divergence(
    inputs: Tensor,
    weights: Tensor,
    means: Tensor,
    scales: Tensor,
    prior_means: Tensor,
    prior_scales: Tensor,
    *,
    points: int,
) -> Tensor:
    """KL, in nats, of what U units pass on: summed over units, averaged over groups of activations.

    For a group Z of activations it is KL(q_0(Zw) || prior(Zw)), which is KL(q_mix(. | Z) || prior) of the
    q_mix that abides all translations with Zw fixed.

    Args:
        inputs: Activations z `[R, D]`, a 1 among them where units have a bias.
        weights: Of the activations in the average, `[R]`, 0 or more; a group has the sum of its own.
        means: Of independent normal weights `[U, D]`.
        scales: Their standard deviations.
        prior_means: Of the prior.
        prior_scales: Of the prior.
        points: Activations of a group, neighbours among the rows; fewer if there are not as many.
    """
    size = min(points, len(inputs))
    whole = len(inputs) // size * size
    groups = (inputs * (weights > 0)[:, None])[:whole].unflatten(0, (-1, size))  # [G, P, D]
    shares = weights[:whole].unflatten(0, (-1, size)).sum(1)  # [G]
    basis, kept = _spanning(groups)
    pairs = basis[:, :, None] * basis[:, None]  # [G, P, P, D]
    own, prior = (
        (pairs @ t.square().mT).movedim(-1, 1) + (~kept).to(basis).diag_embed()[:, None]  # [G, U, P, P]
        for t in (scales, prior_scales)
    )
    moved = (basis @ (means - prior_means).mT).movedim(-1, 1)[..., None]  # [G, U, P, 1]
    if size == 1:  # the same by arithmetic: thousands of factorisations take longer
        ratio = own / prior
        summands = (ratio + moved.square() / prior - 1 - ratio.log()).sum((1, 2, 3))
    else:
        factor, prior_factor = torch.linalg.cholesky_ex(own).L, torch.linalg.cholesky_ex(prior).L
        whitened = torch.linalg.solve_triangular(prior_factor, torch.cat([factor, moved], -1), upper=False)
        volumes = (factor.diagonal(dim1=-2, dim2=-1) / prior_factor.diagonal(dim1=-2, dim2=-1)).log()
        summands = (whitened.square().sum((-2, -1)) - size - 2 * volumes.sum(-1)).sum(1)
    return 0.5 * (shares * summands).sum() / shares.sum().clamp(min=torch.finfo(shares.dtype).tiny)


def _spanning(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that span what the rows of groups `[G, P, D]` span, of length 1, and which there are, `[G, P]`.

    Rows are 0 where activations are dependent: a KL is the same in every basis.
    """
    if groups.shape[1] == 1:
        lengths = groups.square().sum(-1).sqrt()
        kept = lengths > 0
        return groups / lengths.where(kept, torch.ones_like(lengths))[..., None], kept
    squares, rotation = torch.linalg.eigh(groups @ groups.mT)
    kept = squares > 10 * groups.shape[1] * torch.finfo(squares.dtype).eps * squares[:, -1:]
    lengths = squares.where(kept, torch.ones_like(squares)).sqrt()
    return rotation.mT @ groups * (kept / lengths)[..., None], kept


def _prefix(layer: str) -> str:
    return f"{layer}." if layer else ""


def _of_layer(tensors: Mapping[str, Tensor], layer: str) -> list[Tensor]:
    """A layer's part `[out, in]`, and that of its biases `[out]` if it has any."""
    names = (f"{_prefix(layer)}weight", f"{_prefix(layer)}bias")
    return [tensors[name] for name in names if name in tensors]


def _joined(tensors: Mapping[str, Tensor], layer: str) -> Tensor:
    """Per unit all that multiplies its activations, `[out, D]`: the bias last."""
    return torch.cat([t.reshape(len(t), -1) for t in _of_layer(tensors, layer)], 1)
