"""Hostile submissions: what each does to an honest one, and the code by which it is refused.

Nothing here is a file of its own: every case is made by code from `submissions.honest`, one change at a time.
`LISTED` cases write a fitting `submission.json` after the change, as a forger would.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hostile import submissions
from hostile.submissions import change, change_arrays

RUN = "split_digits/one/seed1"
"""The run that is broken, where one is."""
PICKLE = b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94\x8c\x05print\x94\x93\x94."
"""Python's own format of `print`, which runs what it names when it is read."""


class Case(NamedTuple):
    """A hostile submission.

    Attributes:
        code: The code that refuses it.
        spoil: What it does to the honest one.
        listed: Whether `submission.json` is written anew after that, so that digests fit.
    """

    code: str
    spoil: Callable[[Path], object]
    listed: bool = True


def plain(code: str, spoil: Callable[[Path], object]) -> Case:
    """A case in which `submission.json` stays as it was."""
    return Case(code, spoil, listed=False)


def of_record(code: str, /, **parts: Any) -> Case:
    """A case in which the record of a run says something else."""
    return Case(code, lambda root: change(root / RUN, **parts))


def of_manifest(code: str, /, **parts: Any) -> Case:
    """A case in which `submission.json` says something else."""
    return plain(code, lambda root: submissions.manifest(root, **parts))


def text(code: str, content: str | bytes) -> Case:
    """A case in which a record is these bytes."""
    content = content.encode() if isinstance(content, str) else content
    return plain(code, lambda root: bytes_of(root, "record.json", content))


def bytes_of(root: Path, name: str, content: bytes) -> None:
    """Puts bytes in the place of a file of the run."""
    (root / RUN / name).write_bytes(content)


def inserted(code: str, item: str) -> Case:
    """A case in which a record's JSON holds one item more, as text."""

    def spoil(root: Path) -> None:
        record = (root / RUN / "record.json").read_text().rstrip().removesuffix("}")
        bytes_of(root, "record.json", f"{record}, {item}}}".encode("utf-8", "surrogatepass"))

    return plain(code, spoil)


def header(code: str, entries: object, data: int = 4, length: int | None = None) -> Case:
    """A case in which the arrays are a header and zeros; `entries` is JSON or its text."""
    content = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    size = len(content) if length is None else length
    whole = size.to_bytes(8, "little") + content + bytes(data)
    return plain(code, lambda root: bytes_of(root, "arrays.safetensors", whole))


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    """An entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# ------------------------------------------------------------------------------------------------------ files


def replace(root: Path, name: str, make: Callable[[Path], object]) -> None:
    """Something else in the place of a file of the run."""
    path = root / RUN / name
    path.rename(path.parent.parent.parent.parent.parent / "taken-away")
    make(path)


def swapped_for_link(root: Path) -> None:
    replace(root, "record.json", lambda path: path.symlink_to("/etc/passwd"))


def folder_is_link(root: Path) -> None:
    (root / "split_digits").rename(root.parent / "elsewhere")
    (root / "split_digits").symlink_to(root.parent / "elsewhere")


def root_is_link(root: Path) -> None:
    root.rename(root.parent / "elsewhere")
    root.symlink_to(root.parent / "elsewhere")


def hard_link(root: Path) -> None:
    os.link(root / RUN / "record.json", root.parent / "second-name")


def bound_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)
    os.chdir(here)


def file(name: str, content: bytes = b"x") -> Callable[[Path], object]:
    def spoil(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)

    return spoil


def sparse(path: Path, size: int) -> None:
    """A file that has so many bytes and takes no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as opened:
        opened.truncate(size)


def remove(name: str) -> Callable[[Path], object]:
    return lambda root: (root / name).unlink()


def emptied(root: Path) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def collision(root: Path) -> None:
    (root / "split_digits" / "ONE").mkdir()


def many(root: Path) -> None:
    for number in range(501):
        (root / f"task{number}").mkdir()


