"""Small problems with fixed seeds: classes from vectors, classes from images, and regression."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, own_network, priors
from bench.contract import Likelihood, Problem, Stored

TRAIN, VAL = 20, 12


def small_cnn(dropout: float = 0.0) -> nn.Sequential:
    """Images `[B, 1, 6, 6]` to 3 classes."""
    return networks.he_initialise(
        nn.Sequential(
            nn.Conv2d(1, 3, 3),
            networks.Dropout(dropout, channels=True),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(12, 6),
            nn.ReLU(),
            networks.Dropout(dropout),
            nn.Linear(6, 3),
        )
    )


def line(dropout: float = 0.0) -> nn.Sequential:
    """One slope and one intercept: the smallest network, two tensors of one weight each."""
    return nn.Sequential(networks.Dropout(dropout), nn.Linear(1, 1))


def linear_network(dropout: float = 0.0) -> nn.Linear:
    """Three inputs, two outputs, no hidden layer."""
    return nn.Linear(3, 2)


class Residual(nn.Module):
    """No plain stack: a skip connection, a scalar parameter, one without bias."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 5, bias=False)
        self.hidden = nn.Linear(5, 5)
        self.dropout = networks.Dropout(dropout)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.leave = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores `[B, 3]`."""
        hidden = self.enter(inputs)
        hidden = hidden + self.gain * self.dropout(self.hidden(hidden).tanh())
        return self.leave(hidden)


class OnDisk(Stored):
    """The rows of tensors as if they were on disk; augmented, an input is moved by its uniform numbers.

    Args:
        tensors: Inputs `[N, ...]` and targets.
        num_uniforms: How many of these an example has.
    """

    def __init__(self, *tensors: Tensor, num_uniforms: int = 0) -> None:
        self.tensors, self.num_uniforms = tensors, num_uniforms
        self.most_rows = 0

    def __len__(self) -> int:
        return len(self.tensors[0])

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Some rows; `most_rows` keeps how many were asked for at once."""
        self.most_rows = max(self.most_rows, len(rows))
        inputs, targets = self.tensors
        return inputs[rows], targets[rows]

    def finish(self, inputs: Tensor, uniforms: Tensor | None) -> Tensor:
        """The inputs, each moved by the sum of its numbers."""
        return inputs if uniforms is None else inputs + uniforms.sum(1).view(-1, *(inputs.ndim - 1) * [1])


def tensors(examples: Any) -> tuple[Tensor, ...]:
    """Inputs and targets of a problem of this suite, which are in memory."""
    return examples.tensors


def on_disk(problem: Problem, num_uniforms: int = 0) -> Problem:
    """The problem with its training examples as if they were on disk."""
    return replace(problem, train=OnDisk(*tensors(problem.train), num_uniforms=num_uniforms))


def _problem(network: Any, likelihood: Likelihood, inputs: Tensor, targets: Tensor) -> Problem:
    train = TensorDataset(inputs[:TRAIN], targets[:TRAIN])
    val = TensorDataset(inputs[TRAIN:], targets[TRAIN:])
    return Problem(network, likelihood, priors.normal(0.1, 0.8), train, val, TRAIN)


def _of(problem: Problem, network: Any) -> Problem:
    """The problem for another network, of one width."""
    return replace(problem, network=network)


def mlp() -> Problem:
    """Three classes from vectors of 4."""
    g = torch.Generator().manual_seed(1)
    inputs = torch.randn(TRAIN + VAL, 4, generator=g)
    targets = (inputs @ torch.randn(4, 3, generator=g)).argmax(1)
    return _problem(partial(networks.mlp, 4, 3, (6, 5)), likelihoods.Categorical(), inputs, targets)


def cnn() -> Problem:
    """Three classes from images of 6 x 6."""
    g = torch.Generator().manual_seed(2)
    inputs = torch.randn(TRAIN + VAL, 1, 6, 6, generator=g)
    targets = (inputs.flatten(1) @ torch.randn(36, 3, generator=g)).argmax(1)
    return _problem(small_cnn, likelihoods.Categorical(), inputs, targets)


def regression() -> Problem:
    """Two outputs from vectors of 3, with noise of unknown size."""
    g = torch.Generator().manual_seed(3)
    inputs = torch.randn(TRAIN + VAL, 3, generator=g)
    targets = inputs @ torch.randn(3, 2, generator=g) + 0.3 * torch.randn(TRAIN + VAL, 2, generator=g)
    network = partial(networks.mlp, 3, 2, (5,), "tanh")
    return _problem(network, likelihoods.Gaussian("learned", 2), inputs, targets)


