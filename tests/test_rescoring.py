"""`bench record rescore`: records follow the version of their task, from their arrays."""

import json
import shutil

import pytest

from bench.cli import main
from bench.errors import UsageError
from bench.leaderboard.evidence import rescoring, store, submission
from bench.leaderboard.evidence.entries import directory_of
from bench.leaderboard.evidence.store import needed, sha256

NAME = "sine_regression/mixture_vi/seed0"


@pytest.fixture(params=["records", "reference"])
def run(request, tmp_path, monkeypatch):
    """A committed run, with its arrays, among the records or in the project's own submission."""
    monkeypatch.setattr(rescoring, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(rescoring, "SUBMISSIONS", tmp_path)
    kept, copy = directory_of("sine_regression", "mixture_vi"), tmp_path / request.param / NAME
    shutil.copytree(kept, copy)
    shutil.copy(needed(kept), copy / store.ARRAYS)
    if request.param == "reference":
        files = {f"{NAME}/record.json": "0" * 64, "other": "1" * 64}
        (tmp_path / "reference" / submission.MANIFEST).write_text(json.dumps({"files": files}))
    return copy


def change(run, version=1, **metrics):
    """Rewrites version and metrics of a record; a metric that is None is not there."""
    record = json.loads((run / "record.json").read_text())
    record["task"]["version"] = version
    values = record["metrics"] | metrics
    record["metrics"] = {name: value for name, value in values.items() if value is not None}
    (run / "record.json").write_text(json.dumps(record))


def test_a_record_of_an_earlier_version_gets_what_it_lacks_and_keeps_every_other_byte(run):
    written = (run / "record.json").read_bytes()
    change(run, crps=None, pit_distance=None)
    assert rescoring.rescore(run) == {}
    made = (run / "record.json").read_bytes()
    kept, found = (json.loads(content)["metrics"] for content in (written, made))
    for name in ("crps", "pit_distance"):  # last bits are the processor's
        assert found[name] == pytest.approx(kept[name], rel=1e-12)
        made = made.replace(f'"{name}": {found[name]!r}'.encode(), f'"{name}": {kept[name]!r}'.encode())
    assert made == written
    manifest = run.parents[2] / submission.MANIFEST
    if manifest.exists():
        files = json.loads(manifest.read_text())["files"]
        digest = sha256((run / "record.json").read_bytes())
        assert files == {f"{NAME}/record.json": digest, "other": "1" * 64}


def test_a_number_that_moved_is_told_and_last_bits_do_not_move(run):
    before = json.loads((run / "record.json").read_text())["metrics"]
    nearly = before["sd"] * (1 + 1e-14)
    change(run, rmse=0.5, sd=nearly)
    assert rescoring.rescore(run) == {"rmse": (0.5, before["rmse"])}
    after = json.loads((run / "record.json").read_text())["metrics"]
    assert after == before | {"sd": nearly}


def test_the_command_says_what_moved(run, capsys):
    change(run, rmse=0.5)
    assert main(["record", "rescore", str(run)]) == 0
    assert "; rmse was 0.5, is 0." in capsys.readouterr().out


def test_what_is_no_committed_record_is_refused_in_one_line(run, tmp_path, capsys):
    elsewhere = shutil.copytree(run, tmp_path / "runs" / NAME)
    with pytest.raises(UsageError, match="is no committed record"):
        rescoring.rescore(elsewhere)
    assert main(["record", "rescore", str(run), "--force"]) == UsageError.exit_code
    assert "--to and --force are of bench record add" in capsys.readouterr().err
