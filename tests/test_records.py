"""Records: strict, whole or not there, and free of where and by whom they were made."""

import getpass
import json
import math
import re
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from plans import resolved

import bench
from bench.contract import Metric, Row, Spec, Undefined
from bench.data import array_digest
from bench.errors import UsageError
from bench.leaderboard.evidence import entries
from bench.runs import records, registry
from bench.system import source

EXAMPLE = {
    "schema_version": 1,
    "status": "completed",
    "reason": None,
    "task": {
        "name": "split_digits",
        "identity": "split_digits+epochs=1",
        "version": 1,
        "data_digest": "ab",
        "settings": {"epochs": 1, "batch_size": None},
        "main_metric": "accuracy",
    },
    "method": {
        "name": "mfvi",
        "identity": "mfvi",
        "members": 1,
        "settings": {"learning_rate": 0.1},
        "tuning": "untuned",
        "capabilities": ["moments"],
        "seed_matters": True,
    },
    "preset": "standard",
    "seed": 0,
    "command": "bench run mfvi split_digits --seed 0",
    "created": "2026-01-01T00:00:00+00:00",
    "metrics": {"accuracy": 0.5, "forgetting": None},
    "undefined": {"forgetting": "one step"},
    "validation": {"accuracy": 0.25},
    "fits": [
        {
            "stage": "step 1",
            "epochs": 1,
            "steps": 3,
            "seconds": 0.5,
            "compiled": False,
            "diagnostics": {"acceptance": 0.8},
        }
    ],
    "diagnostics": {"prediction_rhat": 1.01},
    "draws": [{"stage": "step 1", "asked": 8, "distinct": 8, "predictions": 2}],
    "seconds": 1.5,
    "energy": {"joules": 12.5, "source": "RAPL"},
    "environment": {
        "python": "3.11.7",
        "torch": "2.11.0",
        "pytorch_lightning": "2.6.0",
        "system": "linux x86_64",
        "device": "cpu",
        "threads": 1,
    },
    "trainer": {"precision": "32-true"},
    "provenance": {
        "version": "0.1.0",
        "source_hash": "cd",
        "method_file_hash": "ef",
        "task_file_hash": "ab",
        "commit": None,
        "dirty": None,
        "arrays_digest": None,
    },
}


def changed(path, value):
    """The example with the entry at `a.b` set to a value, or removed where the value is `...`."""
    example = json.loads(json.dumps(EXAMPLE))
    *parents, last = path.split(".")
    part = example
    for name in parents:
        part = part[name]
    part[last] = value
    if value is ...:
        del part[last]
    return example


def put(folder, content):
    """Writes `record.json` as it stands."""
    (folder / "record.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished smoke run; not to be changed."""
    return bench.run("mfvi", "split_digits", preset="smoke", out=tmp_path_factory.mktemp("runs"))


# ---- the schema


def test_record_survives_writing_and_reading(tmp_path):
    record = records.Record(**EXAMPLE)
    records.write_record(tmp_path, record)
    assert records.read_record(tmp_path) == record
    assert json.loads((tmp_path / "record.json").read_text()) == EXAMPLE
    records.write_record(tmp_path / "again", records.read_record(tmp_path))
    assert (tmp_path / "again" / "record.json").read_bytes() == (tmp_path / "record.json").read_bytes()


def test_a_record_from_before_draws_were_counted_is_read(tmp_path):
    old = json.loads(json.dumps(EXAMPLE))
    del old["draws"]
    assert records.read_record(put(tmp_path, old)).draws is None


WRONG = {
    "no distinct draw": changed("draws", [{"stage": "a", "asked": 8, "distinct": 0, "predictions": 1}]),
    "unknown field": changed("colour", "red"),
    "unknown field inside": changed("method.colour", "red"),
    "unknown status": changed("status", "fine"),
    "other schema": changed("schema_version", 2),
    "missing field": changed("seed", ...),
    "missing field inside": changed("provenance.commit", ...),
    "number as text": changed("seed", "0"),
    "share as seed": changed("seed", 0.5),
    "text as number": changed("metrics.accuracy", "0.5"),
    "unknown tuning": changed("method.tuning", "lucky"),
    "dirty as text": changed("provenance.dirty", "no"),
    "a list": [EXAMPLE],
    "empty": "",
    "cut off": json.dumps(EXAMPLE)[:200],
    "NaN": json.dumps(EXAMPLE).replace("0.25", "NaN"),
    "infinity": json.dumps(EXAMPLE).replace("0.25", "Infinity"),
    "overflow": json.dumps(EXAMPLE).replace("0.25", "1e999"),
    "not UTF-8": json.dumps(EXAMPLE),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_what_does_not_follow_the_schema_is_refused_in_one_line(tmp_path, content, request):
    put(tmp_path, content)
    if "not UTF-8" in request.node.name:
        (tmp_path / "record.json").write_bytes(b"\xff" + json.dumps(EXAMPLE).encode())
    with pytest.raises(UsageError, match=r"record\.json is no record of schema 1: ") as caught:
        records.read_record(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["metrics", "validation"])
def test_number_that_is_not_finite_makes_no_record(number, where):
    with pytest.raises(ValueError, match="finite"):
        records.Record(**{**EXAMPLE, where: {"accuracy": number}})


def test_missing_record_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"holds no run: there is no record\.json$"):
        records.read_record(tmp_path)
    (tmp_path / "unfinished.json").write_text("{}")
    with pytest.raises(UsageError, match="holds an unfinished run"):
        records.read_record(tmp_path)


def test_record_tells_neither_place_nor_person(done):
    """What is published must not name the machine, the user, or a folder of theirs."""
    text = (done.directory / "record.json").read_text()
    assert not re.search(r'"[^"]*(?<![\w.])/[\w~]+/', text), "an absolute path"
    assert str(Path.home()) not in text
    assert str(done.directory.parent) not in text
    assert socket.gethostname() not in text
    user = getpass.getuser()
    assert not re.search(rf"\b{re.escape(user)}\b", text)


def test_record_tells_settings_and_provenance(done):
    record = done.record
    assert record.task.settings["epochs"] == 1
    assert record.task.settings["dataset"] == "digits"
    assert record.method.settings == asdict(resolved("mfvi", "split_digits").method_settings)
    assert record.provenance.version == bench.__version__
    assert record.provenance.source_hash == records.source_hash()
    assert record.provenance.arrays_digest == array_digest(records.read_arrays(done.directory))
    for digest in (
        record.task.data_digest,
        record.provenance.method_file_hash,
        record.provenance.source_hash,
    ):
        assert re.fullmatch("[0-9a-f]{64}", digest)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record.created)


