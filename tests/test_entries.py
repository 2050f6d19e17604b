"""The committed records: what is refused, what is kept, and that every number can be computed again."""

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from stored import at_hand, brought

import bench
from bench import cli
from bench.data import array_digest
from bench.errors import Diverged, OutputError, UsageError
from bench.leaderboard.check import scoring
from bench.leaderboard.evidence import entries, store
from bench.runs import records, registry, resolution
from bench.runs.runner import finished, task_of
from bench.system.places import NotFound

FEW = {"epochs": 1, "test_samples": 4}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A standard run whose record says that a commit holds its source; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    done = bench.run("mfvi", "split_digits", seed=3, task_settings=FEW, out=folder)
    provenance = done.record.provenance.model_copy(update={"commit": "0" * 40, "dirty": False})
    records.write_record(done.directory, done.record.model_copy(update={"provenance": provenance}))
    return done.directory


@pytest.fixture
def run(good, tmp_path):
    """A copy of it that may be changed."""
    return Path(shutil.copytree(good, tmp_path / "run"))


def change(run, **parts):
    """Rewrites entries of the record; a dictionary is merged into its part."""
    record = json.loads((run / "record.json").read_text())
    for name, value in parts.items():
        record[name] = record[name] | value if isinstance(value, dict) else value
    (run / "record.json").write_text(json.dumps(record))


def test_good_run_is_kept_and_read_back(good, tmp_path):
    to = tmp_path / "records"
    directory = entries.add(good, to)
    assert directory == to / "split_digits+epochs=1,test_samples=4" / "mfvi" / "seed3"
    assert sorted(path.name for path in directory.iterdir()) == [
        "arrays.safetensors",
        "curves.csv",
        "record.json",
    ]
    ((found, record),) = entries.committed(to)
    assert found == directory
    assert record == records.read_record(good)
    for name in ("record.json", "arrays.safetensors", "curves.csv"):
        assert (directory / name).read_bytes() == (good / name).read_bytes()


def test_record_that_is_there_is_kept_and_force_replaces_it(run, tmp_path):
    directory = entries.add(run, tmp_path / "records")
    (directory / "stale.txt").write_text("")
    change(run, seconds=99.0)
    with pytest.raises(UsageError, match="is there already: it is kept; --force replaces it"):
        entries.add(run, tmp_path / "records")
    entries.add(run, tmp_path / "records", force=True)
    assert records.read_record(directory).seconds == 99
    assert not (directory / "stale.txt").exists()


@pytest.mark.parametrize(
    ("suite", "commit"),
    [
        ({"commit": "c0ffee", "dirty": False}, "c0ffee"),
        ({"commit": "c0ffee", "dirty": True}, None),
        ({"commit": None, "dirty": None}, None),
    ],
    ids=["committed", "changed", "no repository"],
)
def test_run_of_an_installed_package_is_kept_with_the_commit_of_its_source(
    run, tmp_path, monkeypatch, suite, commit
):
    """Without it the record would be refused as soon as the release is another. A known commit stays."""
    real = records.provenance
    monkeypatch.setattr(records, "provenance", lambda *about: real(*about).model_copy(update=suite))
    known = records.read_record(run).provenance.commit
    kept = entries.add(run, tmp_path / "known")
    assert records.read_record(kept).provenance.commit == known
    change(run, provenance={"commit": None, "dirty": None})
    kept = entries.add(run, tmp_path / "records")
    found = records.read_record(kept)
    assert found.provenance.commit == commit
    same = found.provenance.model_copy(update={"commit": None, "dirty": None})
    assert found.model_copy(update={"provenance": same}) == records.read_record(run)
    change(run, provenance={"source_hash": "0" * 64})
    assert records.with_commit(records.read_record(run)).provenance.commit is None


def tamper(run):
    change(run, metrics={"average_accuracy": 0.99})


def tamper_slightly(run):
    value = records.read_record(run).metrics["average_nll"]
    change(run, metrics={"average_nll": value * (1 + 1e-9)})


def other_arrays(run):
    arrays = records.read_arrays(run)
    arrays["labels"] = arrays["labels"][::-1]
    records.write_arrays(run, arrays)


def forged(run):
    """Better predictions with their own digest, under the old metrics."""
    arrays = records.read_arrays(run)
    arrays["labels"] = arrays["labels"][::-1]
    records.write_arrays(run, arrays)
    change(run, provenance={"arrays_digest": array_digest(arrays)})


