"""Rounds: predictions for a test set whose truth nobody knows but a maintainer's secret.

    open      a secret seed draws a fresh test set (`bench.fresh`), and its order; the inputs are published,
              and a commitment to the seed and the truth
    predict   a finished run's method, fitted on the task's own training data, predicts for the inputs
    enter     predictions are handed in, each beside the record of its run
    close     the seed and the truth are shown, entries are scored and ranked; nothing enters any more
    check     by anybody: the commitment, the draw, the entries and the ranks are what was said

A round is a directory:

    round.json                  task, settings, SHA-256 of the inputs, commitment
    inputs.safetensors          the inputs, in shuffled order
    entries/<slug>/<task>/<method>/seed<k>/record.json, arrays.safetensors
    truth.safetensors, closed.json      once it is closed

The commitment is the SHA-256 of a JSON object that holds 256 random bits beside seed and truth. So it binds,
since nobody finds another object of this hash, and it hides, since few labels could be guessed and tried.
Nothing is unpickled, and no name of an entry is looked up.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import pydantic
import safetensors.numpy

from bench import randomness
from bench.errors import BenchError, UsageError
from bench.fresh import Fresh
from bench.leaderboard.check.codes import Rejected
from bench.leaderboard.check.reading import arrays_of, parsed, read_header, read_record
from bench.leaderboard.check.scoring import refuse_values
from bench.leaderboard.check.structure import tree
from bench.leaderboard.evidence.store import sha256
from bench.leaderboard.evidence.submission import SLUG, run_name, seed_of
from bench.leaderboard.rank.cells import entry_name
from bench.leaderboard.rank.ranking import Entry, Replicate, Standing, rank
from bench.runs import registry
from bench.runs.plan import known_preset
from bench.runs.records import Record
from bench.settings import Schema, build
from bench.spec import Arrays, Layout, array_digest, misfit
from bench.system.files import locked, read, write_all, write_folder, writing
from bench.text import one_line

if TYPE_CHECKING:
    from bench.contract import Task

SCHEMA_VERSION: Final = 1
ROUND, INPUTS, ENTRIES, TRUTH, CLOSED = (
    "round.json",
    "inputs.safetensors",
    "entries",
    "truth.safetensors",
    "closed.json",
)
_BITS = 256
_WITHIN: Final = 1e-6
"""Relative error of numbers that another processor may compute otherwise."""
_Hex = Annotated[str, pydantic.StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Round(Schema):
    """`round.json`: what is predicted, and what binds the maintainer.

    Attributes:
        schema_version: Version of this schema.
        task: Name of the task.
        version: Its version.
        settings: All its settings.
        inputs: SHA-256 of the file of the inputs.
        commitment: `commitment` of the secret and the truth.
    """

    schema_version: Literal[1]
    task: str
    version: int
    settings: dict[str, Any]
    inputs: _Hex
    commitment: _Hex


class Secret(Schema):
    """What a maintainer keeps until the round closes: seed and nonce, each 256 random bits in hexadecimal."""

    schema_version: Literal[1]
    seed: _Hex
    nonce: _Hex


class Placed(Schema):
    """Where an entry stands: mean loss in nats with its interval, first and last rank, tie group, seeds."""

    name: str
    mean: float
    low: float | None
    high: float | None
    ranks: list[int] | None
    group: int | None
    seeds: int
    why: str


class Closed(Schema):
    """`closed.json`: the secret, the digest of every file of an entry, and the ranks, best first."""

    schema_version: Literal[1]
    secret: Secret
    files: dict[str, _Hex]
    places: list[Placed]


# -------------------------------------------------------------------------------------------------- opening


def open_round(
    name: str, to: Path, secret: Path, preset: str = "standard", data_dir: str | None = None
) -> None:
    """Opens a round of a task.

    Args:
        name: Of the task.
        to: The round's new directory, which is published.
        secret: New file for what is not; it is for the user's eyes alone.
        preset: Of the task's settings.
        data_dir: Folder of data files.

    Raises:
        UsageError: If the task draws no test sets, or a file is there already.
        OutputError: If something cannot be written.
    """
    entry = registry.task(name)
    values = {**entry.fixed, **entry.presets.get(known_preset(preset), {})}
    task: Task = entry.cls(build(entry.cls.settings_class, values, "task"), data_dir)
    fresh = fresh_of(task, name)
    if to.exists():
        raise UsageError(f"{to} is there already: it is kept; choose another name")
    if secret.resolve().is_relative_to(to.resolve()):
        raise UsageError(f"--secret {secret} lies in the round's directory, which is published")
    hidden = Secret(schema_version=1, seed=secrets.token_hex(_BITS // 8), nonce=secrets.token_hex(_BITS // 8))
    inputs, truth = drawn(fresh, hidden)
    content = safetensors.numpy.save(inputs)
    opened = Round(
        schema_version=SCHEMA_VERSION,
        task=name,
        version=task.spec.version,
        settings=asdict(task.settings),
        inputs=sha256(content),
        commitment="0" * 64,
    )
    opened = opened.model_copy(update={"commitment": commitment(opened, hidden, truth)})
    _write_secret(secret, hidden)  # first: a round without its secret could never close
    write_folder(to, {ROUND: _json(opened), INPUTS: content})


def fresh_of(task: Task, name: str) -> Fresh:
    """How a task draws test sets.

    Raises:
        UsageError: If it draws none; names the tasks that do.
    """
    if (fresh := task.fresh()) is None:
        able = [other for other, entry in registry.tasks().items() if _draws(entry)]
        raise UsageError(f"{name} has no rounds: it draws no test inputs; those that do: {', '.join(able)}")
    return fresh


def _draws(entry: registry.Entry) -> bool:
    """Whether a task of the suite draws test sets; one that needs a user's own files does not."""
    try:
        task: Task = entry.cls(build(entry.cls.settings_class, dict(entry.fixed), "task"), None)
        return task.fresh() is not None
    except BenchError:
        return False


