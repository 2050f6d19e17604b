"""From runs to a submission: what is taken, what is refused, that it is whole, and the same every time."""

import io
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import test_store
import test_submission
from plans import resolved

import bench
from bench import cli
from bench.data import array_digest
from bench.errors import Diverged, OutputError, UsageError
from bench.leaderboard.evidence import committing, entries, manifest, store, submission, submitting
from bench.runs import records
from bench.runs.folders import gather
from bench.system import places

WORDS = {
    "authors": ["A. Author", "B. Author"],
    "licence": "CC-BY-4.0",
    "tuning_budget": 0,
    "trained_on": [],
}
META = 'authors = ["A. Author", "B. Author"]\nlicence = "CC-BY-4.0"\ntuning_budget = 0\ntrained_on = []\n'


def change(run, **parts):
    """Rewrites entries of the record; a dictionary is merged into its part."""
    record = json.loads((run / "record.json").read_text())
    for name, value in parts.items():
        record[name] = record[name] | value if isinstance(value, dict) else value
    (run / "record.json").write_text(json.dumps(record))


def as_standard(run, task="split_digits"):
    """Makes the record of a short run one of the preset standard, from committed source."""
    standard = resolved("map", task)
    change(
        run,
        task={"identity": task, "settings": vars(standard.task_settings)},
        method={"identity": "map"},
        provenance={"commit": "0" * 40, "dirty": False},
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Three seeds of a method, whose predictions differ; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        done = bench.run("map", "split_digits", seed=seed, task_settings={"epochs": 1}, out=folder)
        as_standard(done.directory)
    return folder


@pytest.fixture
def runs(good, tmp_path):
    """A copy of them that may be changed."""
    return Path(shutil.copytree(good, tmp_path / "runs"))


def run_of(runs, seed):
    (directory,) = runs.glob(f"*/*/*-seed{seed}")
    return directory


def submit(runs, to, words=WORDS, **options):
    return submitting.submit(gather([runs])[0], to, words, **options)


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


# ---- what is made


def test_submission_holds_the_runs_byte_for_byte_and_their_hashes(good, tmp_path):
    directory = submit(good, tmp_path / "my-method")
    made = contents(directory)
    manifest = submission.read(directory)
    assert made.keys() == {"submission.json", *manifest.files}
    assert list(manifest.files) == sorted(manifest.files)
    assert manifest.files.keys() == {
        f"split_digits/map/seed{seed}/{name}" for seed in range(3) for name in submission.RUN_FILES
    }
    for name, digest in manifest.files.items():
        assert store.sha256(made[name]) == digest
        *_, seed, file = name.split("/")
        assert made[name] == (run_of(good, submission.seed_of(Path(seed))) / file).read_bytes()
    assert (manifest.slug, manifest.authors) == ("my-method", ["A. Author", "B. Author"])
    assert manifest.paper is manifest.code is None
    assert len(manifest.environments) == 1
    seconds = sum(records.read_record(run_of(good, seed)).seconds for seed in range(3))
    assert manifest.hours == pytest.approx(seconds / 3600, abs=1e-4)
    assert [path.name for path in submission.runs_in(directory)] == ["seed0", "seed1", "seed2"]


def test_same_runs_give_the_same_bytes_in_any_order(good, tmp_path):
    first = contents(submit(good, tmp_path / "a" / "mine"))
    backwards = gather([run_of(good, seed) for seed in (2, 0, 1)])[0]
    os.utime(run_of(good, 0) / "record.json", (0, 0))
    assert contents(submitting.submit(backwards, tmp_path / "b" / "mine", WORDS)) == first


def test_submission_is_submitted_again(good, tmp_path):
    """Its own runs have no curves."""
    first = submit(good, tmp_path / "a" / "mine")
    assert contents(submit(first, tmp_path / "b" / "mine")) == contents(first)


def diverged(runs, seed):
    """Makes a run one that diverged."""
    with pytest.raises(Diverged):
        bench.run(
            "toys:TurnsNaN", "split_digits", seed=1, task_settings={"epochs": 1}, out=runs.parent / "nan"
        )
    (path,) = (runs.parent / "nan").rglob("record.json")
    lost = json.loads(path.read_text())
    parts = {name: lost[name] for name in ("status", "reason", "metrics", "undefined")}
    run = run_of(runs, seed)
    change(run, provenance={"arrays_digest": None}, **parts)
    (run / "arrays.safetensors").unlink()
    (run / "files.json").unlink()


def test_diverged_runs_count(runs, tmp_path):
    diverged(runs, 1)
    files = submission.read(submit(runs, tmp_path / "mine")).files
    assert "split_digits/map/seed1/record.json" in files
    assert "split_digits/map/seed1/arrays.safetensors" not in files


# ---- what is refused


def forged(run):
    """Better predictions under the old metrics."""
    arrays = records.read_arrays(run)
    arrays["labels"] = arrays["labels"][::-1]
    records.write_arrays(run, arrays)
    change(run, provenance={"arrays_digest": array_digest(arrays)})


def again(runs, seed, as_seed):
    """Another run of a seed."""
    copy = Path(shutil.copytree(run_of(runs, seed), runs / "more" / "map" / f"again-seed{as_seed}"))
    change(copy, seed=as_seed)


def drop(runs, *seeds):
    for seed in seeds:
        shutil.rmtree(run_of(runs, seed))


def of(seed, **parts):
    return lambda runs: change(run_of(runs, seed), **parts)


REFUSED = {
    "failed": (
        of(1, status="failed", reason="failed: E"),
        r"seed1 failed \(failed: E\): a defect is no evidence",
    ),
    "smoke": (of(1, preset="smoke"), "seed1 is a smoke run"),
    "dirty": (
        of(1, provenance={"dirty": True}),
        "seed1 was made from changed source: commit, then run again",
    ),
    "unfinished": (
        lambda runs: os.replace(run_of(runs, 1) / "record.json", run_of(runs, 1) / "unfinished.json"),
        "seed1 is unfinished",
    ),
    "damaged": (lambda runs: (run_of(runs, 1) / "record.json").write_text("{"), "seed1 is damaged"),
    "unranked": (
        lambda runs: shutil.copytree(entries.directory_of("toy_regression", "map"), runs / "toy"),
        "toy_regression is not ranked; keep it by bench record add",
    ),
    "variant": (
        of(1, task={"identity": "split_digits+epochs=1"}),
        r"ranks split_digits under its standard settings, and this is split_digits\+epochs=1",
    ),
    "other version of the task": (of(1, task={"version": 99}), "are not of one version of the task"),
    "old version of the task": (
        lambda runs: [of(seed, task={"version": 99})(runs) for seed in range(3)],
        "is of version 99 of split_digits, now 1: run again",
    ),
    "other data": (of(1, task={"data_digest": "0" * 64}), "are not of one digest of the task's data"),
    "other version of the package": (
        of(1, provenance={"version": "0.0.9"}),
        "are not of one version of this package",
    ),
    "other state of the method": (
        of(1, provenance={"method_file_hash": "0" * 64}),
        "are not of one state of the method's file",
    ),
    "a seed in the middle is missing": (
        lambda runs: drop(runs, 1),
        "has the seeds 0, 2: they must be 0, 1, 2",
    ),
    "the first seed is missing": (lambda runs: drop(runs, 0), "has the seeds 1, 2: they must be 0, 1, 2"),
    "too few seeds": (
        lambda runs: drop(runs, 2),
        "map on split_digits has 2 seeds: the board takes 3 or more",
    ),
    "a seed twice": (lambda runs: again(runs, 1, 1), "are both seed 1 of map on split_digits: hand in one"),
    "forged": (lambda runs: forged(run_of(runs, 1)), "the metrics of the record are not those of its arrays"),
    "no arrays": (
        lambda runs: (run_of(runs, 1) / "arrays.safetensors").unlink(),
        r"arrays\.safetensors is missing; bench run --force",
    ),
    "no run": (lambda runs: drop(runs, 0, 1, 2), "there is no run to submit"),
}


@pytest.mark.parametrize(("spoil", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_handed_in_is_refused_in_one_line(runs, tmp_path, spoil, message):
    spoil(runs)
    with pytest.raises(UsageError, match=message) as caught:
        submit(runs, tmp_path / "out" / "mine")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


WORDS_REFUSED = {
    "nobody": ({"authors": []}, "authors"),
    "licence in prose": ({"licence": "as you like"}, "licence 'as you like'"),
    "address without https": ({"code": "http://example.org"}, "code 'http://example.org'"),
    "budget below 0": ({"tuning_budget": -1}, "tuning_budget '-1'"),
    "another slug": ({"slug": "other"}, "its name is the slug, and the slug given is other"),
    "deceiving": ({"authors": ["A\u202eB"]}, "characters that are never printed"),
}


@pytest.mark.parametrize(("words", "message"), WORDS_REFUSED.values(), ids=WORDS_REFUSED)
def test_words_are_checked(good, tmp_path, words, message):
    with pytest.raises(UsageError, match=message) as caught:
        submit(good, tmp_path / "mine", WORDS | words)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "mine").exists()


def test_name_that_is_no_slug_is_refused(good, tmp_path):
    with pytest.raises(UsageError, match="its name is the slug, 1 to 64 of a-z, 0-9 and -"):
        submit(good, tmp_path / "My_Method")


# ---- whole or not at all


def test_directory_that_is_there_is_kept_and_force_replaces_a_submission(runs, tmp_path):
    directory = submit(runs, tmp_path / "mine")
    (directory / "stale.txt").write_text("")
    with pytest.raises(UsageError, match="is there already: it is kept; --force replaces it"):
        submit(runs, directory)
    submit(runs, directory, force=True)
    assert not (directory / "stale.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "runs"]


def test_force_replaces_no_other_directory(good, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    with pytest.raises(UsageError, match="holds no submission: it is kept"):
        submit(good, tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("name", ["record.json", "submission.json"])
def test_disk_that_is_full_leaves_nothing_and_the_older_one(good, tmp_path, monkeypatch, name):
    before = contents(submit(good, tmp_path / "mine"))
    fsync = os.fsync

    def full(descriptor):
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        submit(good, tmp_path / "mine", WORDS | {"tuning_budget": 7}, force=True)
    assert contents(tmp_path / "mine") == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_rename_that_fails_brings_the_older_one_back(good, tmp_path, monkeypatch):
    before = contents(submit(good, tmp_path / "mine"))
    rename = os.rename

    def fails(source, target):
        if Path(source).name.endswith(".writing"):
            raise OSError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OutputError, match="Permission denied"):
        submit(good, tmp_path / "mine", WORDS | {"tuning_budget": 7}, force=True)
    assert contents(tmp_path / "mine") == before


def handed_in(folder, words):
    """A submission whose bytes are its words; only adoption looks at it."""
    names = [f"t/m/seed{seed}/{name}" for seed in range(2) for name in ("record.json", "arrays.safetensors")]
    made = {name: f"{words} {name}".encode() for name in names}
    for name, content in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    test_submission.write(folder, files={name: store.sha256(content) for name, content in made.items()})
    return folder


def adopted(root):
    """Words of the submission on a board, whole with all its arrays; None if there is none."""
    (directory,) = [*(root / "submissions").glob("my-method")] or [None]
    if directory is None:
        return None
    words = set()
    for name, digest in submission.read(directory).files.items():
        path = directory / name
        if name.endswith(".safetensors"):
            path = store.found(digest, store=root / "store")
        assert store.sha256(path.read_bytes()) == digest
        words.add(path.read_text().split()[0])
    (word,) = words
    return word


def forked(function, *given, **named):
    """Starts a call in a copy of this process; returns how that process is told."""
    child = os.fork()
    if child == 0:
        try:
            function(*given, **named)
            os._exit(0)
        finally:  # the tests go on in one process alone
            os._exit(1)
    return child


def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(number, call, function, *given, **named):
    """Has the process end without another word in the `number`-th call of that name of `os`."""
    real, calls = getattr(os, call), itertools.count(1)

    def kill(*paths, **options):
        return os._exit(9) if next(calls) == number else real(*paths, **options)

    setattr(os, call, kill)
    function(*given, **named)


@pytest.mark.parametrize("call", ["replace", "rename"])
def test_adoption_that_is_killed_at_any_write_leaves_the_old_or_the_new(tmp_path, call):
    """At each of its renames in turn the process ends, as by kill -9; the same command then goes on."""
    places = tmp_path / "submissions", tmp_path / "store"
    old, new = (handed_in(tmp_path / word / "my-method", word) for word in ("old", "new"))
    for number in itertools.count(1):
        submitting.adopt(old, *places, force=True)
        status = ended(forked(killed_at, number, call, submitting.adopt, new, *places, force=True))
        assert adopted(tmp_path) in ({"new"} if status == 0 else {"old", None})
        submitting.adopt(new, *places, force=True)
        assert adopted(tmp_path) == "new"
        assert [path.name for path in (tmp_path / "submissions").iterdir()] == ["my-method"]
        if status == 0:
            break
        assert status == 9
    assert number > 2


def test_two_adoptions_at_once_are_one_after_the_other(tmp_path):
    places = tmp_path / "submissions", tmp_path / "store"
    submissions = {word: handed_in(tmp_path / word / "my-method", word) for word in ("one", "two")}

    def again(folder):
        for _ in range(20):
            submitting.adopt(folder, *places, force=True)

    children = [forked(again, folder) for folder in submissions.values()]
    assert [ended(child) for child in children] == [0, 0]
    assert adopted(tmp_path) in submissions
    assert [path.name for path in (tmp_path / "submissions").iterdir()] == ["my-method"]


@pytest.mark.parametrize("name", ["../../owned.txt", "t/m/../owned.txt", "/tmp/owned/a/b", "t/m/seed0/x/y"])
def test_manifest_that_names_a_place_outside_writes_nothing(tmp_path, name):
    """Even where nobody verified it, or it was exchanged since."""
    folder = handed_in(tmp_path / "in/my-method", "new")
    (tmp_path / "in/owned.txt").write_text("x")
    listed = submission.read(folder).files | {name: store.sha256(b"x")}
    test_submission.write(folder, files=listed)
    with pytest.raises(UsageError, match="which is no file of a run"):
        submitting.adopt(folder, tmp_path / "submissions", tmp_path / "store")
    assert not (tmp_path / "submissions").exists()


# ---- more runs for a submission that is there


@pytest.fixture
def three(good, tmp_path):
    """A submission of the three seeds."""
    return submit(good, tmp_path / "mine", WORDS | {"tuning_budget": 7, "code": "https://example.org"})


@pytest.fixture
def more(runs):
    """A fourth seed."""
    again(runs, 1, 3)
    drop(runs, 0, 1, 2)
    return runs


def add(runs, to, words=None):
    return submitting.add(gather([runs])[0], to, words or {})


def test_seeds_join_and_all_is_as_if_it_were_submitted_at_once(good, runs, three, tmp_path):
    again(runs, 1, 3)
    once = submit(
        runs, tmp_path / "once" / "mine", WORDS | {"tuning_budget": 7, "code": "https://example.org"}
    )
    drop(runs, 0, 1, 2)
    assert add(runs, three) == ["added: map on split_digits, 1 run to 3"]
    assert contents(three) == contents(once)
    assert len(list(submission.runs_in(three))) == 4


def test_methods_join_and_words_that_are_given_replace_those_that_were(runs, three):
    before = contents(three)
    add(at_another_rate(runs), three, {"tuning_budget": 9})
    found = submission.read(three)
    assert {run.parent.name for run in submission.runs_in(three)} == {"map", "map+learning_rate=0.5"}
    assert (found.tuning_budget, found.authors, found.code) == (9, WORDS["authors"], "https://example.org")
    after = contents(three)
    del before["submission.json"]
    assert before.items() <= after.items()


ADDED_REFUSED = {
    "other settings": (
        of(3, method={"settings": {"learning_rate": 0.5}}),
        "are not of one set of the method's settings",
    ),
    "other state of the method": (
        of(3, provenance={"method_file_hash": "0" * 64}),
        "are not of one state of the method's file",
    ),
    "other version of the package": (
        of(3, provenance={"version": "0.0.9"}),
        "are not of one version of this package",
    ),
    "other version of the task": (of(3, task={"version": 99}), "are not of one version of the task"),
    "other data": (of(3, task={"data_digest": "0" * 64}), "are not of one digest of the task's data"),
    "a seed in between is missing": (
        lambda runs: change(run_of(runs, 3), seed=4),
        "has the seeds 0, 1, 2, 4: they must be 0, 1, 2 and so on",
    ),
    "one of the seeds made again": (
        lambda runs: change(run_of(runs, 3), seed=1, seconds=1.0),
        "map on split_digits is replaced as a whole: give its seeds 0, 2 too",
    ),
    "a seed twice": (
        lambda runs: shutil.copytree(run_of(runs, 3), runs / "twice"),
        "are both seed 3 of map on split_digits: hand in one",
    ),
    "too few seeds of another method": (
        lambda runs: change(run_of(runs, 3), method={"identity": "map+width=2"}, seed=0),
        r"map\+width=2 on split_digits has 1 seeds: the board takes 3 or more",
    ),
    "forged": (lambda runs: forged(run_of(runs, 3)), "the metrics of the record are not those of its arrays"),
    "dirty": (of(3, provenance={"dirty": True}), "was made from changed source"),
    "no run": (lambda runs: drop(runs, 3), "there is no run to add"),
}


@pytest.mark.parametrize(("spoil", "message"), ADDED_REFUSED.values(), ids=ADDED_REFUSED)
def test_added_run_must_be_as_those_that_stay(more, three, spoil, message):
    spoil(more)
    before = contents(three)
    with pytest.raises(UsageError, match=message) as caught:
        add(more, three)
    assert "\n" not in str(caught.value)
    assert contents(three) == before


def test_nothing_else_sees_an_added_run_of_another_state_of_the_method(more, three, monkeypatch):
    """The cheat: old seeds are kept beside new ones without a look at both together."""
    change(run_of(more, 3), provenance={"method_file_hash": "0" * 64})
    monkeypatch.setattr(submitting, "_must_belong_together", lambda found: None)
    add(more, three)
    assert len(list(submission.runs_in(three))) == 4


def test_arrays_that_the_history_has_are_not_written_again(more, three, tmp_path, monkeypatch):
    name = "split_digits/map/seed1/arrays.safetensors"
    kept, found, digest = tmp_path / "kept", store._file, submission.read(three).files[name]
    (three / name).rename(kept)
    monkeypatch.setattr(
        store, "_file", lambda run, *how: kept if run == (three / name).parent else found(run, *how)
    )
    add(more, three)
    assert submission.read(three).files[name] == digest
    assert not (three / name).exists()
    assert (three / name.replace("seed1", "seed3")).exists()


def remade(runs):
    """All seeds made again: each has the predictions that another had."""
    for seed, run in enumerate([run_of(runs, seed) for seed in range(3)]):
        change(run, seed=(seed + 1) % 3)
        run.rename(run.with_name(f"again-seed{(seed + 1) % 3}"))
    return runs


def at_another_rate(runs):
    """The runs as those of another method."""
    settings = vars(resolved("map", "split_digits", method_settings={"learning_rate": 0.5}).method_settings)
    for run in gather([runs])[0]:
        change(run.directory, method={"identity": "map+learning_rate=0.5", "settings": settings})
    return runs


def call(capsys, runs, to, *options):
    """Exit code and lines on standard error of `bench submit --add`."""
    code = cli.main(["submit", str(runs), "--to", str(to), "--add", *map(str, options)])
    return code, capsys.readouterr().err.splitlines()


@pytest.fixture
def both(good, tmp_path):
    """A submission of two methods."""
    other = at_another_rate(Path(shutil.copytree(good, tmp_path / "other")))
    return submitting.submit(gather([good, other])[0], tmp_path / "mine", WORDS)


def test_method_that_ran_again_is_replaced_and_all_else_stays(runs, both, tmp_path, capsys):
    before = contents(both)
    again(remade(runs), 1, 3)
    code, lines = call(capsys, runs, both)
    assert (code, lines[0]) == (0, "bench: replaced: map on split_digits, 3 runs by 4")
    at_once = submitting.submit(gather([runs, tmp_path / "other"])[0], tmp_path / "once" / "mine", WORDS)
    assert contents(both) == contents(at_once)
    after = {name: content for name, content in contents(both).items() if name in before}
    moved = {name for name in after if after[name] != before[name]} - {"submission.json"}
    assert moved == {
        f"split_digits/map/seed{seed}/{name}" for seed in range(3) for name in submission.RUN_FILES
    }


def test_arrays_of_a_run_that_is_replaced_by_one_without_are_gone(runs, both, capsys):
    remade(runs)
    diverged(runs, 1)
    assert call(capsys, runs, both)[1][0] == "bench: replaced: map on split_digits, 3 runs by 3"
    assert contents(both).keys() == {"submission.json", *submission.read(both).files}
    assert not (both / "split_digits/map/seed1/arrays.safetensors").exists()


def test_only_what_is_new_comes_into_the_tree_and_the_history_reads_all_of_it(
    runs, both, tmp_path, capsys, monkeypatch
):
    """A project whose arrays are in its history: of two methods one ran again, and diverged once."""
    top = tmp_path / "project"
    home = test_store.at_home(top, monkeypatch)
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
    mine = Path(shutil.move(both, home / "submissions" / "mine"))
    test_store.put(home, "records/one/m/seed0", {})
    test_store.git(top, "init", "-q")
    test_store.git(top, "config", "user.name", "a")
    test_store.git(top, "config", "user.email", "a@b")
    assert committing.commit("first", home) == 6
    remade(runs)
    diverged(runs, 1)
    code, lines = call(capsys, runs, mine)
    assert (code, lines[0]) == (0, "bench: replaced: map on split_digits, 3 runs by 3")
    new = {mine / f"split_digits/map/seed{seed}/arrays.safetensors" for seed in (0, 2)}
    assert {*mine.rglob("arrays.safetensors")} == new
    assert committing.commit("one again", home) == 2
    assert not [*mine.rglob("arrays.safetensors")]
    assert call(capsys, runs, mine)[1][0] == "bench: there already: map on split_digits, 3 runs"
    listed = submission.read(mine).files
    arrays = {name: digest for name, digest in listed.items() if name.endswith("arrays.safetensors")}
    assert len(arrays) == 5
    assert {line.path: line.digest for line in manifest.read(home).values()} == {
        f"submissions/mine/{name}": digest for name, digest in arrays.items()
    }
    for name, digest in arrays.items():
        assert store.sha256(store.needed((mine / name).parent).read_bytes()) == digest


def test_each_method_has_a_line(runs, three, tmp_path, capsys):
    shutil.copytree(at_another_rate(Path(shutil.copytree(runs, tmp_path / "other"))), runs / "other")
    change(run_of(runs, 0), seconds=1.0)
    code, lines = call(capsys, runs, three)
    assert (code, lines[:2]) == (
        0,
        [
            "bench: replaced: map on split_digits, 3 runs by 3",
            "bench: added: map+learning_rate=0.5 on split_digits, 3 runs",
        ],
    )


def test_runs_that_are_there_change_nothing(good, three, tmp_path, capsys):
    before = (three / "submission.json").stat()
    code, lines = call(capsys, good, three)
    assert (code, lines[0]) == (0, "bench: there already: map on split_digits, 3 runs")
    after = (three / "submission.json").stat()  # reading it may change when it was last read
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    (tmp_path / "meta.toml").write_text("tuning_budget = 9\n")
    code, lines = call(capsys, good, three, "--meta", tmp_path / "meta.toml")
    assert (code, lines[0]) == (0, "bench: there already: map on split_digits, 3 runs")
    assert submission.read(three).tuning_budget == 9


def test_seeds_join_beside_runs_that_are_there_and_are_given_too(runs, three, capsys):
    again(runs, 1, 3)
    assert call(capsys, runs, three)[1][0] == "bench: added: map on split_digits, 1 run to 3"
    assert len(list(submission.runs_in(three))) == 4


@pytest.mark.parametrize(("left_out", "named"), [((2,), "2"), ((0, 1), "0, 1")])
def test_fewer_seeds_than_there_are_replace_nothing(runs, three, capsys, left_out, named):
    drop(remade(runs), *left_out)
    before = contents(three)
    assert call(capsys, runs, three) == (
        2,
        [f"bench: map on split_digits is replaced as a whole: give its seeds {named} too"],
    )
    assert contents(three) == before


def test_nothing_else_sees_that_seeds_of_two_times_stand_together(runs, three, monkeypatch):
    """The cheat: the best seeds are kept, the others are run again from other source."""
    drop(remade(runs), 0, 1)
    change(run_of(runs, 2), provenance={"source_hash": "0" * 64})
    monkeypatch.setattr(submitting, "_changes", lambda before, given, coming: [])
    add(runs, three)
    found = [records.read_record(run).provenance.source_hash for run in submission.runs_in(three)]
    assert len(set(found)) == 2


def test_arrays_of_runs_that_go_need_not_be_at_hand(runs, both, capsys):
    """Those of runs that stay need to be."""
    gone, stays = (both / f"split_digits/{name}/seed1" for name in ("map", "map+learning_rate=0.5"))
    (gone / "arrays.safetensors").unlink()
    assert call(capsys, remade(runs), both)[0] == 0
    assert (gone / "arrays.safetensors").exists()
    (stays / "arrays.safetensors").unlink()
    change(run_of(runs, 0), seconds=1.0)
    code, lines = call(capsys, runs, both)
    assert (code, len(lines)) == (2, 1)
    assert "cannot read" in lines[0]


def test_runs_that_stay_are_those_that_were_submitted(more, three):
    path = three / "split_digits/map/seed1/record.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UsageError, match=r"is not the file that submission\.json names"):
        add(more, three)
    path.unlink()
    with pytest.raises(UsageError, match=r"cannot read .*record\.json"):
        add(more, three)


def test_what_is_no_submission_gets_no_run(more, tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*submission\.json: No such file"):
        add(more, tmp_path / "nowhere")


def test_full_disk_leaves_the_submission_without_the_added_runs(more, three, monkeypatch):
    before = contents(three)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        add(more, three)
    assert contents(three) == before


# ---- the command


def test_command_adds_without_asking_what_the_submission_says(more, three, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal(""))
    given = ["submit", str(more), "--to", str(three)]
    assert cli.main([*given, "--add"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{three}\n"
    assert err.splitlines()[0] == "bench: added: map on split_digits, 1 run to 3"
    assert len(list(submission.runs_in(three))) == 4
    assert cli.main([*given, "--add", "--force"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_command_writes_and_says_what_comes_next(good, tmp_path, capsys):
    (tmp_path / "meta.toml").write_text(META)
    given = ["submit", str(good), str(run_of(good, 0)), "--to", str(tmp_path / "mine")]
    assert cli.main([*given, "--meta", str(tmp_path / "meta.toml")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'mine'}\n"
    assert err.splitlines()[-1] == f"bench: next, bench verify {tmp_path / 'mine'}"
    assert "is given twice: it counts once" in err


def test_without_a_terminal_one_line_names_what_is_missing(good, tmp_path, capsys):
    (tmp_path / "meta.toml").write_text('authors = ["A"]\n')
    given = ["submit", str(good), "--to", str(tmp_path / "mine"), "--meta", str(tmp_path / "meta.toml")]
    assert cli.main(given) == 2
    assert capsys.readouterr().err == (
        "bench: what is missing: licence, tuning_budget, trained_on; write it into the file of --meta\n"
    )


class Terminal(io.StringIO):
    """Lines that are typed."""

    def isatty(self):
        """As a terminal says."""
        return True


def test_at_a_terminal_what_is_missing_is_asked(good, tmp_path, monkeypatch, capsys):
    (tmp_path / "meta.toml").write_text('licence = "MIT"\n')
    monkeypatch.setattr("sys.stdin", Terminal("A. Author, B. Author\nten\n10\nnone\n\nhttps://example.org\n"))
    given = ["submit", str(good), "--to", str(tmp_path / "mine"), "--meta", str(tmp_path / "meta.toml")]
    assert cli.main(given) == 0
    made = submission.read(tmp_path / "mine")
    assert (made.authors, made.licence) == (["A. Author", "B. Author"], "MIT")
    assert (made.tuning_budget, made.trained_on) == (10, [])
    assert (made.paper, made.code) == (None, "https://example.org")
    assert "tuning_budget 'ten': must be a whole number, 0 or more" in capsys.readouterr().err


def test_terminal_that_ends_is_told(good, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal("A. Author\n"))
    assert cli.main(["submit", str(good), "--to", str(tmp_path / "mine")]) == 2
    assert "what is missing: licence" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("author = ['A']\n", "no such key as author; did you mean authors"),
        ("authors = \n", "is no TOML"),
    ],
)
def test_file_of_words_of_another_form_is_refused(text, message, tmp_path):
    (tmp_path / "meta.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        submitting.read_words(tmp_path / "meta.toml")


# ---- into the project


def test_adopted_submission_has_its_arrays_in_the_store(good, tmp_path):
    handed_in = submit(good, tmp_path / "mine")
    new = submitting.adopt(handed_in, tmp_path / "submissions", tmp_path / "store")
    assert new == tmp_path / "submissions" / "mine"
    manifest = submission.read(new)
    assert contents(new).keys() == {
        "submission.json",
        *(name for name in manifest.files if name.endswith("record.json")),
    }
    for run in submission.runs_in(new):
        arrays = store.run_arrays(run, tmp_path / "store")
        assert arrays.read_bytes() == (handed_in / run.relative_to(new) / "arrays.safetensors").read_bytes()
        assert store.run_arrays(run, tmp_path / "elsewhere") is None
    with pytest.raises(UsageError, match="is there already: it is kept"):
        submitting.adopt(handed_in, tmp_path / "submissions", tmp_path / "store")
    before = contents(new)
    submitting.adopt(new, tmp_path / "submissions", tmp_path / "store", force=True)  # as it lies there
    assert contents(new) == before


@pytest.mark.parametrize("name", ["record.json", "arrays.safetensors"])
def test_file_of_another_hash_is_not_adopted(good, tmp_path, name):
    handed_in = submit(good, tmp_path / "mine")
    path = handed_in / "split_digits/map/seed1" / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UsageError, match=r"is not the file that submission\.json names"):
        submitting.adopt(handed_in, tmp_path / "submissions", tmp_path / "store")
    assert not (tmp_path / "submissions").exists()
