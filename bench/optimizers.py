"""The optimisers that the papers use, by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor, optim

Name = Literal["adam", "amsgrad", "sgd"]


def make(parameters: Iterable[Tensor], name: Name, learning_rate: float) -> optim.Optimizer:
    """Adam, Adam with AMSGrad, or SGD with Nesterov momentum 0.9, at a constant rate."""
    if name == "sgd":
        return optim.SGD(parameters, lr=learning_rate, momentum=0.9, nesterov=True)
    return optim.Adam(parameters, lr=learning_rate, amsgrad=name == "amsgrad", fused=True)
