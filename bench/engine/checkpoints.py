"""Checkpoints: files that are written whole, and are checked before anything in them is used.

A checkpoint holds tensors and plain numbers in the format of `torch.save`, and ends with the SHA-256 of what
stands before it. torch alone would read a file with a flipped byte without a word.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.batches import few
from bench.contract import Method
from bench.errors import BenchError, UsageError
from bench.system import files

_DIGEST = hashlib.sha256().digest_size
_ROUNDING = 1e-3
"""By how much of its largest number a prediction may differ on another machine."""


class Damaged(UsageError):
    """A checkpoint that is not as it was written; `path` says which."""

    def __init__(self, path: Path) -> None:
        reason = "its content does not have the SHA-256 at its end"
        super().__init__(f"{path} is damaged: {reason}; bench run --force makes the run anew")
        self.path = path

    def __reduce__(self) -> tuple[type[Damaged], tuple[Path]]:
        return Damaged, (self.path,)


def save(content: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint in one step: the file is whole or not there.

    Raises:
        OutputError: If it cannot be written.
    """
    archive = io.BytesIO()
    torch.save(content, archive)
    archive.write(hashlib.sha256(archive.getbuffer()).digest())
    files.write(path, archive.getvalue())


def read(path: Path) -> dict[str, Any]:
    """What `save` has written, on the CPU.

    Raises:
        Damaged: If it was not written so.
        UsageError: If it cannot be read.
    """
    with fitting(path):
        content = files.read(path)
        if hashlib.sha256(memoryview(content)[:-_DIGEST]).digest() != content[-_DIGEST:]:
            raise Damaged(path)
        found: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        return found


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Around what reads a checkpoint and puts it to use.

    Raises:
        UsageError: One line that names the file, in place of what is raised at one of another layout.
    """
    try:
        yield
    except (BenchError, MemoryError):
        raise
    except Exception as error:  # of torch, Lightning or a method
        first = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"
        raise UsageError(f"{path} does not fit: {reason}; bench run --force makes the run anew") from None


def keep(method: Method, fit: dict[str, Any], path: Path) -> None:
    """Writes the checkpoint of a finished fit; that of the unfinished fit goes.

    Args:
        method: After the fit.
        fit: What the record says of the fit.
        path: Where to.
    """
    save(content(method, fit) | {"witness": _witness(method)}, path)
    _sweep(path)
    forget(partial(path))


def restore(method: Method, path: Path) -> dict[str, Any]:
    """Gives a new method the state that `keep` has written; returns what the record says of the fit.

    Raises:
        Damaged: If it was not written so; the method is then as it was.
        UsageError: If it was written for another method, or the method predicts otherwise than it did.
    """
    checkpoint = read(path)
    with fitting(path):
        fit = give(method, checkpoint)
        must_predict_alike(method, checkpoint, path)
    return fit


def _witness(method: Method) -> dict[str, Any] | None:
    """What a fitted method predicts for a few training inputs; None if it predicts nothing finite."""
    inputs = few(method.problem.train)
    try:
        return {"inputs": inputs, "prediction": _predicted(method, inputs)}
    except Exception:  # a defect of the method, which its next prediction tells
        return None


def _predicted(method: Method, inputs: Tensor) -> dict[str, Tensor]:
    """A prediction under a seed of its own; all generators stay as they are."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        prediction = method.predict(inputs, method.num_chains, torch.Generator().manual_seed(0))
    return {name: value.clone() for name, value in vars(prediction).items()}


def must_predict_alike(method: Method, content: dict[str, Any], path: Path) -> None:
    """Refuses a method that was rebuilt, and predicts otherwise than the one that was fitted.

    Args:
        method: With the state of the content.
        content: Of the checkpoint; one from before predictions were kept is taken as it is.
        path: Of the checkpoint.

    Raises:
        UsageError: If it does; one line.
    """
    witness = content.get("witness")
    if witness is None:
        return
    found = _predicted(method, witness["inputs"])
    for name, expected in witness["prediction"].items():
        bound = _ROUNDING * (1 + expected.abs().max())
        if found[name].shape != expected.shape or not (found[name] - expected).abs().max() <= bound:
            raise UsageError(
                f"{path}: what is built now predicts otherwise than what was fitted: the network, or the "
                "method, computes with something that is drawn or read where it is built and is not in its "
                "state_dict: make it a persistent buffer (register_buffer), or bring back the file with it"
            )


def content(method: Method, fit: dict[str, Any]) -> dict[str, Any]:
    """All that a fit is, and what the record says of it."""
    checkpoint = {"state_dict": method.state_dict(), "fit": fit, "diverged": method.diverged}
    method.on_save_checkpoint(checkpoint)
    return checkpoint


def give(method: Method, content: dict[str, Any]) -> dict[str, Any]:
    """Gives a method, new or of the same fit, a content; returns what the record says of the fit."""
    method.load_state_dict(content["state_dict"])
    method.on_load_checkpoint(content)
    method.diverged = content["diverged"]
    fit: dict[str, Any] = content["fit"]
    return fit


def name(count: int, stage: str) -> str:
    """The file of the `count`-th fit of a run; its stage stands in it for the reader's sake."""
    return f"{count:03d}-{re.sub('[^a-z0-9]+', '-', stage.lower())}.ckpt"


def partial(path: Path) -> Path:
    """The file that holds a fit while it is unfinished; `path` is that of its checkpoint afterwards."""
    return path.with_name(f"{path.name.removesuffix('.ckpt')}.partial")


def forget(path: Path) -> None:
    """Removes a checkpoint, and what a process that was killed while writing it has left."""
    path.unlink(missing_ok=True)
    _sweep(path)


def _sweep(path: Path) -> None:
    """Removes what killed processes have left of a checkpoint; the run's lock keeps living ones away."""
    for left in files.left_behind(path):
        left.unlink(missing_ok=True)