def settings_of(run, part, **values):
    change(run, **{part: {"settings": getattr(records.read_record(run), part).settings | values}})


def curves(content):
    return lambda run: (run / "curves.csv").write_text(content)


REFUSED = {
    "smoke": (lambda run: change(run, preset="smoke"), "is a smoke run"),
    "dirty": (lambda run: change(run, provenance={"dirty": True}), "was made from changed source"),
    "of another release": (
        lambda run: change(run, provenance={"commit": None, "dirty": None, "source_hash": "0" * 64}),
        "was made outside a git repository, by another release than the installed one",
    ),
    "failed": (lambda run: change(run, status="failed", reason="failed: E"), r"failed \(failed: E\)"),
    "unfinished": (
        lambda run: os.replace(run / "record.json", run / "unfinished.json"),
        "holds an unfinished run",
    ),
    "no run": (lambda run: (run / "record.json").unlink(), "holds no run"),
    "tampered": (tamper, "the metrics of the record are not those of its arrays"),
    "tampered in the ninth digit": (tamper_slightly, "the metrics of the record are not those of its arrays"),
    "other arrays": (other_arrays, "does not hold the arrays of the record"),
    "forged": (forged, "the metrics of the record are not those of its arrays"),
    "no arrays": (lambda run: (run / "arrays.safetensors").unlink(), r"holds no arrays\.safetensors"),
    "task of another version": (
        lambda run: change(run, task={"version": 99}),
        r"is of version 99 of split_digits, now \d: run again",
    ),
    "unknown setting of the method": (
        lambda run: settings_of(run, "method", speed=1),
        r"settings that mfvi does not take: --method\.speed 1",
    ),
    "unknown setting of the task": (
        lambda run: settings_of(run, "task", speed=1),
        r"settings that split_digits does not take: --task\.speed 1",
    ),
    "setting out of its range": (
        lambda run: settings_of(run, "method", learning_rate=-1.0),
        r"settings that mfvi does not take: --method\.learning_rate -1",
    ),
    "setting against the name": (
        lambda run: settings_of(run, "task", dataset="mnist"),
        "split_digits fixes dataset to digits, not mnist",
    ),
    "unknown preset": (lambda run: change(run, preset="lucky"), "there is no preset 'lucky'"),
    "seed beyond the seeds": (lambda run: change(run, seed=10**30), r"the seed 10+ is not in \[0, 2\^63\)"),
    "seed below 0": (lambda run: change(run, seed=-1), r"the seed -1 is not in"),
    "unknown metric": (
        lambda run: change(run, metrics={"luck": 1.0}),
        "its metrics are not those of split_digits",
    ),
    "other main metric": (
        lambda run: change(run, task={"main_metric": "forgetting"}),
        "its metrics are not those of split_digits",
    ),
    "main metric that is none": (
        lambda run: change(run, task={"main_metric": "luck"}),
        "the main metric luck is none of the metrics",
    ),
    "reason for a metric that has a value": (
        lambda run: change(run, undefined={"average_nll": "lost"}),
        "undefined does not name the metrics without a value",
    ),
    "name that leaves the folder": (
        lambda run: change(run, task={"identity": "../split_digits"}),
        r"the identity \.\./split_digits is no name of a folder",
    ),
    "name of another task": (
        lambda run: change(run, task={"identity": "split_mnist"}),
        "was named split_mnist and is split_digits.* by now",
    ),
    "diverged with metrics": (
        lambda run: change(run, status="diverged", reason="loss"),
        "diverged and has metrics all the same",
    ),
    "method that is not installed": (
        lambda run: change(run, method={"name": "mfvii"}),
        "unknown method 'mfvii': did you mean mfvi",
    ),
    "task that is not installed": (
        lambda run: change(run, task={"name": "own_task:Task"}),
        "'own_task:Task' is not part of this suite: --import own_task:Task",
    ),
    "no curves": (lambda run: (run / "curves.csv").unlink(), r"cannot read .*curves\.csv: No such file"),
    "empty curves": (curves(""), r"curves\.csv is damaged"),
    "garbage as curves": (curves("\x00\x01garbage"), r"curves\.csv is damaged"),
    "curves cut off": (curves("curve,series,x,value\na,b,1"), r"curves\.csv is damaged"),
    "word in curves": (curves("curve,series,x,value\na,b,1,much\n"), r"curves\.csv is damaged"),
    "endless field in curves": (curves('curve,series,x,value\n"' + "a" * 200_000), r"curves\.csv is damaged"),
    "curves that go nowhere": (curves("curve,series,x,value\na,b,inf,1\n"), "an abscissa is not finite"),
    "escape in curves": (
        curves("curve,series,x,value\n\x1b[31m,b,1,1\n"),
        r"curves\.csv holds characters that are never printed: '\\x1b\[31m'",
    ),
    "too large": (
        lambda run: curves("curve,series,x,value\n" + "".join(f"{i:>300},b,1,1\n" for i in range(28_000)))(
            run
        ),
        r"has 8\.\d MiB of results; a committed record has at most 8",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_evidence_is_refused_in_one_line(run, tmp_path, spoil, message):
    spoil(run)
    with pytest.raises(UsageError, match=message) as caught:
        entries.add(run, tmp_path / "records")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "records").exists()


def test_curves_of_numbers_that_are_not_finite_are_kept(run, tmp_path):
    """A run may log an infinite loss and complete: that is a result."""
    (run / "curves.csv").write_text("curve,series,x,value\nloss,fit,1,inf\nloss,fit,2,nan\n")
    assert (entries.add(run, tmp_path / "records") / "curves.csv").is_file()


def test_long_curves_are_thinned_to_points_of_the_run(run, tmp_path):
    """First, last, extremes and the order stay; short series stay whole; thinning again changes nothing."""
    ramp = [(x, 1 / x if x != 777 else -3.5) for x in range(1, 2001)]
    lines = [f"loss,fit,{x},{value}" for x, value in ramp] + [f"nll,a,{x},nan" for x in range(entries.POINTS)]
    lines[1234] = "loss,fit,1235,inf"
    curves("curve,series,x,value\n" + "\n".join(lines) + "\n")(run)
    kept = (entries.add(run, tmp_path / "records") / "curves.csv").read_text().splitlines()[1:]
    assert kept == [line for line in lines if line in set(kept)]
    loss = [line for line in kept if line.startswith("loss")]
    assert {lines[0], lines[1999], lines[776], lines[1234]} <= set(loss)
    assert entries.POINTS - 10 <= len(loss) <= entries.POINTS
    xs = np.array([float(line.split(",")[2]) for line in loss])
    assert np.diff(xs).max() <= 2000 / (entries.POINTS - 3) + 1
    assert len(kept) - len(loss) == entries.POINTS
    again = (tmp_path / "records").glob("*/*/*/curves.csv").__next__().read_bytes()
    assert entries.thinned(again) == again


def test_committed_curves_are_thinned():
    brought()
    for directory, _ in entries.committed():
        curve = store.run_curves(directory)
        if curve is not None and curve.stat().st_size > 50_000:
            assert entries.thinned(curve.read_bytes()) == curve.read_bytes(), directory


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["arrays.safetensors", "curves.csv", "record.json"])
def test_record_is_whole_after_a_disk_too_full_to_replace_it(run, tmp_path, monkeypatch, name):
    """Whichever file finds the disk full, the older record stands and nothing lies beside it."""
    entries.add(run, tmp_path / "records")
    before = contents(tmp_path / "records")
    change(run, seconds=99.0)
    fsync = os.fsync

    def full(descriptor):
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=f"cannot write .*{name}: No space left on device"):
        entries.add(run, tmp_path / "records", force=True)
    assert contents(tmp_path / "records") == before
    monkeypatch.undo()
    entries.add(run, tmp_path / "records", force=True)
    assert contents(tmp_path / "records") != before


