"""Epinet: a network, and beside it a small one that says how the outputs may move together.

Approximates the posterior over functions by f_z(x) = base(x) + learned(h, z) + a prior(x, z) with an index z
of D standard normal numbers: a draw is a function, that of one z. Here h are the hidden units before the last
linear layer of the base network, and no gradient reaches the base network through them. The learned part is
g([h, z])^T z of a small network g, the prior part sum_i p_i(x) z_i of D small random networks that stay as
they are. What data say of a function the learned part undoes; far from them the prior part remains.

Source: Osband et al. 2023, "Epistemic Neural Networks", NeurIPS, with the settings of the
authors' public agent for their testbed: D = 8, two layers of 15 hidden units in g, of 5 in each p_i, a = 0.3.
Target: the mode, over base network and g, of the mean over z of the log likelihood under f_z, plus the log
prior: the task's of the base network, N(0, I) of the weights of g. There is no posterior that this tends to.
Deviations: N(0, I) stands in for a weight decay tuned to dimension and examples. Base network and g are
trained together from the start. As in the paper no gradient passes through h; the public agent lets it.
Cost: as maximum a posteriori, and S times the small network for S indices; D small networks for the prior.
Valid for: networks whose outputs are those of a linear layer, on inputs that are real numbers; every
differentiable likelihood. Capabilities over weights are missing: no draw is of the posed network's weights.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from bench import optimizers
from bench.contract import Batch, Method, Noise, Prediction, Problem
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families import last_layer
from bench.settings import Count, NonNegative, Positive, settings
from bench.weights import blocks

NAMES: dict[str, dict[str, object]] = {"epinet": {}}
SEARCH = {"learning_rate": (1e-4, 1e-1, "log"), "prior_scale": (0.03, 10.0, "log"), "index": [4, 8, 16, 32]}


@settings
class Settings:
    """Settings of the epinet."""

    index: Count = 8
    """D, numbers of an index, at least 1, and of random networks in the prior part."""
    units: Count = 15
    """Hidden units of each of the two layers of the learned part, at least 1."""
    prior_units: Count = 5
    """Hidden units of each of the two layers of every random network, at least 1."""
    prior_scale: NonNegative = 0.3
    """a, what the prior part is multiplied by, in units of the outputs, 0 or more."""
    train_samples: Count = 8
    """Indices per training step, at least 1."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class RandomNetworks(nn.Module):
    """D networks of two hidden layers that are never trained; weights N(0, 1 / inputs of the layer), no bias.

    Args:
        inputs: Numbers of an example.
        outputs: K.
        own: D and the hidden units.
        generator: Draws the weights.
    """

    def __init__(self, inputs: int, outputs: int, own: Settings, generator: torch.Generator) -> None:
        super().__init__()
        sizes = (inputs, own.prior_units, own.prior_units, outputs)
        for number, (given, made) in enumerate(pairwise(sizes)):
            weight = torch.randn(own.index, given, made, generator=generator) / math.sqrt(given)
            self.register_buffer(f"layer_{number}", weight)  # [D, given, made]

    def forward(self, examples: Tensor, index: Tensor) -> Tensor:
        """sum_i p_i(x) z_i, `[S, B, K]`, of examples `[B, N]` and indices `[S, D]`."""
        hidden = (examples @ self.get_buffer("layer_0")).relu()  # [D, B, units]
        hidden = (hidden @ self.get_buffer("layer_1")).relu()
        return torch.einsum("dbk,sd->sbk", hidden @ self.get_buffer("layer_2"), index)


class Learned(nn.Module):
    """g([h, z])^T z: a network of two hidden layers that sees the index, and is contracted with it.

    Args:
        inputs: Hidden units of the base network.
        outputs: K.
        own: D and the hidden units.
    """

    def __init__(self, inputs: int, outputs: int, own: Settings) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs + own.index, own.units)
        self.hidden = nn.Linear(own.units, own.units)
        self.leave = nn.Linear(own.units, outputs * own.index)

    def forward(self, features: Tensor, index: Tensor) -> Tensor:
        """Outputs `[S, B, K]` of features `[B, P]` and indices `[S, D]`."""
        both = torch.cat(
            [features.expand(len(index), *features.shape), index[:, None].expand(-1, len(features), -1)], -1
        )
        hidden = self.hidden(self.enter(both).relu()).relu()
        return torch.einsum("sbkd,sd->sbk", self.leave(hidden).unflatten(-1, (-1, index.shape[1])), index)


class Epinet(Method):
    """A base network, and functions around it by a random index."""

    settings_class = Settings
    approximates = (
        "the posterior over functions by a network and a small one beside it that a random index moves"
    )
    declares = "none"
    provides = frozenset({"weighted", "loss_terms"})
    settings: Settings
    stacks = True

    def __init__(self, problem: Problem, settings: Settings, start: Epinet | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()
        example = problem.train[0][0][None]
        path = last_layer.last_linear(self.network)
        if path is None or not last_layer.is_final(self.network, path, example):
            raise UsageError("epinet needs a network whose outputs are those of one linear layer at its end")
        if not example.is_floating_point():
            raise UsageError("epinet needs inputs that are real numbers, for its random networks")
        self.last, layer = path, self.network.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        self.learned = Learned(layer.in_features, layer.out_features, settings)
        self.fixed = RandomNetworks(example.numel(), layer.out_features, settings, self.generator)
        if start is not None:
            self.load_state_dict(start.state_dict())

    @classmethod
    def parameters_per_weight(cls, settings: Settings) -> None:
        """None: the small network does not grow with the base network."""

    def draw_noise(self, num_samples: int, generator: torch.Generator) -> Noise:
        """The indices z, `[S, D]`."""
        like = next(self.learned.parameters())
        shape = (num_samples, self.settings.index)
        return {"index": torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)}

    def functions(self, inputs: Tensor, index: Tensor) -> Tensor:
        """f_z at inputs `[B, ...]` for indices `[S, D]`, `[S, B, K]`."""
        features, said = last_layer.features(self.network, self.last, inputs)
        prior = self.settings.prior_scale * self.fixed(inputs.flatten(1).to(index), index)
        return said + self.learned(features.detach(), index) + prior

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Mean over indices of the negative log likelihood; negative log prior of all that is trained."""
        outputs = self.functions(batch.inputs, noise["index"])
        weights = {name: p[None] for name, p in self.network.named_parameters()}
        small = torch.cat([p.flatten() for p in self.learned.parameters()])
        prior_term = (
            0.5 * (small.square() + math.log(2 * math.pi)).sum() - log_prob(self.prior, weights).sum()
        )
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), prior_term

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions under `num_samples` indices, which all inputs share."""
        index = self.draw_noise(num_samples, generator)["index"]
        with torch.no_grad():
            parts = [self.functions(block, index) for block in blocks(inputs)]
        return self.likelihood.predict(torch.cat(parts, 1))
