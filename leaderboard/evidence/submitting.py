"""From runs to a submission, and from a submission that was verified into the project.

A submission is written whole or not at all, and the same runs and words give the same bytes every time.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import pydantic

from bench.errors import UsageError
from bench.leaderboard.evidence import submission
from bench.leaderboard.evidence.entries import as_kept, refuse
from bench.leaderboard.evidence.store import ARRAYS, STORE, keep, run_arrays, sha256
from bench.leaderboard.evidence.submission import (
    MANIFEST,
    NAME,
    SCHEMA_VERSION,
    SLUG,
    SUBMISSIONS,
    Submission,
    run_name,
)
from bench.runs import registry
from bench.runs.folders import Found, gather
from bench.runs.records import Record
from bench.runs.runner import task_of
from bench.system.files import write_folder
from bench.text import hidden, one_line

QUESTIONS = {
    "authors": "authors, separated by commas",
    "licence": "licence of the runs, an SPDX identifier such as CC-BY-4.0",
    "tuning_budget": "configurations tried for each method that was tuned, 0 if none was",
    "trained_on": "data beside the task's own that anything was trained or chosen on, with commas; or none",
    "paper": "https address of a paper; or none",
    "code": "https address of the methods' source, where it is not this project's; or none",
}
"""What only the submitter knows, and how to ask for it."""
REQUIRED = ("authors", "licence", "tuning_budget", "trained_on")
"""Of these there is no default: who says nothing is asked, or told."""
_LISTS = ("authors", "trained_on")


def read_words(path: Path) -> dict[str, Any]:
    """What a file in TOML says of a submission: keys of `QUESTIONS`, and slug.

    Raises:
        UsageError: If it cannot be read, or has another key.
    """
    try:
        words = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is no TOML: {one_line(error)}") from None
    known = ["slug", *QUESTIONS]
    if unknown := [key for key in words if key not in known]:
        raise UsageError(f"{path}: no such key as {unknown[0]}; {registry.nearest(unknown[0], known)}")
    return words


def answer(key: str, text: str) -> Any:
    """What a line typed at a terminal says of a key of `QUESTIONS`.

    Raises:
        UsageError: If a number is asked for and it is none.
    """
    text = text.strip()
    if key in _LISTS:
        return [] if text in ("", "none") else [part.strip() for part in text.split(",")]
    if key == "tuning_budget":
        if not text.isdecimal():
            raise UsageError(f"tuning_budget {text!r}: must be a whole number, 0 or more")
        return int(text)
    return None if text in ("", "none") else text


def submit(runs: Sequence[Found], to: Path, words: dict[str, Any], force: bool = False) -> Path:
    """Writes a submission of finished runs; returns its directory.

    Args:
        runs: The runs, as `bench.runs.folders.gather` finds them.
        to: The new directory; its name is the slug.
        words: Keys of `QUESTIONS`, and the slug, which must be the name of the directory.
        force: Replace an older directory.

    Raises:
        UsageError: If a run, or the runs together, cannot be handed in, or a word is wrong; in one line.
        OutputError: If it cannot be written; an older directory is then as it was.
    """
    _must_be_said(words, to)
    _must_be_free(to, force)
    if not runs:
        raise UsageError("there is no run to submit")
    found = _by_name(runs)
    contents = _contents(found)
    write_folder(to, contents | {MANIFEST: _manifest(words, to, found, contents)}, force)
    return to


def add(runs: Sequence[Found], to: Path, words: dict[str, Any]) -> list[str]:
    """Writes a submission anew, with further runs or with runs that were made again.

    Further seeds, methods and tasks join the runs that are there. Where one of them is there and is not the
    same run, its method is replaced on its task: all runs of it go, and those that are given come. What stays
    and what comes are held together to what `submit` asks, so nothing new stands beside what was made
    otherwise. Arrays of runs that stay are named and not written where the history has them.

    Args:
        runs: What joins or replaces.
        to: The submission that is there.
        words: As of `submit`; where they say nothing the submission's own stay.

    Returns:
        For each method on each task that runs were given of, a line on what became of it.

    Raises:
        UsageError: If there is no submission, a file of a run that stays is not the one that it names, a
            method is to be replaced and one of its seeds is not given, or as `submit`.
        OutputError: As `submit`.
    """
    if not runs:
        raise UsageError("there is no run to add")
    manifest = submission.read(to)
    own = manifest.model_dump(include={"slug", *QUESTIONS})
    words = own | words
    _must_be_said(words, to)
    given = _by_name(runs)
    others = {_above(path) for path, _ in manifest.files.items() ^ _digests(_contents(given)).items()}
    coming = {name: run for name, run in given.items() if name in others}
    changes = _changes({_above(path) for path in manifest.files}, {*given}, {*coming})
    if not coming and words == own:
        return changes
    staying = {path: digest for path, digest in manifest.files.items() if _above(path) not in coming}
    contents = dict(_files(to, staying, STORE)) | _contents(coming)
    found = _by_name(gather([(to / path).parent for path in staying])[0]) | coming
    new = _manifest(words, to, found, contents)
    in_history = {path for path in staying if not (to / path).exists()}
    written = {path: content for path, content in contents.items() if path not in in_history}
    write_folder(to, written | {MANIFEST: new}, force=True)
    return changes


def adopt(directory: Path, to: Path = SUBMISSIONS, store: Path = STORE, force: bool = False) -> Path:
    """Copies a verified submission into the project, its arrays into the store; returns its directory there.

    Args:
        directory: The submission; it was verified.
        to: Folder of the submissions.
        store: Folder of the store.
        force: Replace an older submission of this slug.

    Raises:
        UsageError: If a submission of this slug is there, the manifest names a file that is none of a run, or
            a file is not the one that it names.
        OutputError: If it cannot be written.
    """
    manifest = submission.read(directory)
    new = to / manifest.slug
    _must_be_free(new, force)
    contents = {MANIFEST: (directory / MANIFEST).read_bytes()}
    for name, content in _files(directory, manifest.files, store):
        if name.endswith(".safetensors"):
            keep(content, store)
        else:
            contents[name] = content
    write_folder(new, contents, force)
    return new


# ------------------------------------------------------------------------------------------------- the runs


def _by_name(runs: Sequence[Found]) -> dict[str, tuple[Path, Record]]:
    """The runs by their names in the submission; refuses two of one name."""
    found: dict[str, tuple[Path, Record]] = {}
    for run in runs:
        record = _record(run)
        task, method, seed = record.task.identity, record.method.identity, record.seed
        if (name := run_name(task, method, seed)) in found:
            twice = f"{found[name][0]} and {run.directory}"
            raise UsageError(f"{twice} are both seed {seed} of {method} on {task}: hand in one")
        found[name] = run.directory, record
    return found


def _record(run: Found) -> Record:
    """The record of a run of the board's tasks and presets."""
    record = run.record
    if record is None:
        raise UsageError(f"{run.directory} is {run.status}: {run.note}")
    if record.status == "failed" or record.preset == "smoke":
        refuse(run.directory, record)  # says why
    if ":" in record.task.name or not task_of(record).spec.ranked:
        raise UsageError(f"{run.directory}: {record.task.name} is not ranked; keep it by bench record add")
    if record.task.identity != record.task.name:
        raise UsageError(
            f"{run.directory}: the board ranks {record.task.name} under its standard settings, and this is "
            f"{record.task.identity}"
        )
    for part in run_name(record.task.identity, record.method.identity, record.seed).split("/"):
        if not NAME.fullmatch(part):
            raise UsageError(f"{run.directory}: {part} is no name of a directory of a submission")
    return record