def heavy(root: Path) -> None:
    for seed in range(129):
        sparse(root / f"split_digits/three/seed{seed}/arrays.safetensors", 8 * 2**20)


FILES = {
    "no directory": plain("no-submission", lambda root: root.rename(root.parent / "gone")),
    "empty directory": plain("no-submission", emptied),
    "file for a directory": plain("no-submission", lambda root: (emptied(root), root.rmdir(), root.touch())),
    "link for a record": plain("file-symlink", swapped_for_link),
    "link for a directory": plain("file-symlink", folder_is_link),
    "link for the submission": plain("file-symlink", root_is_link),
    "link that leads nowhere": plain("file-symlink", lambda root: (root / "x").symlink_to("nowhere")),
    "second name": plain("file-hardlink", hard_link),
    "pipe": plain("file-not-regular", lambda root: replace(root, "record.json", os.mkfifo)),
    "socket": plain("file-not-regular", lambda root: replace(root, "record.json", bound_socket)),
    "directory for a record": plain(
        "file-not-regular", lambda root: replace(root, "record.json", Path.mkdir)
    ),
    "directory for the manifest": plain(
        "file-not-regular", lambda root: (remove("submission.json")(root), (root / "submission.json").mkdir())
    ),
    "hidden directory": plain("name-hidden", file(".git/config")),
    "hidden file": plain("name-hidden", file(f"{RUN}/.record.json.writing")),
    "space in a name": plain("name-invalid", file("split digits/one/seed0/record.json")),
    "writing from right to left": plain("name-invalid", file("split\u202e/one/seed0/record.json")),
    "line break in a name": plain("name-invalid", file("a\nb/one/seed0/record.json")),
    "name of 121 characters": plain("name-invalid", file("a" * 121 + "/one/seed0/record.json")),
    "name that is no text": plain("name-invalid", lambda root: os.mkdir(os.fsencode(root) + b"/\xff")),
    "names alike but for case": plain("name-collision", collision),
    "curves": plain("file-unknown", file(f"{RUN}/curves.csv")),
    "archive": plain("file-unknown", file("submission.zip", b"PK\x05\x06" + bytes(18))),
    "pickle": plain("file-unknown", file(f"{RUN}/checkpoint.pkl", PICKLE)),
    "code": plain("file-unknown", file("split_digits/one/conftest.py", b"raise SystemExit")),
    "record too high": plain("file-unknown", file("split_digits/record.json")),
    "directory too deep": plain("file-unknown", file(f"{RUN}/more/record.json")),
    "seed00": plain("file-unknown", file("split_digits/one/seed00/record.json")),
    "seed of words": plain("file-unknown", file("split_digits/one/best/record.json")),
    "no manifest": plain("file-missing", remove("submission.json")),
    "no record": Case("file-missing", remove(f"{RUN}/record.json")),
    "no record, listed": plain("file-missing", remove(f"{RUN}/record.json")),
    "empty task": plain("file-missing", lambda root: (root / "iris_depth").mkdir()),
    "listed outside": plain(
        "file-missing",
        lambda root: submissions.manifest(root, files={**listing(root), "../../etc/passwd": "0" * 64}),
    ),
    "not listed": plain("file-unlisted", lambda root: submissions.manifest(root, files=listing(root, 1))),
    "large record": plain("file-too-large", lambda root: sparse(root / RUN / "record.json", 2**20 + 1)),
    "large arrays": plain(
        "file-too-large", lambda root: sparse(root / RUN / "arrays.safetensors", 8 * 2**20 + 1)
    ),
    "large manifest": plain("file-too-large", lambda root: sparse(root / "submission.json", 2**33)),
    "too much in all": plain("submission-too-large", heavy),
    "too many": plain("too-many-files", many),
}


def listing(root: Path, without: int = 0) -> dict[str, str]:
    """The files of `submission.json`, without the last so many."""
    files = json.loads((root / "submission.json").read_text())["files"]
    return dict(list(files.items())[: len(files) - without])


# ------------------------------------------------------------------------------------------------------- JSON