def drawn(fresh: Fresh, secret: Secret) -> tuple[Arrays, Arrays]:
    """Inputs and truth of a secret, both in the order that the secret shuffles."""
    seed = int(secret.seed, 16)
    inputs, truth = fresh.draw(seed)
    number = len(next(iter(inputs.values())))
    order = np.random.default_rng(randomness.derive(seed, "order of a round")).permutation(number)
    shuffled = [
        {name: np.ascontiguousarray(array[order]) for name, array in of.items()} for of in (inputs, truth)
    ]
    return shuffled[0], shuffled[1]


def commitment(opened: Round, secret: Secret, truth: Arrays) -> str:
    """SHA-256 of what a round is of, its secret and its truth."""
    bound = opened.model_dump(exclude={"commitment"}) | secret.model_dump() | {"truth": array_digest(truth)}
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


def _write_secret(path: Path, secret: Secret) -> None:
    """Writes the secret to a new file that only its owner reads."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"--secret {path} is there already: it is kept; choose another name") from None
    with writing(path), open(descriptor, "wb") as file:
        file.write(_json(secret))
        file.flush()
        os.fsync(file.fileno())


def _json(model: Schema) -> bytes:
    return (model.model_dump_json(indent=2) + "\n").encode()


# ----------------------------------------------------------------------------------------------- predicting


class Opened(NamedTuple):
    """A round as it lies here: its directory, `round.json`, the task, and how that draws and scores."""

    directory: Path
    said: Round
    task: Task
    fresh: Fresh


_Model = TypeVar("_Model", bound=Schema)


def opened(directory: Path, data_dir: str | None = None) -> Opened:
    """Reads a round.

    Raises:
        UsageError: If it is none of this suite's.
    """
    said = _read(Round, directory / ROUND)
    entry = registry.task(said.task)
    task: Task = entry.cls(build(entry.cls.settings_class, said.settings, "task"), data_dir)
    if task.spec.version != said.version:
        raise UsageError(
            f"{directory} is of version {said.version} of {said.task}, now of {task.spec.version}"
        )
    return Opened(directory, said, task, fresh_of(task, said.task))


def predict(round_: Opened, runs: Sequence[Path], to: Path, data_dir: str | None = None) -> None:
    """Predicts for a round's inputs by the methods of finished runs, and writes what is handed in.

    Args:
        round_: The round.
        runs: Directories of completed runs of its task and settings, with their checkpoints.
        to: The new directory; its name is the slug.
        data_dir: Folder of data files.

    Raises:
        UsageError: If a run is of another task or has no checkpoint, the inputs are not those of the round,
            or the directory is there.
        Diverged: If a prediction is not finite.
    """
    from bench.runs.records import read_record
    from bench.runs.runner import predicting

    _slug(to)
    if to.exists():
        raise UsageError(f"{to} is there already: it is kept; choose another name")
    inputs = _inputs(round_)
    contents: dict[str, bytes] = {}
    for run in runs:
        record = read_record(run)
        _refuse_other(round_, record, str(run))
        arrays = round_.fresh.predict(*predicting(run, "round", data_dir), inputs)
        name = run_name(record.task.identity, record.method.identity, record.seed)
        if f"{name}/record.json" in contents:
            raise UsageError(f"{run}: seed {record.seed} of {record.method.identity} is given twice")
        contents[f"{name}/record.json"] = read(run / "record.json")
        contents[f"{name}/arrays.safetensors"] = safetensors.numpy.save(
            {key: np.ascontiguousarray(array) for key, array in sorted(arrays.items())}
        )
    write_folder(to, contents)


def _inputs(round_: Opened) -> Arrays:
    """The inputs, if they are those of the round."""
    content = _bytes(round_.directory / INPUTS)
    if sha256(content) != round_.said.inputs:
        raise UsageError(
            f"{round_.directory / INPUTS} is not the file that {ROUND} names: its sha256 is another"
        )
    stored = arrays_of(content, read_header(content, INPUTS))
    return {name: array.copy() for name, array in stored.items()}  # which can be written, as torch asks


def _refuse_other(round_: Opened, record: Record, where: str) -> None:
    """Refuses a run that is not of the round's task and settings, or did not complete."""
    said, task = round_.said, record.task
    if record.status != "completed":
        raise UsageError(f"{where}: the run {record.status}")
    if (task.name, task.version) != (said.task, said.version) or task.settings != said.settings:
        raise UsageError(f"{where} is of another task, version or settings than the round of {said.task}")


