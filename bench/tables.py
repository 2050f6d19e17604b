"""The regression tables: rows of numbers with one target, read from files or fetched, and checked.

They do not come with the package, and nobody published checksums: a table is known by its number of rows and
inputs and by the range of its target, and its digest tells which content was used.
"""

from __future__ import annotations

import gzip
import os
import re
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.data import array_digest
from bench.errors import DataError
from bench.system import places

ARCHIVE_URL = "https://archive.ics.uci.edu"
LICENCE = "CC BY 4.0"

Split = tuple[np.ndarray, np.ndarray]
"""Row numbers of the training and of the test part."""


@dataclass(frozen=True, eq=False)
class Table:
    """A regression data set.

    Attributes:
        inputs: [N, D] float64, as published.
        targets: [N] float64, in the target's own unit.
        published: The public splits that lie beside the table; empty if there are none.
        digest: `array_digest` of inputs and targets.
    """

    inputs: np.ndarray
    targets: np.ndarray
    published: tuple[Split, ...]
    digest: str


@dataclass(frozen=True)
class TableSource:
    """Where a table comes from and what it must look like.

    Attributes:
        title: Its usual name.
        target: What is predicted.
        unit: Unit of the target.
        rows: Number of rows.
        columns: Number of inputs.
        target_range: Least and largest target.
        folder: Its folder in the public repositories of splits; empty if it is embedded in scikit-learn.
        masks: Whether that is of the package uci_datasets, whose public splits are the masks of ten folds.
        splits: How many splits of it are usual.
        archive_file: A text file of the UCI archive that holds it, its target in column `archive_target`.
        archive_target: Column of the target in that file; the inputs are the other first columns.
        archive_id: Its number in the UCI archive's interface; None if it is not there.
        licence: The terms under which it may be used.
        digest: `array_digest` of the content where it is known.
    """

    title: str
    target: str
    unit: str
    rows: int
    columns: int
    target_range: tuple[float, float]
    folder: str = ""
    masks: bool = False
    splits: int = 20
    archive_file: str = ""
    archive_target: int = -1
    archive_id: int | None = None
    licence: str = LICENCE
    digest: str = ""

    @property
    def examples(self) -> str:
        """How many rows and inputs."""
        return f"{self.rows} x {self.columns}"


