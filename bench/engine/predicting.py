"""Predictions in pieces of bounded memory; several processes of a run make some of the pieces each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.batches import inputs_of, most_rows
from bench.contract import Method, Prediction, Stored
from bench.errors import Diverged
from bench.predictions import BadPrediction
from bench.system.processes import from_each, ranks


def predict(
    method: Method,
    inputs: Tensor | Stored,
    num_samples: int,
    members: int,
    seed: int,
    stage: str,
    device: torch.device,
) -> tuple[Prediction, dict[str, float]]:
    """Predictions for inputs `[N, ...]`, on the CPU, in every process; and of their diagnostics the largest.

    Args:
        method: Fitted, on the CPU.
        inputs: All of them in every process.
        num_samples: Draws of the weights, of each member; every draw is shared by all inputs.
        members: Of the method, if it is an ensemble.
        seed: Of the draws.
        stage: Of the run, named in errors.
        device: Where to predict.

    Raises:
        Diverged: If a prediction is not finite.
    """
    rank, world = ranks()
    size = min(most_rows(inputs, 50 * num_samples * members), -(-len(inputs) // world))
    diagnostics: dict[str, float] = {}

    def own() -> dict[int, tuple[type[Prediction], dict[str, Tensor]]]:
        method.to(device)
        done = {}
        for i in range(rank, -(-len(inputs) // size), world):
            generator = torch.Generator(device).manual_seed(seed)
            piece = inputs_of(inputs, slice(i * size, (i + 1) * size), device)
            with finite_predictions(stage):
                prediction = method.predict(piece, num_samples, generator)
            for name, value in method.diagnostics(piece).items():
                diagnostics[name] = max(value, diagnostics.get(name, value))
            done[i] = type(prediction), {name: value.cpu() for name, value in vars(prediction).items()}
        method.to("cpu")
        return done

    shares = from_each(lambda: (own(), diagnostics))
    pieces: dict[int, Any] = {i: piece for done, _ in shares for i, piece in done.items()}
    largest: dict[str, float] = {}
    for _, found in shares:
        for name, value in found.items():
            largest[name] = max(value, largest.get(name, value))
    kind, first = pieces[0]
    joined = {name: torch.cat([pieces[i][1][name] for i in sorted(pieces)], 1) for name in first}
    return kind(**joined), largest


@contextmanager
def finite_predictions(stage: str) -> Iterator[None]:
    """A prediction that cannot be one, inside the block, is the divergence of the run."""
    try:
        yield
    except BadPrediction as error:
        raise Diverged(f"diverged at stage '{stage}': the prediction's {error}") from None