def _slug(directory: Path) -> str:
    slug = directory.resolve().name
    if not SLUG.fullmatch(slug):
        raise UsageError(f"{directory}: its name is the slug, 1 to 64 of a-z, 0-9 and -")
    return slug


# ----------------------------------------------------------------------------------------------- handing in


class Predicted(NamedTuple):
    """One run's predictions for a round: who handed in, the record, the arrays."""

    slug: str
    record: Record
    arrays: Arrays

    @property
    def entry(self) -> str:
        """The entry that the run is a seed of, as the board names entries."""
        return entry_name(self.record.method.identity.replace("~", "-"), self.slug)


def enter(round_: Opened, entry: Path) -> Path:
    """Hands predictions in; returns where they lie in the round.

    Raises:
        UsageError: If the round is closed, or the slug is taken.
        Rejected: If the predictions are not what the round takes, or another's.
    """
    to = round_.directory / ENTRIES / _slug(entry)
    with locked(round_.directory, wait=True):
        if (round_.directory / CLOSED).exists():
            raise UsageError(f"{round_.directory} is closed: what is handed in now counts for nothing")
        if to.exists():
            raise UsageError(f"{to} is there already: it is kept; choose another slug")
        contents, runs = _read_entry(round_, entry)
        others = [run for slug in _slugs(round_) for run in _read_entry(round_, _place(round_, slug))[1]]
        _refuse_copies([*others, *runs])
        write_folder(to, contents)
    return to


def _place(round_: Opened, slug: str) -> Path:
    return round_.directory / ENTRIES / slug