def straight_line() -> Problem:
    """A slope and an intercept."""
    g = torch.Generator().manual_seed(4)
    inputs = torch.randn(TRAIN + VAL, 1, generator=g)
    targets = 0.7 * inputs - 0.2 + 0.5 * torch.randn(TRAIN + VAL, 1, generator=g)
    return _problem(line, likelihoods.Gaussian(0.5), inputs, targets)


def residual() -> Problem:
    """Three classes by a network that is no plain stack."""
    return _of(mlp(), lambda dropout=0.0: Residual(dropout))


def large() -> Problem:
    """Two outputs by a network with a tensor of more than 10,000 weights, which takes other paths."""
    g = torch.Generator().manual_seed(5)
    inputs = torch.randn(TRAIN + VAL, 101, generator=g)
    targets = inputs[:, :2] + 0.3 * torch.randn(TRAIN + VAL, 2, generator=g)
    return _problem(partial(networks.mlp, 101, 2, (100,)), likelihoods.Gaussian(0.5), inputs, targets)


def known_noise() -> Problem:
    """The regression problem with noise of known size."""
    return replace(regression(), likelihood=likelihoods.Gaussian(0.3, 2))


def varying_noise() -> Problem:
    """A number from vectors of 3, with noise that the network gives as its second output."""
    problem = regression()

    def one_target(part: Any) -> TensorDataset:
        inputs, targets = part.tensors
        return TensorDataset(inputs, targets[:, :1])

    train, val = one_target(problem.train), one_target(problem.val)
    return replace(problem, likelihood=likelihoods.Heteroscedastic(), train=train, val=val)


def linear() -> Problem:
    """Two outputs, linear in vectors of 3, with noise of known size."""
    return _of(known_noise(), linear_network)


def pixels() -> Problem:
    """The problem from images with pixels in [0, 1]."""
    problem = cnn()
    train, val = (TensorDataset(x.sigmoid(), y) for x, y in map(tensors, (problem.train, problem.val)))
    return replace(problem, train=train, val=val)


def pixel_line() -> Problem:
    """A slope and an intercept for two classes from one pixel."""
    problem = straight_line()
    train, val = (
        TensorDataset(x.sigmoid(), (y[:, 0] > 0).float())
        for x, y in map(tensors, (problem.train, problem.val))
    )
    return replace(problem, likelihood=likelihoods.Bernoulli(), train=train, val=val)


class Pretrained(nn.Module):
    """Frozen are two layers that share a weight, a normalisation and a convolution; the last is free."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.enter.weight
        self.norm, self.convolution = nn.BatchNorm1d(4), nn.Conv1d(1, 1, 3, padding=1)
        self.leave = nn.Linear(4, 3)
        self.dropout = nn.Dropout(dropout)
        g = torch.Generator().manual_seed(7)
        for name, tensor in self.state_dict().items():
            if not name.startswith("leave.") and tensor.is_floating_point():
                tensor.copy_(2 * torch.rand(tensor.shape, generator=g) + 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores `[B, 3]`."""
        hidden = self.norm(self.again(self.enter(inputs).tanh())).tanh()
        return self.leave(self.dropout(self.convolution(hidden[:, None])[:, 0]))


def pretrained(dropout: float = 0.0) -> nn.Module:
    """The network as a task with `--task.freeze true` poses it."""
    own_network.imported["problems:Pretrained"] = lambda inputs, outputs: Pretrained(dropout)
    return own_network.network("problems:Pretrained", (4,), 3, True, dropout)


def frozen() -> Problem:
    """Three classes by a network of which all but the last layer is frozen."""
    return _of(mlp(), pretrained)


PROBLEMS = {"mlp": mlp, "cnn": cnn, "regression": regression}
UNUSUAL = {
    "residual": residual,
    "large": large,
    "known_noise": known_noise,
    "varying_noise": varying_noise,
    "linear": linear,
    "pixels": pixels,
}
ALL = PROBLEMS | UNUSUAL
INSTEAD = {
    "mlp": ("linear", "pixels"),
    "cnn": ("linear", "pixels"),
    "regression": ("known_noise", "linear", "pixels"),
}
"""What a method that refuses a problem is tried on in its place."""


@cache
def posed(name: str) -> Problem:
    """The problem of this name, made once."""
    return ALL[name]()


def with_rows(problem: Problem, rows: Tensor, weights: Tensor | None = None) -> Problem:
    """The problem with other training rows, perhaps weighted."""
    columns = [t[rows] for t in tensors(problem.train)]
    if weights is not None:
        columns.append(weights)
    return replace(problem, train=TensorDataset(*columns), num_train=len(rows))