SOURCES = {
    "boston": TableSource(
        title="Boston housing",
        target="median value of homes",
        unit="1000 USD",
        rows=506,
        columns=13,
        target_range=(5.0, 50.0),
        folder="bostonHousing",
        archive_file="housing.data",
        archive_target=13,
        licence="unstated",
    ),
    "concrete": TableSource(
        title="Concrete compressive strength",
        target="compressive strength",
        unit="MPa",
        rows=1030,
        columns=8,
        target_range=(2.33, 82.6),
        folder="concrete",
        archive_id=165,
    ),
    "energy": TableSource(
        title="Energy efficiency",
        target="heating load Y1",
        unit="kWh/m^2",
        rows=768,
        columns=8,
        target_range=(6.01, 43.1),
        folder="energy",
        archive_id=242,
    ),
    "kin8nm": TableSource(
        title="Kinematics of an 8-link robot arm",
        target="distance of the end effector",
        unit="distance",
        rows=8192,
        columns=8,
        target_range=(0.0402, 1.4585),
        folder="kin8nm",
        licence="unstated",
    ),
    "naval": TableSource(
        title="Condition based maintenance of naval propulsion plants",
        target="gas turbine compressor decay state coefficient",
        unit="coefficient",
        rows=11_934,
        columns=16,
        target_range=(0.95, 1.0),
        folder="naval-propulsion-plant",
        archive_file="UCI CBM Dataset/data.txt",
        archive_target=16,
        archive_id=316,
    ),
    "power_plant": TableSource(
        title="Combined cycle power plant",
        target="electrical output",
        unit="MW",
        rows=9568,
        columns=4,
        target_range=(420.26, 495.76),
        folder="power-plant",
        archive_id=294,
    ),
    "protein": TableSource(
        title="Physicochemical properties of protein tertiary structure",
        target="root mean square deviation of the structure",
        unit="angstrom",
        rows=45_730,
        columns=9,
        target_range=(0.0, 20.999),
        folder="protein-tertiary-structure",
        splits=5,
        archive_file="CASP.csv",
        archive_target=0,
        archive_id=265,
    ),
    "wine": TableSource(
        title="Wine quality, red",
        target="quality",
        unit="points",
        rows=1599,
        columns=11,
        target_range=(3.0, 8.0),
        folder="wine-quality-red",
        archive_file="winequality-red.csv",
        archive_target=11,
        archive_id=186,
    ),
    "yacht": TableSource(
        title="Yacht hydrodynamics",
        target="residuary resistance per unit weight of displacement",
        unit="resistance",
        rows=308,
        columns=6,
        target_range=(0.01, 62.42),
        folder="yacht",
        archive_file="yacht_hydrodynamics.data",
        archive_target=6,
        archive_id=243,
    ),
    "airfoil": TableSource(
        title="Airfoil self-noise",
        target="sound pressure level less its mean",
        unit="dB",
        rows=1503,
        columns=5,
        target_range=(-21.456, 16.151),
        folder="airfoil",
        masks=True,
        splits=10,
    ),
    "bike": TableSource(
        title="Bike sharing by the hour",
        target="logarithm of the number of rentals less its mean",
        unit="log rentals",
        rows=17_379,
        columns=17,
        target_range=(-4.5361, 2.3484),
        folder="bike",
        masks=True,
        splits=10,
    ),
    "diabetes": TableSource(
        title="Diabetes progression, as embedded in scikit-learn",
        target="progression after one year",
        unit="score",
        rows=442,
        columns=10,
        target_range=(25.0, 346.0),
        licence="unstated",
        digest="c0bba048cf95a463cbde613bc9cf441bd559b8f0345ad6114c3a2c7f2fdb6d55",
    ),
}


# ------------------------------------------------------------------------------------------------- search


def _locate(name: str, data_dir: Path | str | None) -> tuple[Path, Table]:
    """Search the table; return its file and its checked content."""
    source = SOURCES[name]
    if not source.folder:
        return _embedded(source)
    roots = places.roots(data_dir)
    public = [f"{source.folder}/data", f"UCI_Datasets/{source.folder}/data", source.folder]
    needed, read = ("data.txt", "index_target.txt"), _read_public
    if source.masks:
        public = [f"uci_datasets/{source.folder}", source.folder]
        needed, read = ("data.csv.gz", "test_mask.csv.gz"), _read_masked
    for folder in (root / layout for root in roots for layout in public):
        if all((folder / name).is_file() for name in needed):
            return folder / needed[0], read(folder, source)
    if source.archive_file:
        for folder in (root / layout for root in roots for layout in (".", *public, name)):
            if (path := folder / source.archive_file).is_file():
                return path, _read_archive(path, source)
    ways = [
        f"with {source.folder}/data/ of the public UCI splits (its data.txt, index_features.txt and "
        "index_target.txt)"
    ]
    if source.masks:
        ways = [f"with {source.folder}/ of the public package uci_datasets (its {' and '.join(needed)})"]
    if source.archive_file:
        ways.append(f"with the UCI archive's {source.archive_file}")
    message = (
        f"{name} not found in {', '.join(map(str, roots))} (each with {', '.join(public)}); "
        f"give --data-dir or BENCH_DATA a folder {' or '.join(ways)}"
    )
    if source.archive_id is None:
        kind = " in this form" if source.masks else ""
        raise places.NotFound(f"{message}; it cannot be fetched, the UCI archive does not offer it{kind}")
    raise places.NotFound(
        f"{message}, or pip install 'posterior-bench[uci]' and run `bench data get {name}` "
        "on a machine with internet"
    )