def _slugs(round_: Opened) -> list[str]:
    """Who has handed in."""
    folder = round_.directory / ENTRIES
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _read_entry(round_: Opened, entry: Path) -> tuple[dict[str, bytes], list[Predicted]]:
    """The files of an entry, and its runs; every limit and check of a submission's files holds.

    Raises:
        Rejected: With the first reason found.
        UsageError: If a run is of another task or settings than the round.
    """
    slug = _slug(entry)
    found = tree(entry)
    contents = {name: found.read(name) for name in sorted(found.files)}
    runs, seeds = [], defaultdict(list)
    for name in (name for name in contents if name.endswith("/record.json")):
        place = name.removesuffix("/record.json")
        record = read_record(contents[name], f"{slug}/{name}")
        _refuse_other(round_, record, f"{slug}/{place}")
        if place != run_name(record.task.identity, record.method.identity, record.seed):
            raise Rejected("run-misplaced", f"{slug}/{place} holds a record of another run")
        arrays_name = f"{place}/arrays.safetensors"
        if arrays_name not in contents:
            raise Rejected("arrays-missing", f"{slug}/{place} has no arrays.safetensors")
        content = contents[arrays_name]
        arrays = arrays_of(content, read_header(content, f"{slug}/{arrays_name}"))
        runs.append(Predicted(slug, record, arrays))
        seeds[place.rpartition("/")[0]].append(seed_of(Path(place)))
    if len(contents) != 2 * len(runs) or not runs:
        raise Rejected("file-unknown", f"{slug}: an entry holds runs, each of two files, and nothing else")
    for cell, of_cell in seeds.items():
        if sorted(of_cell) != list(range(len(of_cell))):
            raise Rejected("seeds-not-contiguous", f"{slug}/{cell}: its seeds must be 0, 1, 2 and so on")
    layouts = _layouts(round_)
    for run in runs:
        where = f"{slug}: seed {run.record.seed} of {run.record.method.identity}"
        found_ = {name: (array.dtype.name, array.shape) for name, array in run.arrays.items()}
        if wrong := misfit(layouts, found_):
            raise Rejected("arrays-unexpected", f"{where}: {wrong}")
        refuse_values(where, run.arrays, layouts)
    return contents, runs


def _layouts(round_: Opened) -> dict[str, Layout]:
    """What predictions for the round look like: N is the number of its inputs."""
    number = len(next(iter(_inputs(round_).values())))

    def sized(axis: Any) -> Any:
        return tuple(map(sized, axis)) if isinstance(axis, tuple) else number if axis == "N" else axis

    return {
        name: layout._replace(shape=tuple(map(sized, layout.shape)))
        for name, layout in round_.fresh.layouts.items()
    }


def _refuse_copies(runs: Sequence[Predicted]) -> None:
    """Refuses predictions that two entries have."""
    first: dict[str, Predicted] = {}
    for run in runs:
        twin = first.setdefault(array_digest(run.arrays), run)
        if twin.entry != run.entry:
            raise Rejected("duplicate-entry", f"{run.entry} has the predictions of {twin.entry}")


# ------------------------------------------------------------------------------------------ closing, checking


def close(round_: Opened, secret: Path) -> Closed:
    """Shows the truth, scores and ranks the entries, and lets nothing more in.

    Raises:
        UsageError: If the round is closed already, or the secret is not its own.
        Rejected: If an entry is not as it was handed in.
    """
    hidden = _read(Secret, secret)
    _, truth = drawn(round_.fresh, hidden)
    if commitment(round_.said, hidden, truth) != round_.said.commitment:
        raise UsageError(f"{secret} is not the secret of {round_.directory}: {ROUND} commits to another")
    with locked(round_.directory, wait=True):
        if (round_.directory / CLOSED).exists():
            raise UsageError(f"{round_.directory} is closed already")
        files, places = _ranked(round_, truth, _slugs(round_))
        closed = Closed(schema_version=1, secret=hidden, files=files, places=places)
        shown = {TRUTH: safetensors.numpy.save(truth), CLOSED: _json(closed)}
        write_all({round_.directory / name: content for name, content in shown.items()})
    return closed


def check(round_: Opened) -> Closed | None:
    """Holds a round to what it says, by anybody and without trust; None of one that is open and stands.

    Raises:
        BenchError: If inputs, truth, seed or ranks are others than those that the round committed to or its
            secret draws, or entries are others than when it closed; in one line.
    """
    _inputs(round_)
    if not (round_.directory / CLOSED).exists():
        for slug in _slugs(round_):
            _read_entry(round_, _place(round_, slug))
        return None
    closed = _read(Closed, round_.directory / CLOSED)
    content = _bytes(round_.directory / TRUTH)
    truth = arrays_of(content, read_header(content, TRUTH))
    if commitment(round_.said, closed.secret, truth) != round_.said.commitment:
        raise BenchError(f"{round_.directory}: seed, nonce or truth are not those that {ROUND} committed to")
    for ours, theirs in zip(drawn(round_.fresh, closed.secret), (_inputs(round_), truth), strict=True):
        if (name := _other(ours, theirs)) is not None:
            raise BenchError(f"{round_.directory}: the seed draws other {name}")
    slugs = sorted({name.partition("/")[0] for name in closed.files})
    if late := sorted({*_slugs(round_)} - {*slugs}):
        raise BenchError(f"{round_.directory}: {late[0]} was handed in after the round had closed")
    files, places = _ranked(round_, truth, slugs)
    if changed := sorted(dict(files.items() ^ closed.files.items())):
        raise BenchError(f"{round_.directory}: {changed[0]} is not as it was when the round closed")
    for first, second in zip(places, closed.places, strict=False):
        if not _alike(first, second):
            raise BenchError(
                f"{round_.directory}: {CLOSED} ranks {second.name} otherwise than its predictions"
            )
    if len(places) != len(closed.places):
        raise BenchError(f"{round_.directory}: {CLOSED} has {len(closed.places)} entries of {len(places)}")
    return closed