JSON = {
    "UTF-16": text("json-encoding", "{}".encode("utf-16")),
    "byte order mark": text("json-encoding", b"\xef\xbb\xbf{}"),
    "overlong UTF-8": text("json-encoding", b'{"a": "\xc0\x80"}'),
    "surrogate in UTF-8": text("json-encoding", b'{"a": "\xed\xa0\x80"}'),
    "half a record": text("json-syntax", '{"schema_version": 1'),
    "two documents": text("json-syntax", "{} {}"),
    "nothing": text("json-syntax", ""),
    "comment": text("json-syntax", "{} // x"),
    "key twice": inserted("json-duplicate-key", '"seed": 7'),
    "key twice, deep inside": inserted("json-duplicate-key", '"a": [{"b": 1, "b": 1}]'),
    "key twice in the manifest": plain(
        "json-duplicate-key",
        lambda root: (root / "submission.json").write_text('{"slug": "honest", "slug": "other"}'),
    ),
    "1e999": inserted("json-number", '"x": 1e999'),
    "-1e999": inserted("json-number", '"x": -1e999'),
    "NaN": inserted("json-number", '"x": NaN'),
    "-Infinity": inserted("json-number", '"x": -Infinity'),
    "integer of 31 digits": inserted("json-number", f'"x": {10**30}'),
    "integer of 5,000 digits": inserted("json-number", f'"x": {"9" * 5000}'),
    "17 lists": text("json-depth", "[" * 17 + "]" * 17),
    "500,000 lists": text("json-depth", "[" * 500_000),
    "objects in objects": text("json-depth", '{"a":' * 100_000),
    "long string": inserted("json-length", f'"x": "{"a" * 10_001}"'),
    "long key": inserted("json-length", f'"{"a" * 10_001}": 1'),
    "long list": inserted("json-length", f'"x": [{"0," * 100_000}0]'),
    "writing direction": inserted("text-hidden", '"x": "\\u202eevil"'),
    "escape sequence": inserted("text-hidden", '"x": "\\u001b[2J"'),
    "lone surrogate": inserted("text-hidden", '"x": "\\ud800"'),
    "NUL": inserted("text-hidden", '"x": "\\u0000"'),
    "deceiving key": inserted("text-hidden", '"\\u202e": 1'),
    "filler for an author": of_manifest("text-hidden", authors=["\u3164\u3164"]),
    "blank braille for an author": of_manifest("text-hidden", authors=["A\u2800B"]),
    "blanks for an author": of_manifest("text-hidden", authors=["   "]),
    "wide blanks": of_manifest("text-hidden", authors=["A\u3000\u00a0B"]),
    "flood of marks": of_manifest("text-hidden", authors=["A" + "\u0301" * 60]),
    "lone marks": of_manifest("text-hidden", trained_on=["\u0488\u0489"]),
    "deceiving author": of_manifest("text-hidden", authors=["A\u202e"]),
    "schema 2": of_record("schema-version", schema_version=2),
    "schema 2 of the manifest": of_manifest("schema-version", schema_version=2),
    "schema true": of_record("schema", schema_version=True),
    "schema 1.0": of_record("schema", schema_version=1.0),
    "no object": text("schema", "[]"),
    "more keys": of_record("schema", extra=1),
    "seed in quotes": of_record("schema", seed="1"),
    "seed true": of_record("schema", seed=True),
    "negative seed": of_record("schema", seed=-1),
    "metric in quotes": of_record("schema", metrics={"average_accuracy": "0.9"}),
    "identity that climbs": of_record("schema", task={"identity": "../.."}),
    "no authors": of_manifest("schema", authors=[]),
    "101 authors": of_manifest("schema", authors=["A"] * 101),
    "author of 201 characters": of_manifest("schema", authors=["A" * 201]),
    "script for a link": of_manifest("schema", code="javascript:alert(1)"),
    "link without TLS": of_manifest("schema", paper="http://example.org"),
    "quote in a link": of_manifest("schema", code='https://example.org/"onload=x'),
    "user in a link": of_manifest("schema", paper="https://arxiv.org@evil.example/abs/1"),
    "host in other letters": of_manifest("schema", paper="https://\u0430rxiv.org/abs/1"),
    "markup for a licence": of_manifest("schema", licence="<b>MIT</b>"),
    "slug in capitals": of_manifest("schema", slug="Honest"),
    "negative hours": of_manifest("schema", hours=-1.0),
    "digest that is none": of_manifest("schema", files={"a": "x"}),
}

