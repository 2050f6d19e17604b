"""MIMO: one network that takes M inputs side by side and answers each by a head of its own.

Approximates the posterior by the equal mixture of M point masses, subnetworks that share all layers between
the first, which has weights for each of the M inputs, and the last, which has M heads. Training hands the
subnetworks different inputs. A prediction hands all of them the same one, and every head is a member.

Source: Havasi, Jenatton, Fort, Liu, Snoek, Lakshminarayanan, Dai and Tran 2021, "Training independent
subnetworks for robust prediction", ICLR, sections 2 and 3, and the authors' public code.
Target: the smallest expected sum over the members of the negative log likelihood, each of its own example,
less one log prior of all weights. A batch of B examples is repeated R times; the R B rows are shuffled for
every member on its own, but for a share rho of them, which all members get alike.
Deviations: the first weights start as those of M fresh networks divided by the root of M, which keeps the
variance of sums; there the layer starts as any of so many inputs. The regulariser is the task's prior.
Cost: R forward and backward passes of the task's network a step and one of a prediction, but for its first
layer and its last, which are M times as large.
Valid for: networks that end in a linear layer, whose first linear or ungrouped `Conv2d` layer is the only one
that data reach past all others; others are refused. What comes before that layer, such as an embedding, acts
on each input alone. The loss of an example depends on the others of its batch, so that there are no
`loss_terms`. Capabilities over weights are missing, since these are not the posed network's
(`bench.contract.OF_WEIGHTS`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from bench import optimizers, randomness
from bench.contract import Batch, Method, Prediction, Problem
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families.heads import with_heads
from bench.families.shared_weights import is_matrix
from bench.settings import Count, Positive, settings
from bench.weights import blocks, channels_last

NAMES: dict[str, dict[str, object]] = {"mimo": {}}
SEARCH = {"learning_rate": (1e-4, 1e-2, "log"), "input_repetition": (0.0, 0.8, "linear")}

Fraction = Annotated[float, Field(ge=0, le=1)]


@settings
class Settings:
    """Settings of MIMO."""

    ensemble_size: Count = 3
    """M, at least 1."""
    input_repetition: Fraction = 0.0
    """rho, the share of rows that all members get alike, a fraction from 0 to 1."""
    batch_repetitions: Count = 4
    """R, how often an example is in a step, at least 1."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class MIMO(Method):
    """A network of M inputs and M heads."""

    settings_class = Settings
    approximates = (
        "the posterior by subnetworks that share one network, each with an input and a head of its own"
    )
    declares = "none"
    provides = frozenset({"weighted"})
    settings: Settings

    def __init__(self, problem: Problem, settings: Settings, start: MIMO | None = None) -> None:
        super().__init__(problem, settings, start)
        self.num_draws = size = settings.ensemble_size
        example = problem.train[0][0]
        headed = partial(with_heads, problem.network, size, example, "mimo")
        self.network = with_inputs(headed, size, example)
        if start is not None:
            self.load_state_dict(start.state_dict())

    # ---- training

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss per example of a batch under fresh shuffles."""
        rows = shuffles(len(batch.inputs), self.settings, self.generator)
        nll, prior_term = self.energies(batch, rows)
        scale = 1 / self.problem.num_train
        return {
            "loss": (nll + prior_term) * scale,
            "likelihood_term": nll.detach() * scale,
            "prior_term": prior_term.detach() * scale,
        }

    def energies(self, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Negative log likelihood, the sum over the members, and negative log prior, in nats.

        Args:
            batch: Examples.
            rows: Of every member the examples that it gets, by number, `[M, T]`.
        """
        every = rows.flatten()
        outputs = self._heads(batch.inputs[every]).flatten(0, 1)[None]  # [1, M T, K]
        shuffled = Batch(*(part[every] for part in batch if part is not None))
        mean = likelihood_term(self.likelihood, outputs, shuffled, self.problem.num_train)
        weights = {name: p[None] for name, p in self.network.named_parameters()}
        return len(rows) * mean, -log_prob(self.prior, weights).sum()

    def _heads(self, inputs: Tensor) -> Tensor:
        """Outputs of every member for an input of its own, `[M, T, K]`, from `[M T, ...]`."""
        return self.network(inputs).unflatten(1, (self.settings.ensemble_size, -1)).movedim(1, 0)

    # ---- prediction

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions of members in random order, each once before any is taken again."""
        size = self.settings.ensemble_size
        chosen = randomness.subset(size, num_samples, generator)
        with torch.no_grad():
            outputs = [self._heads(torch.cat([block] * size))[chosen] for block in blocks(inputs)]
            return self.likelihood.predict(torch.cat(outputs, 1))


def shuffles(count: int, own: Settings, generator: torch.Generator) -> Tensor:
    """Numbers of the examples that every member gets, `[M, R count]`.

    Each is in every member's row R times. The last share rho of the columns, rounded up, is the same for all.
    """
    kind: dict[str, Any] = {"generator": generator, "device": generator.device}
    order = torch.randperm(own.batch_repetitions * count, **kind) % count
    apart = int(len(order) * (1 - own.input_repetition))
    return torch.stack(
        [
            torch.cat([order[:apart][torch.randperm(apart, **kind)], order[apart:]])
            for _ in range(own.ensemble_size)
        ]
    )


# ------------------------------------------------------------------------------------------------- layers


def with_inputs(make: Callable[[], nn.Module], count: int, example: Tensor) -> nn.Module:
    """A fresh network whose first layer takes `count` inputs at once: `[count B, ...]` in, B rows out.

    Args:
        make: Makes networks.
        count: M, at least 1; the first B rows are the first inputs, the next B the second ones, and so on.
        example: One input.

    Raises:
        UsageError: If there is no such layer, or B rows are not what comes out.
    """
    networks = [make() for _ in range(count)]
    layers = [_entrance(network, example) for network in networks]
    with torch.no_grad():
        layers[0].weight = nn.Parameter(torch.cat([layer.weight for layer in layers], 1) / count**0.5)
    layers[0].register_forward_pre_hook(partial(_side_by_side, count))
    pair = torch.stack([example, example.flip(0)])
    with torch.no_grad():
        singly = torch.cat([networks[0](torch.stack([row] * count)) for row in pair])
        try:
            jointly = networks[0](torch.cat([pair] * count))
        except (RuntimeError, ValueError, IndexError):  # a part that has the number of rows from elsewhere
            jointly = singly[:0]
    if jointly.shape != singly.shape or not torch.allclose(jointly, singly, 1e-3, 1e-5):
        raise UsageError("mimo needs a network in which inputs meet in one layer, and each stays in its row")
    return networks[0]


def _entrance(network: nn.Module, example: Tensor) -> nn.Linear | nn.Conv2d:
    """The layer in which inputs can meet: the first that is called of those with a matrix."""
    called: list[nn.Linear | nn.Conv2d] = []
    layers = [m for m in network.modules() if is_matrix(m) and isinstance(m.weight, nn.Parameter)]
    handles = [m.register_forward_pre_hook(lambda module, _: called.append(module)) for m in layers]
    with torch.no_grad():
        network(example[None])
    for handle in handles:
        handle.remove()
    names = list(network.named_parameters(remove_duplicate=False))
    if not called or called.count(called[0]) > 1 or len(names) > len(list(network.parameters())):
        raise UsageError(
            "mimo needs a linear or convolutional layer that is called once, of weights of its own"
        )
    return called[0]


def _side_by_side(count: int, layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor]:
    """What a layer gets, from `[count B, ...]` to B rows with the features, or the maps, of all of them."""
    axis = -1 if isinstance(layer, nn.Linear) else 1
    apart = given[0].unflatten(0, (count, -1))  # [count, B, ...]
    if axis == -1:
        return (apart.movedim(0, -2).flatten(-2),)
    return (channels_last(apart.movedim(0, 1).flatten(1, 2)),)