def _other(ours: Arrays, theirs: Arrays) -> str | None:
    """Name of an array that differs; numbers may by rounding."""
    if wrong := ours.keys() ^ theirs.keys():
        return min(wrong)
    for name, own in ours.items():
        given = theirs[name]
        is_same = own.dtype == given.dtype and own.shape == given.shape
        if not (is_same and np.allclose(given, own, rtol=_WITHIN, atol=0)):
            return name
    return None


def _alike(first: Placed, second: Placed) -> bool:
    """Whether two places are the same but for rounding."""
    numbers = [
        [np.nan if number is None else number for number in (place.mean, place.low, place.high)]
        for place in (first, second)
    ]
    exact = [place.model_dump(exclude={"mean", "low", "high"}) for place in (first, second)]
    return exact[0] == exact[1] and np.allclose(
        numbers[0], numbers[1], rtol=_WITHIN, atol=1e-9, equal_nan=True
    )


def _ranked(round_: Opened, truth: Arrays, slugs: Sequence[str]) -> tuple[dict[str, str], list[Placed]]:
    """Digests of all files of the entries, and where these stand."""
    files: dict[str, str] = {}
    entries: dict[str, list[Replicate]] = defaultdict(list)
    seed_matters: dict[str, bool] = {}
    for slug in slugs:
        contents, runs = _read_entry(round_, _place(round_, slug))
        files |= {f"{slug}/{name}": sha256(content) for name, content in contents.items()}
        for run in runs:
            losses = _losses(round_, run, truth)
            replicate = Replicate(float(losses.mean()), losses, array_digest(run.arrays))
            entries[run.entry].append(replicate)
            seed_matters[run.entry] = run.record.method.seed_matters is not False
    standing = rank([Entry(name, runs, seed_matters[name]) for name, runs in entries.items()], False)
    return files, _places(standing, {name: len(runs) for name, runs in entries.items()})


def _losses(round_: Opened, run: Predicted, truth: Arrays) -> np.ndarray:
    """Losses of a run, in nats, `[N]`.

    Raises:
        Rejected: If one is not finite, or its arrays give none.
    """
    try:
        losses = np.asarray(round_.fresh.losses(run.arrays | truth), np.float64)
    except (ValueError, BenchError) as error:
        raise Rejected("score-failed", f"{run.entry}: {one_line(error)}") from None
    if not np.isfinite(losses).all():
        raise Rejected("arrays-not-finite", f"{run.entry}: the loss of an example is not finite")
    return losses


def _places(standing: Standing, seeds: dict[str, int]) -> list[Placed]:
    found = []
    for place in standing.places:
        assert place.cell is not None  # every run has a value
        low, high = (float(x) if np.isfinite(x) else None for x in (place.cell.low, place.cell.high))
        found.append(
            Placed(
                name=place.name,
                mean=float(place.cell.centre),
                low=low,
                high=high,
                ranks=None if place.ranks is None else list(place.ranks),
                group=place.group,
                seeds=seeds[place.name],
                why=place.why,
            )
        )
    return found


def _bytes(path: Path) -> bytes:
    try:
        return read(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def _read(model: type[_Model], path: Path) -> _Model:
    """A file of a round, which somebody else may have written."""
    try:
        return parsed(model, _bytes(path), str(path))
    except Rejected as reason:
        raise UsageError(str(reason)) from None
