"""METHOD `none`: studies in closed form take it, nothing else does; their runs are read like all others."""

import json

import pytest

import bench
from bench import cli
from bench.errors import UsageError
from bench.runs import registry
from bench.runs.closed_form import Nothing
from bench.runs.folders import table
from bench.runs.records import read_record
from bench.runs.runner import finished, redraw

STUDY = "product_matrix"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return bench.run("none", STUDY, preset="smoke", out=tmp_path_factory.mktemp("runs"))


def test_none_is_no_method_of_the_suite():
    assert registry.NONE not in registry.methods()
    entry = registry.method(registry.NONE)
    assert (entry.cls, entry.provides, entry.flags()) == (Nothing, frozenset(), [])


@pytest.mark.parametrize(
    ("method", "task", "members", "said"),
    [
        (
            "mfvi",
            STUDY,
            None,
            "product_matrix is a study in closed form, which fits nothing: give METHOD none",
        ),
        ("none", STUDY, 3, "product_matrix is a study in closed form, .* without --members"),
        ("none", "split_digits", None, "split_digits needs a method, none is for studies in closed form"),
        ("none", "diabetes_regression", None, "diabetes_regression needs a method"),
    ],
)
def test_study_refuses_a_method_and_every_other_task_refuses_none(method, task, members, said, tmp_path):
    with pytest.raises(UsageError, match=f"^{said}"):
        bench.run(method, task, members=members, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_none_fits_nothing():
    with pytest.raises(UsageError, match="METHOD none fits nothing"):
        Nothing(None, None)


def test_run_is_read_like_all_others(done):
    record = done.record
    assert (record.method.name, record.method.identity, record.fits) == ("none", "none", [])
    assert done.directory.parent.name == "none"
    assert finished(done.directory).metrics == record.metrics
    assert redraw(done.directory)
    again = bench.run("none", STUDY, preset="smoke", out=done.directory.parents[2])
    assert again.record == record
    assert "holds this run" in again.notices[0]
    assert record.command.startswith("bench run none product_matrix --preset smoke --seed 0")


def test_dry_run_tells_that_nothing_is_fitted(capsys):
    assert cli.main(["run", "none", STUDY, "--preset", "smoke", "--dry-run", "--format", "json"]) == 0
    told = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert told["fits"] == told["training steps"] == told["weights of the network"] == 0
    assert told["seconds"] < 60


def test_list_says_that_the_method_is_none(capsys):
    assert cli.main(["list", "tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    below = lines[lines.index(f"  {STUDY}") + 1 :]
    assert "METHOD is none" in " ".join(below[:2])
    assert cli.main(["list", "tasks", "--format", "json"]) == 0
    found = {task["name"]: task["closed_form"] for task in json.loads(capsys.readouterr().out)}
    assert {name for name, is_closed in found.items() if is_closed} == {"invariance_gap", STUDY}


@pytest.mark.slow
def test_sweep_takes_none(tmp_path, capsys, done):
    """Both seeds; the first has the arrays of the run above."""
    command = ["sweep", "--methods", "none", "--tasks", STUDY, "--preset", "smoke", "--seeds", "0,1"]
    assert cli.main([*command, "--out", str(tmp_path)]) == 0
    records = [read_record(path.parent) for path in sorted(tmp_path.rglob("record.json"))]
    assert [record.seed for record in records] == [0, 1]
    assert records[0].provenance.arrays_digest == done.record.provenance.arrays_digest
    capsys.readouterr()
    assert len(table(tmp_path)) == 2