def _read_public(folder: Path, source: TableSource) -> Table:
    """Read the layout of the public repositories: a matrix, and files that number its rows and columns."""
    matrix = _numbers(folder / "data.txt")
    features = _indices(folder / "index_features.txt", matrix.shape[1])
    target = _indices(folder / "index_target.txt", matrix.shape[1])
    if len(target) != 1 or target[0] in features:
        raise DataError(f"{folder}: expected one target that is no feature, found column {target.tolist()}")
    table = _checked(folder / "data.txt", source, matrix[:, features], matrix[:, target[0]])
    published: list[Split] = []
    while (path := folder / f"index_train_{len(published)}.txt").is_file():
        test_path = folder / f"index_test_{len(published)}.txt"
        train, test = _indices(path, len(matrix)), _indices(test_path, len(matrix))
        if not np.array_equal(np.sort(np.concatenate([train, test])), np.arange(len(matrix))):
            raise DataError(f"{path}: with {test_path.name} it must name each of the {len(matrix)} rows once")
        if published and len(test) != len(published[0][1]):
            raise DataError(
                f"{test_path}: expected {len(published[0][1])} rows as in split 0, found {len(test)}"
            )
        published.append((train, test))
    return Table(table.inputs, table.targets, tuple(published), table.digest)


def _read_masked(folder: Path, source: TableSource) -> Table:
    """Read the layout of uci_datasets: inputs and target by row, and by row and fold whether it is tested."""
    matrix = _numbers(folder / "data.csv.gz")
    table = _checked(folder / "data.csv.gz", source, matrix[:, :-1], matrix[:, -1])
    path = folder / "test_mask.csv.gz"
    masks = _numbers(path)
    if masks.shape != (source.rows, source.splits) or not np.isin(masks, (0, 1)).all():
        raise DataError(f"{path}: expected {source.splits} masks of {source.rows} rows, each 0 or 1")
    if (masks.sum(1) != 1).any():
        raise DataError(f"{path}: each row must be tested in one fold")
    sizes, least = masks.sum(0), source.rows // source.splits
    if sizes.min() < least or sizes.max() > least + 1:
        raise DataError(
            f"{path}: expected folds of {least} or {least + 1} rows, found {sizes.min():g} to {sizes.max():g}"
        )
    published = tuple((np.flatnonzero(mask == 0), np.flatnonzero(mask)) for mask in masks.T)
    return Table(table.inputs, table.targets, published, table.digest)


def _read_archive(path: Path, source: TableSource) -> Table:
    matrix = _numbers(path)
    if matrix.shape[1] <= source.columns:
        raise DataError(f"{path}: expected {source.columns + 1} columns, found {matrix.shape[1]}")
    columns = [c for c in range(matrix.shape[1]) if c != source.archive_target][: source.columns]
    return _checked(path, source, matrix[:, columns], matrix[:, source.archive_target])


def _numbers(path: Path) -> np.ndarray:
    """A matrix from text: columns parted by blanks, commas or semicolons, perhaps one line of names first."""
    try:
        is_packed = path.suffix == ".gz"
        text = gzip.decompress(path.read_bytes()).decode() if is_packed else path.read_text()
        lines = re.sub("[,;]", " ", text).split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    lines = [line for line in lines if line.strip()]
    if lines and not _is_number(lines[0].split()[0]):
        lines = lines[1:]
    if not lines:
        raise DataError(f"{path}: holds no numbers")
    try:
        return np.loadtxt(lines, ndmin=2, comments=None)
    except ValueError as error:
        reason = str(error).split("\n")[0]
        raise DataError(f"{path}: expected a table of numbers ({reason})") from None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _indices(path: Path, below: int) -> np.ndarray:
    """Numbers of rows or columns, from 0 to below `below`, each once."""
    numbers = _numbers(path).ravel()
    indices = numbers.astype(np.int64)
    if (numbers != indices).any() or indices.min() < 0 or indices.max() >= below:
        raise DataError(f"{path}: expected whole numbers from 0 to {below - 1}")
    if len(np.unique(indices)) != len(indices):
        raise DataError(f"{path}: holds a number twice")
    return indices