# --------------------------------------------------------------------------------------- manifest and records


def copied(root: Path, source: str, to: str, **parts: Any) -> None:
    """The arrays of one run in the place of another's, with the metrics that follow from them."""
    arrays = submissions.read(root / source)
    change_arrays(root / to, rescore=True, **arrays)
    change(root / to, **parts)


def variant(root: Path) -> None:
    """An easier protocol, in the directory of its own identity."""
    for run in (root / "split_digits/one").iterdir():
        change(run, task={"identity": "split_digits+epochs=1000"})
    (root / "split_digits+epochs=1000").mkdir()
    (root / "split_digits/one").rename(root / "split_digits+epochs=1000/one")


def seeds_do_not_matter(root: Path) -> None:
    """A method that says so, though its seeds have other arrays."""
    for run in (root / "split_digits/one").iterdir():
        change(run, method={"seed_matters": False})


def tuned_for_nothing(root: Path) -> None:
    """Settings that `bench tune` is said to have found, among none."""
    for run in (root / "split_digits/one").iterdir():
        change(run, method={"tuning": "tuned"})
    submissions.manifest(root, tuning_budget=0)


RECORDS = {
    "another slug": of_manifest("slug-differs", slug="other"),
    "hours made up": of_manifest("hours-differ", hours=0.5),
    "environment made up": of_manifest(
        "environments-differ", environments=[{**submissions.ENVIRONMENT, "device": "a better one"}]
    ),
    "environment twice": of_manifest("environments-differ", environments=[submissions.ENVIRONMENT] * 2),
    "another task's directory": of_record("run-misplaced", task={"identity": "split_mnist"}),
    "another method's directory": of_record("run-misplaced", method={"identity": "two"}),
    "seed number changed": of_record("seed-differs", seed=7),
    "seed number changed, unlisted": plain("seed-differs", lambda root: change(root / RUN, seed=7)),
    "seed left out": Case(
        "seeds-not-contiguous",
        lambda root: [path.unlink() for path in (root / RUN).iterdir()] and (root / RUN).rmdir(),
    ),
    "seeds run differently": of_record("runs-mixed", method={"settings": {"learning_rate": 0.1}}),
    "seeds of two sources": of_record("runs-mixed", provenance={"method_file_hash": "1" * 64}),
    "seeds of two data sets": of_record("runs-mixed", task={"data_digest": "1" * 64}),
    "seeds of two versions": of_record("runs-mixed", provenance={"version": "0.0.9"}),
    **{
        name: of_record("fact-impossible", **parts)
        for name, parts in {
            "negative seconds": {"seconds": -1.0},
            "seconds of ages": {"seconds": 4e8},
            "2^62 members": {"method": {"members": 2**62}},
            "no threads": {"environment": {"threads": 0}},
            "negative epochs": {"fits": [{"stage": "fit", "epochs": -3, "steps": 1, "seconds": 1.0}]},
            "negative steps": {"fits": [{"stage": "fit", "epochs": 3, "steps": -1, "seconds": 1.0}]},
            "fit of negative seconds": {"fits": [{"stage": "fit", "epochs": 3, "steps": 1, "seconds": -1.0}]},
            "version of the future": {"provenance": {"version": "99.9"}},
            "version that is none": {"provenance": {"version": "best"}},
            "date that is none": {"created": "zzzz"},
            "date without a zone": {"created": "2026-01-01T00:00:00"},
            "day that is none": {"created": "2026-02-31T00:00:00+00:00"},
            "date of the future": {"created": "2999-01-01T00:00:00+00:00"},
            "date before the suite": {"created": "1999-01-01T00:00:00+00:00"},
        }.items()
    },
    "seeds that differ and do not matter": Case("fact-impossible", seeds_do_not_matter),
    "tuned with nothing": Case("fact-impossible", tuned_for_nothing),
    "failed": of_record("run-failed", status="failed", reason="a bug"),
    "smoke": of_record("run-smoke", preset="smoke"),
    "preset of one's own": of_record("run-smoke", preset="best"),
    "changed source": of_record("run-dirty", provenance={"dirty": True}),
    "changed source, not told": of_record("run-dirty", provenance={"dirty": None}),
    "source of nowhere": of_record(
        "run-without-source", provenance={"commit": None, "dirty": None, "source_hash": "0" * 64}
    ),
    "commit that is none": of_record("run-without-source", provenance={"commit": "HEAD"}),
    "task that is code": of_record("task-unknown", task={"name": "os:system"}),
    "task of one's own": of_record("task-unknown", task={"name": "toys:OwnTask"}),
    "variant of a task": Case("task-variant", variant),
    "diverged with metrics": of_record("metric-undefined", status="diverged", reason="NaN"),
    "no arrays": Case("arrays-missing", remove(f"{RUN}/arrays.safetensors")),
    "no arrays, listed": plain("arrays-missing", remove(f"{RUN}/arrays.safetensors")),
    "arrays without a digest": of_record("arrays-missing", provenance={"arrays_digest": None}),
    "duplicated seeds": Case(
        "duplicate-seeds", lambda root: copied(root, "split_digits/one/seed0", "split_digits/one/seed1")
    ),
    "another method's predictions": Case(
        "duplicate-runs", lambda root: copied(root, "split_digits/two/seed0", "split_digits/one/seed1")
    ),
}

