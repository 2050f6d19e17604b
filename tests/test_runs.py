"""`bench runs`, `bench compare` and `bench.table`, on records that were made up: nothing is trained here."""

import builtins
import csv
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import bench
from bench import cli
from bench.errors import UsageError
from bench.leaderboard.evidence.entries import RECORDS, directory_of
from bench.leaderboard.rank import against
from bench.runs import folders as runs
from bench.runs.means import lines
from bench.system.files import is_locked, locked

EXAMPLE = json.loads((directory_of("split_mnist", "mfvi") / "record.json").read_text())
VALUES = (0.93, 0.95, 0.94, 0.97)


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Calls `bench ARGUMENTS` in an empty folder; returns exit code, standard output and standard error.

    The commands find no committed entry.
    """
    monkeypatch.chdir(tmp_path)
    for place in ("SUBMISSIONS", "RECORDS"):
        monkeypatch.setattr(against, place, tmp_path / "none")
    for console in (cli.errors, cli.output):
        monkeypatch.setattr(console, "_width", 100)

    def call(*arguments):
        capsys.readouterr()
        return cli.main([str(a) for a in arguments]), *capsys.readouterr()

    return call


def made(method="mfvi", seed=0, value=0.5, out="runs", task="split_mnist", **changes):
    """Writes a record; changes name fields by a path such as `task.version`. Returns the run's directory."""
    record = json.loads(json.dumps(EXAMPLE))
    record["method"] |= {"name": method.partition("+")[0], "identity": method}
    record["task"]["identity"] = task
    record |= {"seed": seed, "metrics": dict.fromkeys(EXAMPLE["metrics"], 0.125)}
    record["metrics"]["average_accuracy"] = value
    record["provenance"]["arrays_digest"] = f"{method} {seed} {value}"
    if value is None:
        record["undefined"] = {"average_accuracy": "nothing to average"}
    for name, change in changes.items():
        part, _, field = name.rpartition("__")
        (record[part] if part else record)[field] = change
    directory = Path(out, task, method, f"{record['preset']}-seed{seed}")
    directory.mkdir(parents=True)
    (directory / "record.json").write_text(json.dumps(record))
    return directory


@pytest.fixture
def folder(call):
    """A run of every status."""
    for seed, value in enumerate(VALUES):
        made("mfvi", seed, value)
    made("map", 0, None, status="diverged", reason="epoch 3: the loss is nan")
    made("map", 1, None, status="failed", reason="failed: ValueError: no")
    made("map", 2, 0.25)
    made("ewc", 0).joinpath("record.json").write_text('{"schema_version": 1')
    stopped = Path("runs/split_mnist/radial/standard-seed7")
    (stopped / "checkpoints").mkdir(parents=True)
    (stopped / "unfinished.json").write_text("{}")
    for path in (stopped, *stopped.rglob("*")):
        os.utime(path, (time.time() - 7200,) * 2)
    return Path("runs")


# ------------------------------------------------------------------------------------------------ bench runs


def test_runs_lists_every_status_and_no_damage_ends_it(call, folder):
    code, out, err = call("runs")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "runs/split_mnist: average_accuracy (fraction, higher is better)"
    words = [line.split() for line in out.splitlines()]
    assert ["mfvi", "standard", "3", "completed", "0.9700", "102.4", "-"][:6] in [line[:6] for line in words]
    assert ["map", "standard", "0", "diverged", "-"] in [line[:5] for line in words]
    assert ["map", "standard", "1", "failed", "-"] in [line[:5] for line in words]
    assert ["radial", "standard", "7", "unfinished", "-", "-"] in [line[:6] for line in words]
    assert ["ewc", "standard", "0", "damaged", "-", "-"] in [line[:6] for line in words]
    assert "epoch 3: the loss is nan" in out
    assert re.search(r"radial/standard-seed7: last moved (2 h|120 min) ago", out)
    code, out, _ = call("runs", folder, "--status", "unfinished")
    assert [line.split()[0] for line in out.splitlines()[3:4]] == ["radial"]


def test_a_run_whose_lock_is_held_is_running_and_looking_takes_no_lock(call, folder):
    directory = Path("runs/split_mnist/radial/standard-seed7")
    with locked(directory):
        assert is_locked(directory)
        assert re.search(r"radial .*running", call("runs")[1])
    assert not is_locked(directory)
    (directory / ".lock").touch()  # as a process leaves it that was killed
    assert not is_locked(directory)
    assert re.search(r"radial .*unfinished", call("runs")[1])
    with locked(directory):
        pass


def test_runs_as_csv_holds_every_digit_and_the_directory(call, folder):
    code, out, err = call("runs", "--format", "csv")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 9
    (row,) = (row for row in rows if row["directory"] == "runs/split_mnist/mfvi/standard-seed2")
    assert {
        name: row[name] for name in ("task", "method", "preset", "seed", "status", "metric", "value")
    } == {
        **{"task": "split_mnist", "method": "mfvi", "preset": "standard", "seed": "2"},
        **{"status": "completed", "metric": "average_accuracy", "value": "0.94"},
    }


