"""Methods and batches in float64, for oracles that compare to the last digits."""

import torch

from bench.contract import Batch


def off_start(cls, problem, settings):
    """A method off its start, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        method = cls(problem, settings).double()
        with torch.no_grad():
            for p in method.parameters():
                p += 0.3 * torch.randn_like(p)
    return method


def batch_of(problem):
    """All training examples."""
    inputs, targets = problem.train.tensors
    return Batch(inputs.double(), targets.double() if targets.is_floating_point() else targets)
