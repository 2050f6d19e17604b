"""What the methods with generative replay have in common: two fits in a row, and generators that remember."""

from dataclasses import replace

import torch
from conformance import problems
from torch import nn
from torch.utils.data import TensorDataset

from bench import likelihoods, networks, priors
from bench.contract import Budget, Problem
from bench.engine.engine import Engine, TrainerOptions

FEW = {"generator_steps": 20, "generator_hidden": 16, "generator_latent": 3}
"""Settings of a generator that is trained in no time."""


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def engine(cls, seed=0, **values):
    return Engine(cls, cls.settings_class(**values), seed, trainer=TrainerOptions(accelerator="cpu"))


def later(rows=8):
    """A second problem: the last rows of the first under labels of their own."""
    problem = problems.pixels()
    inputs, targets = problem.train.tensors
    return replace(problem, train=TensorDataset(inputs[-rows:], (targets[-rows:] + 1) % 3), num_train=rows)


def second(cls, seed=0, problem=None, **values):
    """An untrained second fit, in float64, after a first one on all 20 rows."""
    values = FEW | values
    fitted = engine(cls, seed, **values).fit(problems.pixels(), Budget(3, 8))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cls(problem or later(), cls.settings_class(**values), fitted).double()


class Remembers(nn.Module):
    """In place of a generator: examples as they are, in order or drawn with replacement."""

    def __init__(self, inputs, in_order):
        super().__init__()
        self.inputs, self.in_order = inputs, in_order

    def sample(self, size, generator):
        """Inputs `[size, ...]`."""
        if self.in_order:
            assert size == len(self.inputs)
            return self.inputs
        return self.inputs[torch.randint(len(self.inputs), (size,), generator=generator)]


def doubled(problem):
    """The problem with inputs in float64."""
    train = TensorDataset(problem.train.tensors[0].double(), problem.train.tensors[1])
    return replace(problem, train=train)


def union(first, second):
    """One problem with the rows of both."""
    parts = zip(first.train.tensors, second.train.tensors, strict=True)
    train = TensorDataset(*(torch.cat(pair) for pair in parts))
    return replace(first, train=train, num_train=first.num_train + second.num_train)


def bars(classes, rows=200):
    """Images of 4 x 4 whose bright row is their class, with noise."""
    g = generator(classes[0])
    targets = torch.tensor(classes)[torch.randint(len(classes), (rows,), generator=g)]
    inputs = 0.3 * torch.rand(rows, 1, 4, 4, generator=g)
    inputs[torch.arange(rows), 0, targets] += 0.7
    network = lambda dropout=0.0: networks.mlp(16, 4, (20,))  # noqa: E731
    data = TensorDataset(inputs, targets)
    return Problem(network, likelihoods.Categorical(), priors.normal(0, 1), data, None, rows)


def accuracies_on_bars(cls, **values):
    """After two fits, on the classes {0, 1} and then {2, 3}: accuracy on both pairs."""
    run, method, prior = engine(cls, 0, **values), None, priors.normal(0, 1)
    for classes in ((0, 1), (2, 3)):
        problem = replace(bars(classes), prior=prior)
        method = run.fit(problem, Budget(15, 20), start=method)
        prior = method.as_prior()
    return [
        (run.predict(method, inputs, 20).average().argmax(1) == targets).double().mean().item()
        for inputs, targets in (bars(classes).train.tensors for classes in ((0, 1), (2, 3)))
    ]