def test_runs_of_one_s_own_layout_are_listed_by_their_directory(call):
    made("mfvi", 0, 0.5, out="x").rename("download")
    out = call("runs", ".")[1]
    assert out.startswith("download: average_accuracy")
    assert call("runs", "nowhere")[0] == 2
    Path("empty").mkdir()
    code, out, err = call("runs", "empty")
    assert (code, out, err) == (0, "", "bench: no run below empty\n")


def test_thousands_of_runs_are_listed_in_seconds(tmp_path):
    """2,000 records; a bound of ten times what it takes (0.6 to 0.8 s of processor time)."""
    text = json.dumps(EXAMPLE)
    for i in range(2000):
        directory = tmp_path / f"task{i % 10}" / f"method{i // 100}" / f"standard-seed{i}"
        directory.mkdir(parents=True)
        (directory / "record.json").write_text(text)
    began = time.process_time()
    assert len(runs.below(tmp_path)) == 2000
    assert time.process_time() - began < 8


# --------------------------------------------------------------------------------------------- bench compare


def test_compare_gives_student_s_interval_over_seeds(call, folder):
    code, out, err = call("compare", folder, "--format", "json")
    assert code == 0
    rows = {row["method"]: row for row in json.loads(out)}
    assert rows.keys() == {"mfvi", "map"}
    low, high = stats.t.interval(0.95, 3, np.mean(VALUES), stats.sem(VALUES))
    row = rows["mfvi"]
    assert (row["mean"], row["mean_low"], row["mean_high"]) == pytest.approx((0.9475, low, high), abs=1e-12)
    assert (row["unit"], row["better"], row["seeds"]) == ("fraction", "higher", 4)
    row = rows["map"]
    assert (row["mean"], row["mean_low"], row["mean_high"]) == (0.25, None, None)
    assert (row["seeds"], row["diverged"], row["failed"]) == (1, 1, 1)
    assert "ewc/standard-seed0 is damaged and not counted" in err
    assert "runs that are not finished and not counted: 1" in err
    out = call("compare", folder)[1]
    assert "split_mnist, standard: average_accuracy (fraction, higher is better)" in out
    assert re.search(r"your mfvi +0.948 \(0.920 to 0.975\) +4 +0 +0", out)
    assert re.search(r"your map +0.2500 \(n = 1: no interval\) +1 +1 +1", out)


def test_compare_shows_other_metrics_the_main_one_first(call, folder):
    out = call("compare", folder, "--metric", "forgetting")[1]
    assert "forgetting (fraction, lower is better)" in out
    assert "average_accuracy" not in out
    rows = json.loads(call("compare", folder, "--metric", "all", "--format", "json")[1])
    assert list(dict.fromkeys(row["metric"] for row in rows)) == list(EXAMPLE["metrics"])
    assert rows[0]["metric"] == "average_accuracy"
    code, out, err = call("compare", folder, "--metric", "forgeting")
    assert (code, out) == (2, "")
    assert "--metric forgeting: did you mean forgetting" in err.splitlines()[-1]
    code, out, err = call("compare", "runs/split_mnist/radial")
    assert (code, out) == (2, "")
    assert "no finished run" in err


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({"preset": "smoke"}, "split_mnist, smoke"),
        ({"task__version": 2}, "split_mnist, standard, version 2"),
        ({"task__data_digest": "f" * 64}, "split_mnist, standard, data ffffffff"),
    ],
)
def test_runs_of_another_protocol_are_kept_apart(call, change, title):
    for seed in range(3):
        made("mfvi", seed, 0.5)
        made("mfvi", seed, 0.9, out="others", **change)
    found, said = lines(runs.gather([Path("runs"), Path("others")])[0])
    assert said == []
    means = {line.protocol: line.mean("average_accuracy").centre for line in found}
    assert len(means) == 2
    assert means[title] == pytest.approx(0.9)


def test_another_source_and_a_second_run_of_a_seed_are_said(call):
    for seed in range(3):
        made("mfvi", seed, 0.5)
    made("mfvi", 3, 0.5, provenance__source_hash="other", out="a")
    made("mfvi", 4, 0.5, provenance__method_file_hash="other", out="a")
    made("mfvi", 0, 0.9, created="2030-01-01T00:00:00+00:00", out="b")
    made("mfvi", 0, 0.1, created="2020-01-01T00:00:00+00:00", out="c")
    (line,), said = lines(runs.gather([Path()])[0])
    assert said == [
        "split_mnist, standard: the runs are of 2 states of the suite's source",
        "split_mnist, standard: the runs of mfvi are of different states of its file",
        "split_mnist, standard: seed 0 of mfvi is there 3 times; the newest counts",
    ]
    assert line.values("average_accuracy") == [0.9, 0.5, 0.5, 0.5, 0.5]


