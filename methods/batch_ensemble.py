"""BatchEnsemble: networks that share their weight matrices, each times a rank-one matrix of its own.

Approximates the posterior by the equal mixture of M point masses. Member m has the weights W o r_m s_m^T in
every linear and convolutional layer: W is shared, r_m has a number per output (channel) and s_m one per input
(channel). All other parameters, such as biases, are each member's own.

Source: Wen, Tran and Ba 2020, "BatchEnsemble: An Alternative Approach to Efficient Ensemble and Lifelong
Learning", ICLR, section 3.1, and the authors' public code.
Target: the smallest mean over the members of the negative log joint, in which the task's prior is on W and on
the members' own parameters; r and s have none. Every example of a batch goes to one member drawn at random,
in shares that are as equal as can be (section 3.1): over the draws the loss is that of all members on all
examples, and a member sees a batch of B / M.
Deviations: r and s start at N(1, 0.5^2), the public code's default on images, and take the steps of all other
parameters; there they take half of them on CIFAR. There the penalty on the biases is the sum over the
members, here their mean. A plain stack of linear layers runs all members in one pass, as there, by (x o s) W
o r; of other networks members are built and run one after another, which gives the same number
(docs/decisions.md) for layers that are not linear in their weights too.
Cost: one forward and backward pass over a batch, in M pieces, and M of a prediction; per layer of n inputs
and k outputs M (n + k) numbers beside the shared ones, and M for each other parameter.
Valid for: every differentiable network and likelihood. Weights of layers other than `Linear` and ungrouped
`Conv2d` are not shared: without such layers it is an ensemble whose members split each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bench import optimizers, randomness
from bench.contract import Batch, Method, Noise, Problem
from bench.divergence import with_log_prob
from bench.energy import likelihood_term
from bench.families.shared_weights import is_matrix, stack_outputs
from bench.settings import Count, Positive, settings
from bench.weights import forward, linear_stack

NAMES: dict[str, dict[str, object]] = {"batch_ensemble": {}}
SEARCH = {"learning_rate": (1e-4, 1e-1, "log")}

_START_STD = 0.5
"""Standard deviation of r and s at the start."""


@settings
class Settings:
    """Settings of BatchEnsemble."""

    ensemble_size: Count = 4
    """M, at least 1."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class BatchEnsemble(Method):
    """Members of one network; its weight matrices are the shared ones, its other parameters are unused."""

    settings_class = Settings
    approximates = "the posterior by networks that share weights up to rank-one factors"
    declares = "none"
    provides = frozenset({"weight_samples", "moments", "weighted", "loss_terms"})
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: BatchEnsemble | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()
        self.num_draws = size = settings.ensemble_size
        shared = {id(m.weight) for m in self.network.modules() if is_matrix(m)}
        self.names = [name for name, p in self.network.named_parameters() if id(p) in shared]
        self.r, self.s, self.own = (nn.ParameterList() for _ in range(3))
        for name, p in self.network.named_parameters():
            if name in self.names:
                ones = [1] * (p.ndim - 2)
                self.r.append(self._fast_weights(size, p.shape[0], 1, *ones))
                self.s.append(self._fast_weights(size, 1, p.shape[1], *ones))
            else:
                p.requires_grad_(False)
                self.own.append(nn.Parameter(p.repeat(size, *[1] * p.ndim)))
        if start is not None:
            self.load_state_dict(start.state_dict())

    def _fast_weights(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(1 + _START_STD * torch.randn(shape, generator=self.generator))

    @classmethod
    def parameters_per_weight(cls, settings: Settings) -> None:
        """No fixed multiple: the members' own are the fewer, the wider the layers."""

    # ---- training

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """One seed per sample, `[S]`, from which a batch is split among the members."""
        seeds = torch.randint(2**62, (num_samples,), generator=generator, device=generator.device)
        return {"seeds": seeds}

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood, each example under its member, and negative log prior, in nats."""
        layers = linear_stack(self.network, batch.inputs)
        weights, log_prior = with_log_prob(self.prior, *self._weights(), layers is not None)
        run = self._runner(weights, layers)
        outputs = torch.stack([self._split_outputs(run, batch.inputs, s) for s in noise["seeds"].tolist()])
        nll = likelihood_term(self.likelihood, outputs, batch, self.problem.num_train)
        return nll, -log_prior

    def _split_outputs(self, run: Callable[[Tensor], Tensor], inputs: Tensor, seed: int) -> Tensor:
        """Outputs `[B, ...]`, of every input under the one member that it goes to."""
        size, count = self.settings.ensemble_size, len(inputs)
        generator = torch.Generator(inputs.device).manual_seed(seed)
        order = torch.randperm(count, generator=generator, device=inputs.device)
        # The first share, the largest of an uneven split, is any member's: each example is everyone's alike.
        first = torch.randint(size, (), generator=generator, device=inputs.device)
        share = -(-count // size)
        turn = torch.arange(count, device=inputs.device)
        place = (first + turn) % size * share + turn // size
        rows = order.new_zeros(size * share)  # where shares are uneven, some run an example that nobody reads
        rows[place] = order
        outputs = run(inputs.index_select(0, rows).unflatten(0, (size, share))).flatten(0, 1)
        back = torch.empty_like(order)
        back[order] = place
        return outputs.index_select(0, back)

    def _runner(
        self, weights: Mapping[str, Tensor], layers: list[tuple[str, nn.Module]] | None
    ) -> Callable[[Tensor], Tensor]:
        """What gives the outputs `[M, n, ...]` of `[M, n, ...]` inputs, n of every member."""
        if layers is not None:
            factors = dict(zip(self.names, zip(self.r, self.s, strict=True), strict=True))
            return lambda given: stack_outputs(layers, weights, factors, given)
        # Of slices each has a gradient as large as the whole; those of a split are joined once.
        one_by_one = {name: w.split(1) for name, w in self._scaled(weights).items()}
        return lambda given: torch.cat(
            [
                forward(self.network, {name: each[m] for name, each in one_by_one.items()}, part)
                for m, part in enumerate(given)
            ]
        )

    # ---- the members

    def _weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What is under the prior: the shared W, `[*shape]`, and the members' own, `[M, *shape]`."""
        named: dict[str, Tensor] = dict(self.network.named_parameters())
        shared = {name: named.pop(name) for name in self.names}
        return shared, dict(zip(named, self.own, strict=True))

    def _scaled(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of all members, `[M, *shape]`."""
        factors = zip(self.names, self.r, self.s, strict=True)
        return {**weights, **{name: weights[name] * (r * s) for name, r, s in factors}}

    def _members(self) -> dict[str, Tensor]:
        """The same of the weights at present, in the order of the network's."""
        shared, own = self._weights()
        members = self._scaled({**shared, **own})
        return {name: members[name] for name, _ in self.network.named_parameters()}

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Weights of a random subset of the members, `[S, *shape]`: each once before any is taken again."""
        chosen = randomness.subset(self.settings.ensemble_size, num_samples, generator)
        with torch.no_grad():
            return {name: w[chosen] for name, w in self._members().items()}

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight over the members."""
        with torch.no_grad():
            members = self._members()
            means = {name: w.mean(0) for name, w in members.items()}
            return means, {name: w.var(0, correction=0) for name, w in members.items()}