# ------------------------------------------------------------------------------------------------ safetensors

HEADERS = {
    "no header": plain("header-length", lambda root: bytes_of(root, "arrays.safetensors", b"abc")),
    "empty file": plain("header-length", lambda root: bytes_of(root, "arrays.safetensors", b"")),
    "pickle for arrays": plain("header-length", lambda root: bytes_of(root, "arrays.safetensors", PICKLE)),
    "header of 2^63 bytes": header("header-length", {"x": entry()}, length=2**63),
    "header beyond the file": header("header-length", {"x": entry()}, length=1000),
    "header over 64 KB": header("header-length", {f"x{n}": entry() for n in range(2000)}),
    "header that is a list": header("header-form", []),
    "header of nothing": header("header-form", {}),
    "header that is no JSON": header("json-syntax", "{x}"),
    "header of another encoding": plain(
        "json-encoding",
        lambda root: bytes_of(root, "arrays.safetensors", (2).to_bytes(8, "little") + b"\xff\xfe"),
    ),
    "name twice": header("json-duplicate-key", f'{{"x": {json.dumps(entry())}, "x": {json.dumps(entry())}}}'),
    "entry with more keys": header("header-form", {"x": {**entry(), "code": "print()"}}),
    "entry without offsets": header("header-form", {"x": {"dtype": "F32", "shape": [1]}}),
    "shape of fractions": header("header-form", {"x": entry(shape=[1.0])}),
    "shape of truths": header("header-form", {"x": entry(shape=[True])}),
    "shape of words": header("header-form", {"x": entry(shape="1")}),
    "three offsets": header("header-form", {"x": entry(offsets=[0, 4, 4])}),
    "type that is a list": header("header-form", {"x": entry(dtype=["F32"])}),
    "metadata": header("arrays-name", {"__metadata__": {"a": "b"}, "x": entry()}),
    "name that climbs": header("arrays-name", {"../../x": entry()}),
    "name of an attribute": header("arrays-name", {"__class__": entry()}),
    "deceiving name": header("text-hidden", {"\u202ex": entry()}),
    "long name": header("arrays-name", {"x" * 65: entry()}),
    "65 arrays": header(
        "arrays-name", {f"x{n}": entry(offsets=[4 * n, 4 * n + 4]) for n in range(65)}, data=260
    ),
    "bfloat16": header("arrays-dtype", {"x": entry(dtype="BF16", shape=[2])}),
    "objects": header("arrays-dtype", {"x": entry(dtype="O")}),
    "shape [0, 2^40]": header("arrays-shape", {"x": entry(shape=[0, 2**40], offsets=[0, 0])}, data=0),
    "shape that overflows": header("arrays-shape", {"x": entry(shape=[2**32, 2**32])}),
    "shape below nothing": header("arrays-shape", {"x": entry(shape=[-1, -1])}),
    "nine axes": header("arrays-shape", {"x": entry(shape=[1] * 9)}),
    "60,000 axes": header("arrays-shape", {"x": entry(shape=[1] * 20_000)}),
    "shape of other bytes": header("arrays-shape", {"x": entry(shape=[2])}),
    "offsets turned round": header("arrays-shape", {"x": entry(offsets=[4, 0])}),
    "offsets beyond the file": header("arrays-layout", {"x": entry(shape=[10], offsets=[0, 40])}),
    "overlap": header("arrays-layout", {"x": entry(), "y": entry()}),
    "hole": header("arrays-layout", {"x": entry(), "y": entry(offsets=[8, 12])}, data=12),
    "late beginning": header("arrays-layout", {"x": entry(offsets=[4, 8])}, data=8),
    "bytes after the end": header("arrays-layout", {"x": entry()}, data=8),
}