# ---- arrays


def test_arrays_survive_writing_and_reading(tmp_path):
    arrays = {
        "b": np.arange(6, dtype=np.uint8).reshape(2, 3).T,  # not contiguous
        "a": np.float16([[0.5, -1e4]]),
        "empty": np.zeros((0, 4)),
    }
    records.write_arrays(tmp_path, arrays)
    records.write_record(
        tmp_path, records.Record(**changed("provenance.arrays_digest", array_digest(arrays)))
    )
    again = records.read_arrays(tmp_path)
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(again[name], array)
        assert again[name].dtype == array.dtype


def test_missing_damaged_and_other_arrays_are_one_line(tmp_path):
    arrays = {"a": np.arange(4.0)}
    records.write_record(
        tmp_path, records.Record(**changed("provenance.arrays_digest", array_digest(arrays)))
    )
    path = tmp_path / "arrays.safetensors"
    with pytest.raises(UsageError, match=r"holds no arrays\.safetensors"):
        records.read_arrays(tmp_path)
    records.write_arrays(tmp_path, arrays)
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole[:20], b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="is damaged: ") as caught:
            records.read_arrays(tmp_path)
        assert "\n" not in str(caught.value)
    for others in ({"a": np.arange(4.0) + 1}, {"b": np.arange(4.0)}, {"a": np.arange(4.0, dtype=np.float32)}):
        records.write_arrays(tmp_path, others)
        with pytest.raises(UsageError, match="does not hold the arrays of the record beside it"):
            records.read_arrays(tmp_path)


def test_curves_are_written_as_csv(tmp_path):
    records.write_curves(tmp_path, [Row("accuracy", "pair 1, test", 1, 0.5)])
    assert (tmp_path / "curves.csv").read_text() == 'curve,series,x,value\naccuracy,"pair 1, test",1,0.5\n'


# ---- metrics


SPEC = Spec(
    "question",
    "source",
    1,
    {"a": Metric("a", "fraction", 1, 0), "b": Metric("b", "nats", 0, math.inf, may_be_undefined=True)},
    "a",
)


def test_metrics_become_numbers_and_reasons():
    assert records.split_metrics({"b": 2, "a": np.float32(0.5)}, SPEC) == ({"a": 0.5, "b": 2.0}, {})
    assert records.split_metrics({"a": 0.0, "b": Undefined("no step")}, SPEC) == (
        {"a": 0.0, "b": None},
        {"b": "no step"},
    )
    assert records.split_metrics({"a": 0.0, "b": math.inf}, SPEC)[1] == {"b": "not finite: inf"}


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({"a": 1.0}, "score gave"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "score gave"),
        ({"a": math.nan, "b": 1.0}, "the metric a may not be undefined: not finite: nan"),
        ({"a": Undefined("why"), "b": 1.0}, "the metric a may not be undefined: why"),
    ],
)
def test_metrics_that_are_not_the_spec_s_are_refused(scores, message):
    with pytest.raises(ValueError, match=message):
        records.split_metrics(scores, SPEC)


# ---- provenance


@pytest.fixture
def repository(tmp_path):
    """A git repository with one committed method file."""
    file = tmp_path / "own" / "method.py"
    file.parent.mkdir()
    file.write_text("x = 1\n")

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    return file


