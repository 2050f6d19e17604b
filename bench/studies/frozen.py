"""The frozen part of a network of one's own: what it says of every input is computed once, and kept.

Where all weights but those of the last layer are frozen, the outputs are that layer's of features which no
fit moves. `cut` finds out whether a network is so, by what it does; the fit then sees the features, and its
network is `head`. Both ways give the same posterior, to rounding.

Shapes: N inputs, B of a batch, P features.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench import networks, own_network
from bench.contract import NetworkFactory
from bench.spec import Arrays, array_digest
from bench.studies import trying
from bench.system import source
from bench.weights import channels_last

BATCH = 32
"""Inputs that are computed at once: activations of a deep network are large."""
_ROUNDING = 1e-3
"""By how much of the largest feature another machine may differ."""


class Part:
    """The frozen part of a network, as a function of its inputs.

    Args:
        made: The network, of which `cut` knows that it ends in its last layer.
        shape: Of one input.

    Attributes:
        witness: Features `[P]` of an input that nobody draws: a run keeps them.
    """

    def __init__(self, made: nn.Module, shape: tuple[int, ...]) -> None:
        self._made = made.eval()
        levels = torch.arange(math.prod(shape)) * 7919 % 251
        self.witness: list[float] = self([(levels / 125 - 1).view(1, *shape)])[0].tolist()

    def __call__(self, batches: Iterable[Tensor]) -> Tensor:
        """Features `[N, P]` of the inputs `[B, ...]` of batches, as the network takes them."""
        found = []
        for batch in batches:
            features = _features(self._made, batch)
            assert features is not None  # as it was when the network was cut
            found.append(features)
        return torch.cat(found)

    def digest(self, arrays: Arrays) -> str:
        """SHA-256 of all that decides features.

        That is the frozen tensors, the code of this suite that computes with them, and the versions of the
        packages that do.

        Args:
            arrays: What decides the inputs, and which files a network of one's own is made of.
        """
        sha = hashlib.sha256()
        for path, buffer in self._made.named_buffers():
            sha.update(json.dumps([path, str(buffer.dtype), list(buffer.shape)]).encode())
            sha.update(buffer.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        packages = {"torch", *(type(module).__module__.split(".")[0] for module in self._made.modules())}
        versions = [(name, str(getattr(sys.modules.get(name), "__version__", ""))) for name in packages]
        own = [source.file_hash(Path(file)) for file in (own_network.__file__, networks.__file__, __file__)]
        sha.update(json.dumps([sorted(versions), own]).encode())
        return array_digest({**arrays, "frozen part": np.frombuffer(sha.digest(), np.uint8)})

    def is_that_of(self, witness: list[float]) -> bool:
        """Whether this part computes the features `[P]` that a run has kept."""
        found, expected = torch.tensor(self.witness), torch.tensor(witness)
        if found.shape != expected.shape:
            return False
        return bool((found - expected).abs().max() <= _ROUNDING * (1 + expected.abs().max()))


def head(whole: NetworkFactory, dropout: float = 0.0) -> nn.Module:
    """A fresh last layer, and the dropout before it: a network of features `[B, P]`.

    Args:
        whole: Makes the network of which it is the last layer, and draws all weights as it does there.
        dropout: Rate of dropout.
    """
    return _end(whole(dropout=dropout))


def cut(make: NetworkFactory, inputs: Tensor) -> Part | str:
    """The frozen part of a network, or why its features would not be those of one fit after another.

    The network alone decides, so that all methods of a comparison go one way.

    Args:
        make: Makes the network, frozen but for its last layer and tried out (`bench.studies.trying`).
        inputs: Examples `[B, ...]`.
    """
    made, other = trying.fresh(make)[:2]
    last, *more = (layer for layer in made.modules() if [*layer.parameters(recurse=False)])
    if more or type(last) is not nn.Linear or last._buffers:
        return "its last layer is no nn.Linear of which all weights are free"
    features = _features(made, inputs)
    if features is None:
        return "it does not end with one call of its last layer, on vectors"
    with torch.no_grad():
        for weight in last.parameters():
            weight.copy_(torch.arange(weight.numel()).view_as(weight).cos())
    for network, why in (
        (made, "the weights of its last layer act before it too"),
        (other, "its frozen part is drawn anew for every fit"),
    ):
        again = _features(network, inputs)
        if again is None or not torch.equal(again, features):
            return why
    if not _follows(made, features, inputs, 0.0):
        return "more than its last layer stands behind its frozen part"
    if not _follows(made, features, inputs, 0.5):
        return "it has dropout inside its frozen part"
    return Part(made, tuple(inputs.shape[1:]))


def _last(made: nn.Module) -> nn.Module:
    """The one layer whose weights are free."""
    return next(layer for layer in made.modules() if [*layer.parameters(recurse=False)])


def _dropouts(made: nn.Module) -> list[networks.Dropout]:
    return [layer for layer in made.modules() if isinstance(layer, networks.Dropout)]


def _end(made: nn.Module) -> nn.Module:
    return nn.Sequential(*_dropouts(made), _last(made))


@torch.no_grad()
def _features(made: nn.Module, inputs: Tensor) -> Tensor | None:
    """What the last layer gets, `[B, P]`; None if it is not called once, on vectors, at the network's end."""
    seen: list[tuple[Any, Any]] = []
    handle = _last(made).register_forward_hook(lambda _, given, outputs: seen.append((given, outputs)))
    try:
        found = made(channels_last(inputs) if inputs.ndim == 4 else inputs)
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0][1] is not found or len(seen[0][0]) != 1:
        return None
    features: Tensor = seen[0][0][0]
    return features.clone() if features.ndim == 2 and features.dtype == torch.float32 else None


@torch.no_grad()
def _follows(made: nn.Module, features: Tensor, inputs: Tensor, rate: float) -> bool:
    """Whether the end makes of the features what the network makes of the inputs, at this rate of dropout."""
    outputs = []
    for layer in _dropouts(made):
        layer.p = rate
    for network, given in ((made, inputs), (_end(made), features)):
        with networks.dropout_masks(network, torch.Generator().manual_seed(0), False):
            outputs.append(network(given))
    for layer in _dropouts(made):
        layer.p = 0.0
    return torch.allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-5)