def test_seeds_of_a_method_that_does_not_depend_on_them_are_one_value(call):
    """As of its own word; an old record leaves it to the method of that name (`linear`)."""
    for seed in range(4):
        made("mfvi", seed, 0.5, method__seed_matters=False)
        made("linear", seed, 0.5)
        made("map", seed, 0.5)
        made("hmc", seed, 0.5 + seed, method__seed_matters=False)  # here the task's problems differ
    rows = {row["method"]: row for row in json.loads(call("compare", "runs", "--format", "json")[1])}
    for method, has_interval, is_said in (
        *(("mfvi", False, True), ("linear", False, True)),
        *(("map", False, False), ("hmc", True, True)),
    ):
        assert (rows[method]["mean_low"] < rows[method]["mean"]) == has_interval, method
        assert ("no seed changes the answer" in rows[method]["note"]) == is_said, method
    assert "0.5000 (0.5000 to 0.5000)" in call("compare", "runs/split_mnist/linear")[1]
    other = call("compare", "runs", "--metric", "forgetting")[1]
    assert "0.1250 (equal for every seed: no interval)" in other
    assert "does not depend on the seed" in " ".join(other.split())


def test_names_that_are_not_known_here_have_numbers_without_unit(call):
    own = {"method__name": "nowhere.methods:Mine", "task__name": "nowhere.tasks:Mine"}
    made("nowhere.methods.Mine", 0, 0.5, task="mine", **own)
    made("mfvi", 1, 0.5, metrics={"average_accuracy": 0.5, "of_old": 2.0})
    mine = "runs/mine/nowhere.methods.Mine/standard-seed0"
    code, out, _ = call("show", mine)
    assert code == 0
    assert "units and directions are not known here" in out
    assert re.search(r"average_accuracy \(main\) +0.5000", out)
    assert re.search(
        r"of_old +2.000 .*no metric of the task", call("show", "runs/split_mnist/mfvi/standard-seed1")[1]
    )
    code, out, _ = call("runs")
    assert code == 0
    assert re.search("runs/mine: average_accuracy .*nowhere", out)
    code, out, _ = call("compare", "runs")
    assert code == 0
    assert out.count("0.5000 (n = 1: no interval)") == 2


# -------------------------------------------------------------------------------------- several, and twice


def test_show_prints_several_runs_below_each_other_and_each_once(call):
    first, second = made("mfvi", 0, 0.25), made("mfvi", 1, 0.75)
    Path("link").symlink_to(first)
    code, out, err = call("show", first, second, "link", f"./{first}/")
    assert code == 0
    assert re.findall(r"^mfvi on split_mnist, standard, seed (\d)", out, re.MULTILINE) == ["0", "1"]
    assert err.splitlines() == [
        "bench: link is given twice: it counts once",
        f"bench: {first} is given twice: it counts once",
    ]
    rows = json.loads(call("show", first, second, "--format", "json")[1])
    assert [row["value"] for row in rows if row["main"]] == [0.25, 0.75]
    assert len(rows) == 2 * len(EXAMPLE["metrics"])
    assert call("show", first, "nowhere")[1] == ""  # nothing is half printed


def test_compare_counts_a_run_once(call):
    directories = [made("mfvi", seed, 0.5 + seed) for seed in range(3)]
    code, out, err = call("compare", "runs", directories[0], "--format", "json")
    assert code == 0
    assert json.loads(out)[0]["seeds"] == 3
    assert err.splitlines()[0] == f"bench: {directories[0]} is given twice: it counts once"


# ----------------------------------------------------------------------------------------------- bench.table


def test_table_has_a_row_for_every_run(folder):
    frame = bench.table("runs")
    metrics = list(EXAMPLE["metrics"])
    assert list(frame.columns) == [
        "task",
        "method",
        "preset",
        "seed",
        "status",
        *metrics,
        "seconds",
        "directory",
    ]
    assert len(frame) == 9
    of_mfvi = frame[frame.method == "mfvi"]
    assert of_mfvi.average_accuracy.tolist() == list(VALUES)
    assert frame.average_accuracy.dtype == "float64"
    assert frame[frame.status == "unfinished"].average_accuracy.isna().all()
    directory = of_mfvi.directory.iloc[1]
    for one in (directory, Path(directory), [bench.runs.runner.Run(Path(directory)), directory]):
        assert bench.table(one).average_accuracy.tolist() == [VALUES[1]]
    with pytest.raises(UsageError, match="nowhere is no folder"):
        bench.table("nowhere")


def test_table_needs_pandas_and_nothing_else_does(monkeypatch, tmp_path):
    imported = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "pandas":
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"bench\.table needs pandas: pip install"):
        bench.table(tmp_path)


# ----------------------------------------------------------------------------------------- a closed pipe


@pytest.mark.parametrize(
    "arguments", [["list"], ["runs", RECORDS, "--format", "csv"], ["--help"], ["runs", "--help"]]
)
def test_a_reader_that_is_gone_is_quiet(monkeypatch, arguments):
    """Nor does the interpreter say anything when it closes standard output."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main([str(argument) for argument in arguments]) == 141
        print("more")
        stream.flush()


@pytest.mark.slow
def test_a_pipe_that_is_closed_early_leaves_no_word():
    command = f"set -o pipefail; {sys.executable} -m bench list | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")
    assert len(done.stdout.splitlines()) == 1