def test_provenance_is_of_the_repository_of_the_method(repository):
    clean = records.provenance(repository, None)
    assert re.fullmatch("[0-9a-f]{40}", clean.commit)
    assert clean.dirty is False
    (repository.parent / "notes.txt").write_text("no source")
    assert records.provenance(repository, None) == clean
    repository.write_text("x = 2\n")
    changed = records.provenance(repository, None)
    assert changed.dirty is True
    assert changed.method_file_hash != clean.method_file_hash
    assert changed.source_hash == clean.source_hash


def test_what_a_method_declares_is_not_in_the_hash_of_its_file(tmp_path):
    """A line of literals, as ruff writes it, and nothing else: a line that computes is in the hash."""
    file = tmp_path / "own.py"

    def hashed(line):
        file.write_text(f"class Own(Method):\n{line}    trains = False\n")
        return records.file_hash(file)

    bare = hashed("")
    assert hashed('    declares = "none"\n') == bare
    assert hashed('    declares = "exact in the limit of steps", {"kept": 400, "burn_in": 0.05}\n') == bare
    for line in ('declares = "none", {"kept": print()}', 'declares = "none"; x = 1', 'decides = "none"'):
        assert hashed(f"    {line}\n") != bare


def test_new_file_beside_the_method_is_a_change(repository):
    """A helper module that no commit holds, anywhere in the repository."""
    (repository.parent.parent / "helper.py").write_text("")
    assert records.provenance(repository, None).dirty is True


def test_outside_a_repository_there_is_no_commit(tmp_path):
    (tmp_path / "method.py").write_text("")
    provenance = records.provenance(tmp_path / "method.py", "ab")
    assert (provenance.commit, provenance.dirty, provenance.arrays_digest) == (None, None, "ab")


def copy_of_the_source(folder, inside):
    """Copies what is hashed; `inside` as a wheel installs it, methods and tasks inside of bench."""
    roots = {"bench": folder / "bench"}
    for name in ("methods", "tasks", "leaderboard"):
        roots[name] = roots["bench"] / name if inside else folder / name
        roots[name].mkdir(parents=True)
    for name, path in source.source_files().items():
        copy = roots[name.split("/")[0]].joinpath(*name.split("/")[1:])
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return roots


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "bench/new.py",
        "bench/studies/new.py",
        "bench/runs/presets/new.toml",
        "tasks/new.py",
        "methods/deep/new.py",
    ],
)
def test_source_hash_is_over_every_source_file(tmp_path, monkeypatch, name, inside):
    """Of every subfolder too, and the same for the sources and for an installed wheel."""
    before = records.source_hash()
    roots = copy_of_the_source(tmp_path, inside)
    found = {f"bench.{n}" if n != "bench" else n: [str(path)] for n, path in roots.items()}
    monkeypatch.setattr(
        source, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=found[name])
    )
    assert records.source_hash() == before
    (roots["leaderboard"] / "new.py").write_text("ranks runs, changes none")
    assert records.source_hash() == before
    package, *rest = name.split("/")
    added = roots[package].joinpath(*rest)
    added.parent.mkdir(exist_ok=True)
    added.write_text("")
    first = records.source_hash()
    added.write_text("x = 1")
    assert len({before, first, records.source_hash()}) == 3


def test_record_without_members_and_diagnostics_is_of_the_schema_too(tmp_path):
    """Those that were written before there were any."""
    old = json.loads(json.dumps(EXAMPLE))
    del old["diagnostics"], old["method"]["members"], old["fits"][0]["diagnostics"]
    del old["method"]["seed_matters"]
    (tmp_path / "record.json").write_text(json.dumps(old))
    record = records.read_record(tmp_path)
    assert (record.method.members, record.diagnostics, record.fits[0].diagnostics) == (1, {}, {})
    assert record.method.seed_matters is None  # not True: of some methods that would be wrong


def test_committed_record_says_nothing_of_the_seed_that_it_did_not_say_when_it_was_made():
    for directory, record in entries.committed():
        written = json.loads((directory / "record.json").read_text())["method"]
        assert record.method.seed_matters == written.get("seed_matters")
        if record.method.seed_matters is not None:
            cls = registry.method(record.method.name).cls
            assert record.method.seed_matters == cls.seed_matters


def test_curves_are_read_as_written_and_a_damaged_file_is_one_line(tmp_path):
    rows = [Row("accuracy", "pair 1, first", 1.0, 0.1 + 0.2), Row("loss", "", 2.5, -1e-300)]
    records.write_curves(tmp_path, rows)
    assert records.read_curves(tmp_path) == rows
    for damage in ("curve,series\n", "curve,series,x,value\na,b,one,2\n", "curve,series,x,value\na,b\n", ""):
        (tmp_path / "curves.csv").write_text(damage)
        with pytest.raises(UsageError, match=r"curves\.csv") as caught:
            records.read_curves(tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"curves\.csv"):
        records.read_curves(tmp_path / "nowhere")
