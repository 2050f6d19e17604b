"""Arrays that took long to compute, kept on disk by a key that says all that decides them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from bench.errors import OutputError
from bench.system import files, places


def kept(
    kind: str,
    key: str,
    shape: tuple[int, ...],
    compute: Callable[[], np.ndarray],
    dtype: type[np.floating[Any]] = np.float32,
) -> np.ndarray:
    """An array of this shape and type: of an earlier run, else computed, and kept for the next.

    It lies in the folder `kind` of the project's cache, with the SHA-256 of its content. A file that is cut
    off, changed or of another shape is none, and is replaced. Where nothing can be written nothing is kept.

    Args:
        kind: Of arrays, a name of a folder.
        key: Fit for the name of a file; equal keys must mean equal arrays.
        shape: Of the array.
        compute: Gives it.
        dtype: Of its numbers.
    """
    path = places.CACHE_ROOT / kind / f"{key}.safetensors"
    found = _read(path, shape, dtype)
    if found is None:
        found = np.ascontiguousarray(compute(), dtype)
        with suppress(OutputError):  # a cache that cannot be written costs time, and no run
            files.write(path, safetensors.numpy.save({"array": found, "sha256": _digest(found)}))
    return found


def _digest(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest(), np.uint8)


def _read(path: Path, shape: tuple[int, ...], dtype: type[np.floating[Any]]) -> np.ndarray | None:
    """What `kept` has written; None where there is nothing, or something else."""
    try:
        content = safetensors.numpy.load(files.read(path))
    except (OSError, safetensors.SafetensorError, ValueError, KeyError):
        return None
    found, digest = content.get("array"), content.get("sha256")
    if found is None or digest is None or found.dtype != dtype or found.shape != shape:
        return None
    return found if np.array_equal(digest, _digest(found)) else None