STRUCTURE: dict[str, Case] = {**FILES, **JSON, **RECORDS, **HEADERS}
"""Refused without torch."""

# ----------------------------------------------------------------------------------------------------- scores


def arrays(code: str, rescore: bool = False, **made: Callable[[np.ndarray], np.ndarray]) -> Case:
    """A case in which arrays of a run are others, under their own digest."""

    def spoil(root: Path) -> None:
        before = submissions.read(root / RUN)
        new = {name: make(before[name].copy()) for name, make in made.items()}
        change_arrays(root / RUN, rescore=rescore, **new)

    return Case(code, spoil)


def set_at(place: Any, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    """An array with one entry changed."""

    def make(array: np.ndarray) -> np.ndarray:
        array[place] = value
        return array

    return make


def one_byte(root: Path) -> None:
    """The last byte but some of the arrays: of a prediction, since names are stored in order."""
    path = root / RUN / "arrays.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def one_step(log_probs: np.ndarray) -> np.ndarray:
    """The likeliest class of the first example a little likelier: by the last bit of its float16."""
    place = 0, log_probs[0].argmax()
    return set_at(place, np.nextafter(log_probs[place], np.float16(0)))(log_probs)


def one_label(root: Path) -> None:
    """A label, in the bytes of the file alone."""
    submissions.write_arrays(
        root / RUN, {**(before := submissions.read(root / RUN)), "labels": shifted(before["labels"])}
    )


def shifted(labels: np.ndarray) -> np.ndarray:
    """One label changed."""
    return set_at(0, (labels[0] + 1) % 10)(labels.copy())


def one_metric(root: Path) -> None:
    claim = json.loads((root / RUN / "record.json").read_text())["metrics"]["average_nll"]
    change(root / RUN, metrics={"average_nll": claim * (1 + 1e-8)})


def one_hash(root: Path) -> None:
    name = f"{RUN}/arrays.safetensors"
    submissions.manifest(root, files={**listing(root), name: "0" * 64})


def few_seeds(root: Path) -> None:
    for path in (root / "split_digits/one/seed2").iterdir():
        path.unlink()
    (root / "split_digits/one/seed2").rmdir()


def other_task(root: Path, task: str, **settings: object) -> None:
    """Three seeds that diverged on another task."""
    for seed in range(3):
        submissions.add(root, submissions.record("three", seed, task, **settings), None)


def every_seed(code: str, **parts: Any) -> Case:
    """A case in which the records of all seeds say something else."""
    return Case(code, lambda root: [change(run, **parts) for run in (root / "split_digits").glob("*/*")])


SCORES: dict[str, Case] = {
    "setting that the task has not": every_seed("task-settings", task={"settings": {"speed": 1}}),
    "setting of another identity": every_seed(
        "task-settings", task={"settings": {"dataset": "digits", "epochs": 1000}}
    ),
    "task of other settings for one method": Case(
        "task-settings",
        lambda root: [
            change(run, task={"settings": {"epochs": 1000}}) for run in (root / "split_digits/two").iterdir()
        ],
    ),
    "setting against the name": every_seed("task-settings", task={"settings": {"dataset": "mnist"}}),
    "another version of the task": every_seed("task-version", task={"version": 99}),
    "task without ranks": Case("task-unranked", lambda root: other_task(root, "permuted_digits")),
    "other data": every_seed("data-differ", task={"data_digest": "0" * 64}),
    "two seeds": Case("seeds-too-few", few_seeds),
    "metric of one's own": of_record("metrics-unknown", metrics={"beauty": 1.0}),
    "main metric of one's own": every_seed("metrics-unknown", task={"main_metric": "average_nll"}),
    "accuracy above 1": of_record("metric-impossible", metrics={"average_accuracy": 1.5}),
    "negative NLL": of_record("metric-impossible", metrics={"average_nll": -0.1}),
    "metric left out": of_record(
        "metric-undefined", metrics={"average_nll": None}, undefined={"average_nll": "lost"}
    ),
    "metric changed": Case("metric-differs", one_metric),
    "metric changed, unlisted": plain("metric-differs", one_metric),
    "prediction changed": plain("arrays-digest", one_byte),
    "prediction changed, listed": Case("arrays-digest", one_byte),
    "prediction changed, with its digest": arrays("metric-differs", log_probs=one_step),
    "label changed": plain("targets-differ", one_label),
    "label changed, with metrics": arrays("targets-differ", rescore=True, labels=shifted),
    "labels shuffled": arrays(
        "targets-differ", rescore=True, labels=lambda labels: np.random.default_rng(0).permutation(labels)
    ),
    "labels as predicted": Case(
        "targets-differ",
        lambda root: change_arrays(
            root / RUN,
            rescore=True,
            labels=submissions.read(root / RUN)["log_probs"].argmax(1).astype(np.uint8),
        ),
    ),
    "labels of eight bytes": arrays("arrays-unexpected", labels=lambda a: a.astype(np.int64).clip(0, 9)),
    "one array more": Case(
        "arrays-unexpected", lambda root: change_arrays(root / RUN, extra=np.zeros(3, np.float32))
    ),
    "one array less": Case(
        "arrays-unexpected",
        lambda root: change_arrays(
            root / RUN, only={k: v for k, v in submissions.read(root / RUN).items() if k != "predicted"}
        ),
    ),
    "one example for all": arrays("arrays-unexpected", log_probs=lambda a: a[:1]),
    "one axis more": arrays("arrays-unexpected", log_probs=lambda a: a[None]),
    "hash changed": plain("file-hash", one_hash),
    "seconds changed": plain("file-hash", lambda root: change(root / RUN, seconds=36.1)),
    "NaN everywhere": arrays("arrays-not-finite", log_probs=lambda a: a * np.float16(np.nan)),
    "one NaN": arrays("arrays-not-finite", log_probs=set_at((7, 3), np.nan)),
    "minus infinity": arrays("arrays-not-finite", log_probs=set_at((7, 3), -np.inf)),
    "probability of 2": arrays("arrays-not-normalised", log_probs=set_at((7, 3), 0.7)),
    "probabilities of nothing": arrays("arrays-not-normalised", log_probs=lambda a: a * 0 - np.float16(50)),
    "sum of 1.003": arrays("arrays-not-normalised", log_probs=lambda a: a + np.float16(0.004)),
}
"""Refused by what the task says of the numbers."""
