"""A run made again: it gives its numbers, altered predictions do not pass, and nothing runs that must not."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from test_submitting import META, as_standard

import bench
from bench import cli
from bench.data import array_digest
from bench.errors import BenchError, UsageError
from bench.leaderboard.check import rerun, verify
from bench.leaderboard.check.structure import HandedIn
from bench.leaderboard.evidence import store, submission, submitting
from bench.leaderboard.evidence.submission import Word
from bench.runs.folders import gather
from bench.runs.records import read_record, write_record
from bench.runs.registry import methods
from bench.system.source import source_hash

SEEDS = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three seeds of a quick run, made by this source."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        bench.run("map", "split_digits", seed=seed, preset="smoke", out=folder).directory
        for seed in range(SEEDS)
    ]


def handed_in(run, arrays=None, to=None):
    """A run as a submission would hold it, with other arrays if they are given."""
    path = run / "arrays.safetensors"
    if arrays is not None:
        path = to / "arrays.safetensors"
        path.write_bytes(safetensors.numpy.save(arrays))
    return HandedIn(f"split_digits/map/{run.name}", read_record(run), path, path.lstat())


def arrays_of(run):
    return safetensors.numpy.load_file(run / "arrays.safetensors")


# ------------------------------------------------------------------------------------------------ the numbers


def test_run_is_made_again_and_gives_its_numbers(runs, tmp_path):
    """A process of its own, by the command of its record; on one processor they are the same bits."""
    record = read_record(runs[1])
    again, arrays = rerun.made_again(record, tmp_path, None, rerun.without_network(), None)
    assert again.seed == 1
    assert again.metrics == pytest.approx(record.metrics)
    assert array_digest(arrays) == record.provenance.arrays_digest
    is_same, told = rerun.compared(handed_in(runs[1]), again, arrays, list(map(handed_in, runs)))
    assert is_same
    assert told.startswith("the same predictions bit for bit; average_accuracy is ")


def better(arrays, examples=8):
    """The arrays with a few wrong predictions of the last step made right: what a cheat would hand in."""
    changed = dict(arrays)
    name = next(name for name in arrays if name.endswith("log_probs"))
    log_probs = arrays[name].astype(np.float64)
    flat = log_probs.reshape(-1, log_probs.shape[-1])
    worst = flat.max(-1).argsort()[-examples:]
    for row in worst:
        flat[row] = np.roll(flat[row], 1)
    return changed | {name: log_probs.astype(arrays[name].dtype)}


def test_altered_predictions_fail(runs, tmp_path):
    """Eight predictions of hundreds, as sure as before and of other classes: the run made again tells."""
    honest, again = arrays_of(runs[0]), read_record(runs[0])
    cheat = handed_in(runs[0], better(honest), tmp_path)
    seeds = [cheat, *map(handed_in, runs[1:])]
    is_same, told = rerun.compared(cheat, again, honest, seeds)
    assert not is_same
    assert "differs by" in told
    assert "two of its seeds differ by" in told


def test_another_seed_is_not_the_run(runs):
    seeds = list(map(handed_in, runs))
    is_same, _ = rerun.compared(seeds[0], read_record(runs[0]), arrays_of(runs[1]), seeds)
    assert not is_same


def test_rounding_is_forgiven_and_ten_times_as_much_is_not(runs, tmp_path):
    """Noise of a twentieth of the distance of two seeds passes, of a half it fails."""
    seeds = list(map(handed_in, runs))
    honest, other = arrays_of(runs[0]), arrays_of(runs[1])
    generator = np.random.default_rng(0)
    for share, passes in ((0.05, True), (0.5, False)):
        moved = {
            name: array + share * rerun.distance(array, other[name]) * generator.standard_normal(array.shape)
            if array.dtype.kind == "f"
            else array
            for name, array in honest.items()
        }
        assert rerun.compared(seeds[0], read_record(runs[0]), moved, seeds)[0] is passes


def test_run_that_did_not_diverge_again_fails(runs):
    diverged = read_record(runs[0]).model_copy(update={"status": "diverged"})
    lost = HandedIn("split_digits/map/seed0", diverged, None, None)
    is_same, told = rerun.compared(lost, read_record(runs[0]), arrays_of(runs[0]), [lost])
    assert (is_same, told) == (False, "it completed, and was handed in as diverged")
    assert rerun.compared(lost, diverged, {}, [lost])[0]


def test_run_that_diverges_again_is_the_run(runs, tmp_path, monkeypatch):
    """It ends with its own exit code, and a record without arrays."""
    lost = {"status": "diverged", "reason": "NaN", "metrics": {"average_accuracy": None}}
    diverged = changed(runs[0], arrays_digest=None).model_copy(
        update=lost | {"undefined": {"average_accuracy": "it diverged"}}
    )

    def ended(words, **_):
        directory = Path(words[words.index("--out") + 1]) / "task" / "method" / "smoke-seed0"
        directory.mkdir(parents=True)
        write_record(directory, diverged)
        return subprocess.CompletedProcess(words, 4, b"", b"")

    monkeypatch.setattr(rerun.subprocess, "run", ended)
    again, arrays = rerun.made_again(diverged, tmp_path, None, [], None)
    assert (again.status, arrays) == ("diverged", {})


# --------------------------------------------------------------------------------------------------- the draw


def test_draw_follows_from_both_and_reaches_every_run():
    """Of 7 runs each is drawn 100 times in 700 in the mean: within 4.5 sd, which fails once in 20,000."""
    counts = np.bincount([rerun.draw("a" * 64, str(word), 7) for word in range(700)], minlength=7)
    assert abs(counts - 100).max() < 4.5 * np.sqrt(700 * 6 / 49)
    drawn = {rerun.draw(f"{digest:064x}", "one word", 1000) for digest in range(20)}
    assert len(drawn) > 15
    assert rerun.draw("a" * 64, "one word", 1000) == rerun.draw("a" * 64, "one word", 1000)


# ------------------------------------------------------------------------------------------------- the source


def changed(run, method=None, **provenance):
    record = read_record(run)
    name = method or record.method.name
    return record.model_copy(
        update={
            "method": record.method.model_copy(update={"name": name}),
            "provenance": record.provenance.model_copy(update=provenance),
        }
    )


def test_only_this_project_s_code_is_run(runs, tmp_path):
    for record, message in (
        (changed(runs[0], "their.module:Method"), "--trust runs its code, which is a stranger's"),
        (changed(runs[0], "--config=evil"), "unknown method '--config=evil'"),
        (changed(runs[0], commit="0" * 40), "is none of this project's history: nothing of it is run"),
        (changed(runs[0], commit=None, source_hash="0" * 64), "another source of the suite than this one"),
    ):
        with pytest.raises(UsageError, match=message):
            rerun._source(record, tmp_path, trust=False)
    released = changed(runs[0], commit=None, source_hash=source_hash())
    assert rerun._source(released, tmp_path, trust=False)[0] is None
    trusted = changed(runs[0], "their.module:Method", source_hash=source_hash())
    assert rerun._source(trusted, tmp_path, trust=True)[0] is None
    assert list(tmp_path.iterdir()) == []


def test_source_is_that_of_the_commit(runs, tmp_path):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=store.ROOT, capture_output=True, text=True)
    if head.returncode != 0:
        pytest.skip("this is no clone")
    source, told = rerun._source(changed(runs[0], commit=head.stdout.strip()), tmp_path, trust=False)
    assert told == f"by commit {head.stdout[:12]}"
    assert (source / "bench" / "methods" / "map.py").samefile(source / "methods" / "map.py")
    assert {path.stem for path in (source / "methods").glob("*.py")} >= {"map", "radial"} <= methods().keys()


@pytest.mark.parametrize("name", ["source_hash", "method_file_hash"])
def test_record_that_names_another_source_than_made_it_fails(runs, name):
    again = read_record(runs[0])
    rerun.refuse_other_source(again, again)
    with pytest.raises(BenchError, match=f"the {name} of the record is not that of the source"):
        rerun.refuse_other_source(changed(runs[0], **{name: "0" * 64}), again)


# ------------------------------------------------------------------------------------------------ the process


def test_run_has_no_network():
    isolation = rerun.without_network()
    if not isolation:
        pytest.skip("this system permits no process without network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        for before, code in (([], 0), (isolation, 1)):
            done = subprocess.run([*before, sys.executable, "-c", words], capture_output=True)
            assert done.returncode == code


@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [("_LONGEST", 0.2, "it took more than 0 s"), ("MEMORY", 2**20, "it ended with")],
)
def test_run_beyond_a_limit_is_ended(runs, tmp_path, monkeypatch, limit, most, message):
    monkeypatch.setattr(rerun, limit, most)
    with pytest.raises(BenchError, match=message):
        rerun.made_again(read_record(runs[0]), tmp_path, None, [], None)


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def handed(runs, tmp_path):
    """A submission of the runs, as if they were of the preset standard."""
    for run in runs:
        copy = tmp_path / "runs" / "split_digits" / "map" / run.name.replace("smoke", "standard")
        shutil.copytree(run, copy)
        as_standard(copy)
        record = json.loads((copy / "record.json").read_text())
        (copy / "record.json").write_text(json.dumps(record | {"preset": "standard"}))
        (copy / "files.json").unlink()
    meta = tmp_path / "meta.toml"
    meta.write_text(META.replace("tuning_budget = 0", "tuning_budget = 5"))
    to = tmp_path / "my-method"
    return submitting.submit(gather([tmp_path / "runs"])[0], to, submitting.read_words(meta))


@pytest.mark.parametrize("alter", [False, True], ids=["honest", "altered"])
def test_command_gives_the_tier_or_says_what_differs(handed, monkeypatch, capsys, alter):
    def again(record, *_):
        arrays = arrays_of(handed / "split_digits" / "map" / f"seed{record.seed}")
        return record, better(arrays) if alter else arrays

    accepted = verify.Verdict("accepted", "accepted", "", "recomputed")
    monkeypatch.setattr(verify, "verify", lambda *_: accepted)
    monkeypatch.setattr(rerun, "_source", lambda *_: (None, "by this source"))
    monkeypatch.setattr(rerun, "made_again", again)
    code = cli.main(["verify", str(handed), "--rerun", "one", "--beacon", "2026-11-27.drand", "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    digest = store.sha256((handed / "submission.json").read_bytes())
    seed = rerun.draw(digest, "2026-11-27.drand", SEEDS)
    assert f"split_digits/map/seed{seed}, by submission {digest} and 2026-11-27.drand" in found["message"]
    if alter:
        assert (code, found["code"], found["tier"]) == (1, "rerun-differs", None)
        return
    assert (code, found["code"], found["tier"]) == (0, "accepted", "re-run")
    words = tomllib.loads(err.partition("status.toml:\n")[2])
    assert Word.model_validate(words["my-method"]).tier == "re-run"


def test_run_that_cannot_be_made_again_is_rejected(handed, monkeypatch):
    def fails(*_):
        raise BenchError("it ended with 1")

    monkeypatch.setattr(rerun, "_source", lambda *_: (None, "by this source"))
    monkeypatch.setattr(rerun, "made_again", fails)
    found, _ = rerun.rerun(handed)
    assert (found.status, found.code, found.tier) == ("rejected", "rerun-failed", None)
    with pytest.raises(UsageError, match="--beacon"):
        rerun.rerun(handed, beacon='"; evil')


def test_submission_that_is_rejected_is_not_run(tmp_path, capsys):
    os.mkdir(tmp_path / "empty")
    assert cli.main(["verify", str(tmp_path / "empty"), "--rerun", "one"]) == 1
    assert capsys.readouterr().out.startswith("rejected (no-submission)")
    assert cli.main(["verify", str(tmp_path / "empty"), "--trust"]) == 2
    assert submission.MANIFEST not in {path.name for path in Path(tmp_path / "empty").iterdir()}