def test_record_is_whole_after_the_system_refused_to_write(run, tmp_path):
    """The system itself cuts every file off, as a quota does."""
    entries.add(run, tmp_path / "records")
    before = contents(tmp_path / "records")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OutputError, match="cannot write"):
            entries.add(run, tmp_path / "records", force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path / "records") == before


def test_diverged_run_is_evidence_too(tmp_path):
    """Diverged seeds count: leaving them out would flatter the method."""
    with pytest.raises(Diverged):
        bench.run("toys:TurnsNaN", "split_digits", task_settings=FEW, out=tmp_path)
    (path,) = tmp_path.rglob("record.json")
    change(path.parent, provenance={"commit": "0" * 40, "dirty": False})
    entries.add(path.parent, tmp_path / "records")
    ((_, record),) = entries.committed(tmp_path / "records")
    assert record.status == "diverged"


def test_run_from_a_repository_is_kept_once_its_method_is_committed(tmp_path, monkeypatch):
    """A user's own method in a repository of its own, from its first run to `bench record add`."""
    (tmp_path / "own_method.py").write_text(
        "import toys\n\n\nclass Own(toys.OnlyFirstStep):\n    '''Own.'''\n"
    )
    (tmp_path / ".gitignore").write_text("runs/\nrecords/\n__pycache__/\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)

    def add():
        bench.run("own_method:Own", "split_digits", task_settings=FEW, force=True)
        (path,) = (tmp_path / "runs").rglob("record.json")
        return cli.main(["record", "add", str(path.parent), "--to", "records"])

    git("init", "--quiet")
    assert add() == 2
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    assert add() == 0
    assert [record.method.identity for _, record in entries.committed(tmp_path / "records")] == [
        "own_method.Own"
    ]


def test_one_refused_run_does_not_undo_the_others(good, run, tmp_path, capsys):
    change(run, preset="smoke")
    given = [str(good), f"{good}/.", str(run)]
    assert cli.main(["record", "add", *given, "--to", str(tmp_path / "records")]) == 2
    out, err = capsys.readouterr()
    assert out.strip() == str(next(entries.committed(tmp_path / "records"))[0])
    twice, refused = err.splitlines()
    assert twice == f"bench: {good} is given twice: it counts once"
    assert "smoke" in refused


def test_run_of_an_installed_release_is_kept(run, tmp_path):
    """Whoever installed by pip has no commit; the hash of the source is the release's."""
    change(run, provenance={"commit": None, "dirty": None})
    assert entries.add(run, tmp_path / "records").is_dir()


def test_run_of_a_file_outside_git_is_refused_unless_its_source_is_published(tmp_path):
    done = bench.run("toys:OnlyFirstStep", "split_digits", task_settings=FEW, out=tmp_path)
    change(done.directory, provenance={"commit": None, "dirty": None})
    record = records.read_record(done.directory)
    with pytest.raises(
        UsageError, match="no commit holds the source of the method toys:OnlyFirstStep; put it"
    ):
        entries.refuse(done.directory, record)
    entries.refuse(done.directory, record, code="https://example.org/own")


def test_a_run_in_both_places_counts_once(good, tmp_path, monkeypatch):
    """A cell whose training a page draws lies under records/ and, without curves, in the submission."""
    ours = tmp_path / "submissions" / "reference"
    for seed in (0, 1):
        run = Path(shutil.copytree(good, ours / f"split_digits/mfvi/seed{seed}"))
        (run / "curves.csv").unlink()
        (run / "files.json").unlink()  # which no submission has
    kept = Path(shutil.copytree(good, tmp_path / "records" / "split_digits/mfvi/seed0"))
    monkeypatch.setattr(entries, "SUBMISSIONS", tmp_path / "submissions")
    monkeypatch.setattr(entries, "RECORDS", tmp_path / "records")
    assert [path for path, _ in entries.committed()] == [kept, ours / "split_digits/mfvi/seed1"]
    assert entries.directory_of("split_digits", "mfvi") == kept
    other = entries.directory_of("split_digits", "mfvi", 1)
    assert entries.scores_of(other)[1].keys() == records.read_arrays(good).keys()
    assert [row[:2] for row in finished(other).curves][:2] == [("accuracy", "pair 1"), ("accuracy", "pair 2")]


def test_arrays_and_curves_are_read_when_asked_for_and_once(good, tmp_path, monkeypatch):
    """A comparison of metrics needs neither. Negative control: arrays that are gone are missed then."""
    run = Path(shutil.copytree(good, tmp_path / "run"))
    (run / "files.json").unlink()
    read: list[str] = []
    for name in ("read_arrays", "read_curves"):
        way = getattr(records, name)
        told = lambda *of, name=name, way=way: read.append(name) or way(*of)  # noqa: E731
        monkeypatch.setattr(records, name, told)
    whole = finished(run)
    assert whole.metrics == records.read_record(run).metrics
    assert not read
    assert whole.arrays is whole.arrays
    assert whole.curves is whole.curves
    assert read == ["read_arrays", "read_curves"]
    (run / "arrays.safetensors").unlink()
    with pytest.raises(UsageError, match="holds no arrays"):
        finished(run).arrays  # noqa: B018 - asked for


# ---- the records of the project


def test_every_committed_record_is_found():
    folders = {path.parent for path in entries.RECORDS.rglob("*") if path.is_file() and path.name[0] != "."}
    assert folders == {directory for directory, _ in entries.committed(entries.RECORDS)}


def test_every_committed_record_is_named_by_what_it_says():
    """By names, settings and precision; fields that came later have defaults that are true of all."""
    found = list(entries.committed())
    assert len(found) > 100
    for directory, record in found:
        assert record.precision == "32-true"
        assert record.provenance.task_file_hash is None or len(record.provenance.task_file_hash) == 64
        assert entries.identities(record) == (record.task.identity, record.method.identity), directory


def label(record):
    """Where settings come from: what differs from the record's preset, or is marked there, is `by_hand`."""
    made = record.method
    method = registry.with_members(registry.method(made.name), made.members)
    values, _, of_preset = resolution.preset_values(method, registry.task(record.task.name), record.preset)
    own, preset = (
        registry.build(method.cls.settings_class, given, "method") for given in (made.settings, values)
    )
    return of_preset if own == preset else "by_hand"


def test_no_committed_record_hides_that_its_settings_were_set_by_hand():
    """The cheat is a setting changed on the command line and called untuned, or published."""
    for directory, record in entries.committed():
        assert record.method.tuning == label(record), directory
    for cell in (("map", "split_mnist"), ("swag", "depth_covariance_cifar10")):
        plain = next(r for _, r in entries.committed() if (r.method.name, r.task.name) == cell)
        changed = plain.method.settings | {"learning_rate": 0.123}
        assert label(plain) in ("untuned", "published")
        method = plain.method.model_copy(update={"settings": changed})
        assert label(plain.model_copy(update={"method": method})) == "by_hand"


def reasons(undefined):
    """Why metrics have no value; what to do about it, behind a colon, may be worded better by now."""
    return {name: why.partition(": `bench")[0] for name, why in undefined.items()}


@pytest.mark.slow
def test_every_committed_record_computes_again(monkeypatch):
    """Whatever is committed by now: its numbers follow from its arrays, under the task as it is."""
    scored = []

    def split(scores, spec):
        """As `refuse` calls it, so that every record is scored once."""
        scored.append((spec, *records.split_metrics(scores, spec)))
        return scored[-1][1:]

    monkeypatch.setattr(entries, "split_metrics", split)
    committed = dict(entries.committed())
    for directory in at_hand(committed):
        record = committed[directory]
        scored.clear()
        try:
            entries.refuse(directory, record)
        except NotFound as error:  # a reference that no run holds, and that no command can fetch
            print(f"not computed again, {error}")
            continue
        assert directory == entries.directory_of(record.task.identity, record.method.identity, record.seed)
        if record.status != "completed":
            continue
        ((spec, metrics, undefined),) = scored
        assert spec.version == record.task.version
        assert entries.agree(metrics, record.metrics)
        assert reasons(undefined) == reasons(record.undefined)


def test_metrics_agree_but_for_the_last_bits():
    """A processor may round a sum otherwise, and end a search elsewhere; any more is another number.

    The temperature is that of a committed run of `batch_ensemble`, on two processors.
    """
    kept = {"a": 0.4942471562171028, "b": None}
    assert entries.agree({"a": 0.49424715621710275, "b": None}, kept)
    assert entries.agree(
        {"bias": -0.0004945804163349629}, {"bias": -0.0004945804163200597}
    )  # of a risk of 0.4
    assert entries.agree({"temperature": 0.4722821777817464}, {"temperature": 0.4722821777835616})
    assert not entries.agree({"bias": -0.00049458041}, {"bias": -0.0004945804163200597})
    # Two images whose entropies differ in their last bits: an area of a committed run of `sghmc`.
    assert entries.agree({"aupr_x_entropy": 0.9302070593895033}, {"aupr_x_entropy": 0.930207783156566})
    assert not entries.agree({"aupr_x_entropy": 0.93020}, {"aupr_x_entropy": 0.93022})
    assert not entries.agree({"nll": 0.9302070593895033}, {"nll": 0.930207783156566})
    for other in ({"a": 0.49424715, "b": None}, {"a": None, "b": None}, {"a": kept["a"]}, kept | {"b": 0.0}):
        assert not entries.agree(other, kept)


def test_no_committed_metric_is_an_impossible_one():
    """A bound of a spec that runs exceed is a defect of the task: nobody could hand such a run in."""
    for directory, record in entries.committed():
        spec = task_of(record).spec
        for name, value in record.metrics.items():
            assert value is None or scoring.possible(value, spec.metrics[name]), (directory, name, value)