def _changes(before: Set[str], given: Set[str], coming: Set[str]) -> list[str]:
    """What runs do to a submission, a line for each method on each task of theirs.

    Args:
        before: Names of the runs that are there.
        given: Those of the runs that are given.
        coming: Of these, those that are not there, or are there as another run.

    Raises:
        UsageError: If runs of a method on a task are replaced, and others of it would stay.
    """
    said = []
    for cell in sorted(set(map(_above, given))):
        old, all_given, new = (
            {name for name in names if _above(name) == cell} for names in (before, given, coming)
        )
        task, method = cell.split("/")
        if not new:
            said.append(f"there already: {method} on {task}, {_counted(all_given)}")
        elif not new & old:
            said.append(f"added: {method} on {task}, {_counted(new)}" + (f" to {len(old)}" if old else ""))
        elif missing := old - all_given:
            seeds = ", ".join(map(str, sorted(submission.seed_of(Path(name)) for name in missing)))
            raise UsageError(f"{method} on {task} is replaced as a whole: give its seeds {seeds} too")
        else:
            said.append(f"replaced: {method} on {task}, {_counted(old)} by {len(all_given)}")
    return said


def _counted(runs: Set[str]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _must_belong_together(found: Mapping[str, tuple[Path, Record]]) -> None:
    """Refuses runs of which some were made otherwise than the others, and seeds that are not all there."""
    tasks, cells = defaultdict(list), defaultdict(list)
    for name, run in found.items():
        task, method, _ = name.split("/")
        tasks[task].append(run)
        cells[task, method].append(run)
    _must_be_one([*found.values()], "version of this package", lambda record: record.provenance.version)
    for own in tasks.values():
        _must_be_one(own, "version of the task", lambda record: record.task.version)
        _must_be_one(own, "digest of the task's data", lambda record: record.task.data_digest)
    for (task, method), own in cells.items():
        _must_be_one(own, "state of the method's file", lambda record: record.provenance.method_file_hash)
        _must_be_one(own, "set of the method's settings", lambda record: record.method.settings)
        seeds = sorted(record.seed for _, record in own)
        if seeds != list(range(len(seeds))):
            those = ", ".join(map(str, seeds))
            raise UsageError(f"{method} on {task} has the seeds {those}: they must be 0, 1, 2 and so on")
        if len(seeds) < (least := task_of(own[0][1]).spec.min_seeds):
            raise UsageError(f"{method} on {task} has {len(seeds)} seeds: the board takes {least} or more")


def _must_be_one(found: Sequence[tuple[Path, Record]], what: str, of: Any) -> None:
    """Refuses runs that differ in something, naming two of them."""
    (first, record), *others = found
    for directory, other in others:
        if of(other) != of(record):
            raise UsageError(f"{first} and {directory} are not of one {what}: run again what is older")


# ------------------------------------------------------------------------------------------------ the files


def _contents(found: Mapping[str, tuple[Path, Record]]) -> dict[str, bytes]:
    """The files of the runs by their paths in the submission."""
    contents = {}
    for name, (directory, record) in found.items():
        contents[f"{name}/record.json"] = as_kept(record, (directory / "record.json").read_bytes())
        if (arrays := run_arrays(directory)) is not None:
            contents[f"{name}/{ARRAYS}"] = arrays.read_bytes()
    return contents


def _digests(contents: Mapping[str, bytes]) -> dict[str, str]:
    """The digest of each file, in order of the paths."""
    return {path: sha256(contents[path]) for path in sorted(contents)}


def _above(path: str) -> str:
    """What a path in a submission lies in: a file in its run, a run in its method on its task."""
    return path.rpartition("/")[0]


def _manifest(
    words: dict[str, Any], to: Path, found: Mapping[str, tuple[Path, Record]], contents: Mapping[str, bytes]
) -> bytes:
    """`submission.json`; refuses runs that cannot be handed in together, and words that it does not take."""
    _must_belong_together(found)
    records = [record for _, record in found.values()]
    environments = {record.environment.model_dump_json(): record.environment for record in records}
    stated = {
        "schema_version": SCHEMA_VERSION,
        "slug": to.resolve().name,
        "environments": [environments[key] for key in sorted(environments)],
        "hours": round(sum(sorted(record.seconds for record in records)) / 3600, 4),
        "files": _digests(contents),
    }
    try:
        whole = Submission.model_validate({"paper": None, "code": None} | words | stated)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{where} {one_line(first['input'], 60)!r}: {one_line(first['msg'])}") from None
    for directory, record in found.values():  # the slowest last
        refuse(directory, record, code=words.get("code"))
    return (whole.model_dump_json(indent=2) + "\n").encode()


def _files(directory: Path, files: Mapping[str, str], store: Path) -> Iterator[tuple[str, bytes]]:
    """Files that a manifest names, each as it names it; arrays may be in the store."""
    for name, digest in files.items():
        if len(parts := name.split("/")) != 4 or not all(NAME.fullmatch(part) for part in parts):
            raise UsageError(f"{directory / MANIFEST} names {one_line(name, 80)}, which is no file of a run")
        path = directory / name
        if path.name == ARRAYS and not path.exists():
            path = run_arrays(path.parent, store) or path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        if sha256(content) != digest:
            raise UsageError(f"{path} is not the file that {MANIFEST} names: its sha256 is another")
        yield name, content


def _must_be_said(words: dict[str, Any], to: Path) -> None:
    """Refuses a directory whose name is no slug, and words that are missing or deceive."""
    slug = to.resolve().name
    if not SLUG.fullmatch(slug):
        raise UsageError(f"--to {to}: its name is the slug, 1 to 64 of a-z, 0-9 and -")
    if words.get("slug", slug) != slug:
        raise UsageError(f"--to {to}: its name is the slug, and the slug given is {words['slug']}")
    if missing := [key for key in REQUIRED if key not in words]:
        raise UsageError(f"what is missing: {', '.join(missing)}; write it into the file of --meta")
    if (deceiving := next(hidden(words), None)) is not None:
        raise UsageError(f"characters that are never printed: '{one_line(deceiving)}'")


def _must_be_free(directory: Path, force: bool) -> None:
    """Refuses a directory that is there, and with force one that holds no submission."""
    if not directory.exists():
        return
    if not force:
        raise UsageError(f"{directory} is there already: it is kept; --force replaces it")
    if not (directory / MANIFEST).is_file():
        raise UsageError(f"{directory} is there and holds no submission: it is kept; choose another name")