def _checked(where: Path | str, source: TableSource, inputs: np.ndarray, targets: np.ndarray) -> Table:
    """The table, if it has the known size and range of targets.

    The range tells a table from its siblings of equal size: the other target, the other wine.
    """
    if inputs.shape != (source.rows, source.columns):
        expected = f"{source.rows} rows and {source.columns} inputs"
        raise DataError(f"{where}: expected {expected}, found {inputs.shape[0]} and {inputs.shape[1]}")
    inputs, targets = np.ascontiguousarray(inputs, np.float64), np.ascontiguousarray(targets, np.float64)
    if not (np.isfinite(inputs).all() and np.isfinite(targets).all()):
        raise DataError(f"{where}: holds a number that is not finite")
    if not _in_range(targets, source):
        low, high = source.target_range
        raise DataError(
            f"{where}: expected the target {source.target} from {low:g} to {high:g} {source.unit}, "
            f"found {targets.min():g} to {targets.max():g}"
        )
    digest = array_digest({"inputs": inputs, "targets": targets})
    if source.digest and digest != source.digest:
        raise DataError(f"{where}: expected content sha256 {source.digest}, found {digest}")
    return Table(inputs, targets, (), digest)


def _in_range(targets: np.ndarray, source: TableSource) -> bool:
    low, high = source.target_range
    off = np.abs([targets.min() - low, targets.max() - high])
    return bool((off <= 0.01 * (high - low)).all())  # files round differently


def _embedded(source: TableSource) -> tuple[Path, Table]:
    from sklearn import datasets  # here, for its import takes a second

    raw = datasets.load_diabetes(scaled=False)
    path = Path(datasets.__file__).parent / "data" / "diabetes_data_raw.csv.gz"
    return path, _checked(path, source, raw.data, raw.target)


# -------------------------------------------------------------------------------------------------- fetch


def _fetch(source: TableSource, root: Path) -> None:
    """Puts the table of the UCI archive into `root`, by the archive's own package, if it is installed."""
    if source.archive_id is None:
        return
    try:
        import ucimlrepo  # optional, and it imports pandas
    except ImportError:
        return
    places.await_answer([ARCHIVE_URL])
    where = f"UCI archive, number {source.archive_id}"
    try:
        with places.impatient():
            answer = ucimlrepo.fetch_ucirepo(id=source.archive_id).data
    except Exception as error:  # it has exceptions of its own and lets those of pandas through
        raise DataError(f"{where}: {error}") from None
    _write(root / source.folder / "data", _from_frames(where, source, answer))


def _from_frames(where: str, source: TableSource, answer: Any) -> Table:
    features, targets = answer.features, answer.targets
    if "color" in answer.original:  # both wines are one data set there
        red = answer.original["color"] == "red"
        features, targets = features[red], targets[red]
    try:
        inputs, candidates = features.to_numpy(np.float64), targets.to_numpy(np.float64)
    except ValueError as error:
        raise DataError(f"{where}: expected a table of numbers ({error})") from None
    # Two sets have two targets, in an order that is not ours to know; their ranges tell them apart.
    ours = [column for column in candidates.T if _in_range(column, source)]
    return _checked(where, source, inputs, ours[0] if ours else candidates[:, 0])


def _write(folder: Path, table: Table) -> None:
    """Write the public layout; `index_target.txt`, without which it is not read, appears last."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = table.inputs.shape[1]
    files = {
        "data.txt": np.column_stack([table.inputs, table.targets]),
        "index_features.txt": np.arange(columns),
        "index_target.txt": np.array([columns]),
    }
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        for name, array in files.items():
            np.savetxt(Path(scratch) / name, array, fmt="%.17g")
            os.replace(Path(scratch) / name, folder / name)


def _told(source: TableSource, table: Table) -> str:
    return (
        f"{source.title}, {source.rows} rows, {source.columns} inputs, target {source.target} in "
        f"{source.unit}, {len(table.published)} public splits, content sha256 {table.digest}"
    )


_TABLES = places.Door("table", SOURCES, _locate, _fetch, _told)
load, find, get, check = _TABLES.load, _TABLES.find, _TABLES.get, _TABLES.check
