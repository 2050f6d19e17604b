"""Stand-ins for data that cannot be had offline: tables in the published layouts and sizes, small CIFARs."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from bench import tables
from bench.laws.truth import small_chains
from bench.laws.truth import small_cifar as cifar

__all__ = ["chains", "cifar", "table", "with_other_targets", "write_public"]


def chains(data_dir: str | Path | None = None) -> np.ndarray:
    """Probabilities for the test images of `cifar`, in place of `bench.studies.hmc_predictions.load`."""
    return small_chains(500)


def table(name: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs `[N, D]` and targets `[N]` of a table's size and range of targets; the content is made up."""
    source = tables.SOURCES[name]
    draw = np.random.default_rng(seed)
    inputs = draw.normal(size=(source.rows, source.columns)) * 10.0 ** np.arange(-2, source.columns - 2)
    inputs[:, 0] = 0.998  # a column that never changes, as in naval
    targets = np.sin(inputs[:, 1]) + inputs[:, 2] ** 2 + 0.1 * draw.normal(size=source.rows)
    low, high = source.target_range
    targets = low + (high - low) * (targets - targets.min()) / np.ptp(targets)
    return inputs, targets


def write_public(root: Path, name: str, splits: int = 0, seed: int = 0) -> Path:
    """Writes a generated table as the public repositories of splits have it; returns the folder of the files.

    The target stands first, so that the index files are needed, and they hold floats, as some public ones do.
    A table whose splits are masks gets all ten of them.
    """
    source = tables.SOURCES[name]
    if source.masks:
        return write_masked(root, name, seed)
    folder = root / source.folder / "data"
    folder.mkdir(parents=True)
    inputs, targets = table(name, seed)
    np.savetxt(folder / "data.txt", np.column_stack([targets, inputs]), fmt="%.17g")
    np.savetxt(folder / "index_features.txt", np.arange(1, source.columns + 1))
    np.savetxt(folder / "index_target.txt", [0], fmt="%d")
    draw = np.random.default_rng(seed)
    for k in range(splits):
        order = draw.permutation(source.rows)
        cut = round(0.9 * source.rows)
        np.savetxt(folder / f"index_train_{k}.txt", order[:cut], fmt="%d")
        np.savetxt(folder / f"index_test_{k}.txt", order[cut:], fmt="%d")
    return folder


def write_masked(root: Path, name: str, seed: int = 0) -> Path:
    """Writes a generated table as uci_datasets has it, its folds in random order of the rows."""
    source = tables.SOURCES[name]
    folder = root / "uci_datasets" / source.folder
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.csv.gz", np.column_stack(table(name, seed)), fmt="%.17g", delimiter=",")
    fold = np.random.default_rng(seed).permutation(np.arange(source.rows) % source.splits)
    masks = fold[:, None] == np.arange(source.splits)
    np.savetxt(folder / "test_mask.csv.gz", masks, fmt="%d", delimiter=",")
    return folder


def with_other_targets(known: tables.Table, rows: np.ndarray) -> tables.Table:
    """The table with the targets of these rows turned around."""
    targets = known.targets.copy()
    targets[rows] = targets[rows][::-1]
    return replace(known, targets=targets)
