"""The board's data: what stands where and why, from submissions that are known."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import boards
import numpy as np
import pytest
import safetensors.numpy
from boards import Maker, example, identity, task_names

from bench import cli
from bench.data import array_digest
from bench.errors import DataError, UsageError
from bench.leaderboard.rank import board as boarding
from bench.leaderboard.rank import pairing
from bench.leaderboard.rank.ranking import Entry, Replicate, across, rank
from bench.leaderboard.site import pages


@pytest.fixture
def build(tmp_path):
    """Builds the board of the submissions in a new folder."""

    def built(**options):
        given = {"cache": tmp_path / "cache", "imports": task_names(2)}
        return boarding.build(tmp_path / "submissions", **given | options)

    return built


@pytest.fixture
def maker(tmp_path):
    """Makes submissions in that folder."""
    return Maker(tmp_path / "submissions")


def three(maker, slug="reference", methods=(0, 1, 2), task=0, seeds=3):
    """Three methods of known order, the last the best."""
    for number in methods:
        for seed in range(seeds):
            maker.run(slug, task, f"method{number:03}", seed, 0.5 + 0.8 * number, method_number=number)
    return maker.seal(slug)


def rows(board, task=0):
    """Rows of a task by name."""
    return {row["name"]: row for row in board.tables[identity(task)]["entries"]}


def ranked(board, task=0):
    """Names of the ranked entries in the order of the table."""
    return [name for name, row in rows(board, task).items() if row["ranks"]]


def entries(maker, task, methods, seeds=3):
    """What the ranking is given, straight from the predictions."""
    protocol = maker.task(task)
    made = []
    for number in methods:
        runs = []
        for seed in range(seeds):
            arrays = {
                "log_probs": protocol.predictions(0.5 + 0.8 * number, number, seed),
                **protocol.targets(),
            }
            losses = protocol.losses(arrays)
            runs.append(Replicate(float(losses.mean()), losses))
        made.append(Entry(f"method{number:03}", runs))
    return made


# ------------------------------------------------------------------------------------------ what is ranked


def test_order_intervals_ranks_and_groups_are_the_rankings(maker, build):
    three(maker)
    standing = rank(entries(maker, 0, (0, 1, 2)), higher_is_better=False)
    board = build()
    assert ranked(board) == [place.name for place in standing.places]
    for place in standing.places:
        row = rows(board)[place.name]
        assert (row["mean"], row["low"], row["high"]) == pytest.approx(place.cell[:3], rel=1e-12)
        assert (tuple(row["ranks"]), row["group"]) == (place.ranks, place.group)
        assert (row["tier"], row["status"], row["seeds"]) == ("recomputed", "ranked", 3)
    assert "40 test examples on which entries are paired" in board.tables[identity(0)]["basis"]


def test_overall_is_across_and_incomplete_rows_have_no_rank(tmp_path, build):
    maker = Maker(tmp_path / "submissions", examples=800)  # enough for anchors that give a scale
    three(maker)
    three(maker, task=1, methods=(0, 1))
    maker.seal("reference")
    names = {identity(0): (0, 1, 2), identity(1): (0, 1)}
    standings = {task: rank(entries(maker, t, names[task]), False) for t, task in enumerate(names)}
    whole = across(standings, dict.fromkeys(names, (boards.BASELINE, boards.REFERENCE)))
    overall = build().overall
    assert overall["tasks"] == list(whole.scores) != []
    assert [row["name"] for row in overall["rows"]] == [place.name for place in whole.standing.places]
    assert [row["ranks"] and tuple(row["ranks"]) for row in overall["rows"]] == [
        place.ranks for place in whole.standing.places
    ]
    (incomplete,) = [row for row in overall["rows"] if row["name"] == "method002"]
    assert (incomplete["ranks"], incomplete["why"]) == (None, "1 of 2 tasks")


def test_an_entry_of_others_is_named_with_its_slug(maker, build):
    three(maker)
    three(maker, "theirs")
    board = build()
    assert {"method000", "method000 (theirs)"} <= rows(board).keys()
    # The same predictions: what differs is nothing, and whoever came later is held.
    one, other = rows(board)["method001"], rows(board)["method001 (theirs)"]
    assert one["mean"] == other["mean"]
    assert (one["status"], other["status"]) == ("ranked", "held")


def test_compare_pages_count_who_is_better_on_each_example(maker, build):
    three(maker)
    board = build()
    task = maker.task(0)
    losses = {
        entry.name: np.mean([run.losses for run in entry.runs], 0) for entry in entries(maker, 0, (0, 1, 2))
    }
    pairs = {(pair["first"], pair["second"]): pair for pair in board.pairs[identity(0)]}
    assert list(pairs) == [("method002", "method001"), ("method001", "method000")]
    for (first, second), pair in pairs.items():
        away = losses[first] - losses[second]
        assert pair["centre"] == pytest.approx(away.mean())
        assert (pair["better"], pair["worse"]) == ((away < 0).sum(), (away > 0).sum())
        assert sum(pair["counts"]) == pair["examples"] == 40
        labels = task.targets()["labels"]
        for label, count, mean in pair["classes"]:
            assert (count, mean) == ((labels == label).sum(), pytest.approx(away[labels == label].mean()))


# -------------------------------------------------------------------------------------- what is not, and why


def test_splits_are_not_called_examples():
    values = np.random.default_rng(0).normal(size=(2, 20))
    splits = [Entry(name, [Replicate(float(x)) for x in row]) for name, row in zip("ab", values, strict=True)]
    examples = [
        Entry(name, [Replicate(float(row.mean()), row, f"{name}{seed}") for seed in range(3)])
        for name, row in zip("ab", values, strict=True)
    ]
    for entries, ratio, unit in ((splits, 1 / 9, "split"), (examples, None, "test example")):
        (pair,) = pairing.pairs(rank(entries, True, ratio), [], True, None)
        assert (pair["unit"], pair["examples"]) == (unit, 20)


def test_a_diverged_seed_is_shown_and_never_ranked(maker, build):
    three(maker)
    maker.run("reference", 0, "method002", 1, record={"status": "diverged", "reason": "a loss was NaN"})
    (maker.folder / "reference" / identity(0) / "method002" / "seed1" / "arrays.safetensors").unlink()
    maker.seal("reference")
    board = build()
    row = rows(board)["method002"]
    assert ranked(board) == ["method001", "method000"]
    assert (row["ranks"], row["low"], row["why"]) == (None, None, "1 of 3 runs gave no value")
    assert row["mean"] is not None
    assert [run["status"] for run in row["runs"]] == ["completed", "diverged", "completed"]
    assert row["runs"][1]["reason"] == "a loss was NaN"
    assert board.not_again == []


def test_few_seeds_and_gaps_between_them_are_not_ranked(maker, build):
    three(maker)
    for seed in (0, 1):
        maker.run("reference", 0, "few", seed)
    for seed in (0, 1, 3):
        maker.run("reference", 0, "gap", seed)
    maker.seal("reference")
    found = rows(build())
    assert found["few"]["why"] == "seeds: 2; the task asks for 3"
    assert found["gap"]["why"] == "its seeds are not 0, 1, 2, ..."
    assert {found[name]["status"] for name in ("few", "gap")} == {"not ranked"}


def test_withdrawn_and_superseded_are_struck_out_and_stay(maker, build, tmp_path):
    three(maker)
    three(maker, "theirs", methods=(3,))
    three(maker, "older", methods=(4,))
    before = ranked(build())
    (tmp_path / "status.toml").write_text(
        '[theirs]\nwithdrawn = "a bug"\n[older]\nsuperseded_by = "reference"\n[reference]\ntier = "re-run"\n'
    )
    found = rows(board := build())
    assert len(before) == 5
    assert ranked(board) == ["method002", "method001", "method000"]
    assert found["method003 (theirs)"]["status"] == "withdrawn"
    assert found["method003 (theirs)"]["why"] == "withdrawn: a bug"
    assert found["method004 (older)"]["why"] == "superseded: by reference"
    assert found["method001"]["tier"] == "re-run"
    assert found["method003 (theirs)"]["mean"] is not None


def copied(maker, slug, seeds=(1, 2, 0)):
    """The runs of `method001` of task 0 as another method's, in this order of their seeds."""
    for seed, source in enumerate(seeds):
        run = maker.run(slug, 0, "copy", seed, 1.3, method_number=1)
        twin = maker.folder / "reference" / identity(0) / "method001" / f"seed{source}"
        arrays = safetensors.numpy.load((twin / "arrays.safetensors").read_bytes())
        record = json.loads((run / "record.json").read_text())
        record["metrics"] = maker.task(0).score(arrays)
        record["provenance"]["arrays_digest"] = array_digest(arrays)
        (run / "arrays.safetensors").write_bytes(safetensors.numpy.save(arrays))
        (run / "record.json").write_text(json.dumps(record))
    return maker.seal(slug)


def test_a_flagged_entry_is_held_until_a_maintainer_clears_the_flag(maker, build, tmp_path):
    three(maker)
    copied(maker, "thief")
    held = rows(build())["copy (thief)"]
    assert (held["status"], held["ranks"]) == ("held", None)
    assert held["why"].startswith("held for a maintainer's word: copy: seed 0 is seed 1 of method001")
    assert held["flags"] == [["copy", held["why"].partition("word: copy: ")[2], ""]]
    status = tmp_path / "status.toml"
    entry = f"{identity(0)}/copy"
    status.write_text(f'[thief.cleared."{entry}"]\nseeds = "another flag"\n')
    assert rows(build())["copy (thief)"]["status"] == "held"
    status.write_text(f'[thief.cleared."{entry}"]\ncopy = "its author is ours"\n')
    cleared = rows(build())["copy (thief)"]
    assert (cleared["status"], cleared["flags"][0][2]) == ("ranked", "its author is ours")
    for words in (f'"{entry}"]\nbeauty = "x"', '"elsewhere/copy"]\ncopy = "x"'):
        status.write_text(f"[thief.cleared.{words}\n")
        with pytest.raises(UsageError, match=r"status\.toml: (there is no screen|thief has no entry)"):
            build()


def test_a_copy_that_comes_later_holds_nobody_back(maker, build, tmp_path):
    """What came to the board first, `owners.toml` says by its order, and no date that a record claims."""
    three(maker)
    copied(maker, "second")
    copied(maker, "first", (2, 0, 1))
    (tmp_path / "status.toml").write_text(
        f'[first.cleared."{identity(0)}/copy"]\ncopy = "it is the original"\n'
    )
    (tmp_path / "owners.toml").write_text('first = "ada"\nsecond = "bob"\n')
    found = rows(build())
    assert (found["copy (first)"]["status"], found["copy (second)"]["status"]) == ("ranked", "held")
    (tmp_path / "owners.toml").write_text("[")
    with pytest.raises(UsageError, match=r"owners\.toml"):
        build()


def test_first_tie_group_is_provisional_until_its_entries_are_re_run(maker, build, tmp_path):
    three(maker)
    three(maker, "theirs", methods=(3,))
    found = rows(build())
    first = {name for name, row in found.items() if row["group"] == 1}
    assert first
    assert {name for name, row in found.items() if row["provisional"]} == first
    (tmp_path / "status.toml").write_text('[reference]\ntier = "re-run"\ndrawn = "seed 1"\n')
    found = rows(build())
    assert {name for name, row in found.items() if row["provisional"]} == {
        name for name in first if found[name]["slug"] != "reference"
    }


@pytest.mark.parametrize(
    "words", ["[nobody]\nwithdrawn = 'x'", "[reference]\ntier = 'best'", "[reference]\nother = 1", "["]
)
def test_maintainers_words_that_are_wrong_are_one_line(maker, build, tmp_path, words):
    three(maker)
    (tmp_path / "status.toml").write_text(words)
    with pytest.raises(UsageError, match=r"status\.toml") as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["arrays.safetensors", "record.json"])
def test_a_changed_file_is_told(maker, build, name):
    submission = three(maker)
    path = submission / identity(0) / "method002" / "seed1" / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    board = build()
    assert rows(board)["method002"]["why"] == f"{name} of seed 1 is not the submitted file"
    assert ranked(board) == ["method001", "method000"]
    assert board.not_again


def test_a_claim_that_the_arrays_do_not_give_is_told(maker, build):
    submission = three(maker)
    path = submission / identity(0) / "method002" / "seed1" / "record.json"
    record = json.loads(path.read_text())
    record["metrics"]["accuracy"] += 0.01
    path.write_text(json.dumps(record))
    maker.seal("reference")
    row = rows(build())["method002"]
    assert row["why"].startswith("its arrays give accuracy ")
    assert row["tier"] == "self-reported"


def test_arrays_that_no_score_takes_are_told(maker, build):
    submission = three(maker)
    for name, content in (("method001", b"nonsense"), ("method002", b"\0" * 64)):
        (submission / identity(0) / name / "seed0" / "arrays.safetensors").write_bytes(content)
    maker.seal("reference")
    found = rows(build())
    for name in ("method001", "method002"):
        assert found[name]["why"].startswith("could not be computed again: seed 0: ")
        assert "\n" not in found[name]["why"]


def test_other_numbers_of_examples_are_not_compared(maker, build, tmp_path):
    three(maker)
    few = Maker(tmp_path / "submissions", examples=30)
    digest = maker.task(0).data_digest()
    for seed in range(3):
        path = few.run("theirs", 0, "short", seed) / "record.json"
        record = json.loads(path.read_text())
        record["task"]["data_digest"] = digest
        path.write_text(json.dumps(record))
    few.seal("theirs")
    board = build()
    assert rows(board)["short (theirs)"]["why"] == "seed 0: labels is not the task's own"
    assert len(ranked(board)) == 3


def test_invented_targets_leave_and_ours_stay(maker, build, monkeypatch, tmp_path):
    """Four strangers to one of ours, their labels what they predict, of another number, as one has its data.

    With the task's data at hand they have the wrong targets. Without, nobody knows: ours rank alone then, and
    where none is ours the table says what it is worth.
    """
    three(maker, methods=(0, 1))
    task = maker.task(0)
    honest = boards.Simulated.targets
    monkeypatch.setattr(boards.Simulated, "targets", lambda self: {"labels": honest(self)["labels"][:25]})
    invented = task.data_digest()
    for slug in ("cheat-a", "cheat-b", "cheat-c", "cheat-d"):
        three(maker, slug, methods=(5,))
    monkeypatch.setattr(boards.Simulated, "targets", honest)
    assert task.data_digest() != invented
    for path in (tmp_path / "submissions").glob("cheat-b/*/*/*/record.json"):
        path.write_text(path.read_text().replace(invented, task.data_digest()))
    maker.seal("cheat-b")
    table = rows(build())
    assert ranked(build()) == ["method001", "method000"]
    whys = {row["why"] for name, row in table.items() if "cheat" in name}
    assert whys == {"seed 0: labels is not the task's own"}

    def lost(self):
        raise DataError("they are nowhere")

    monkeypatch.setattr(boards.Simulated, "targets", lost)
    board = build(cache=tmp_path / "other")
    assert ranked(board) == ["method001", "method000"]
    found = rows(board)
    assert {found["method000"]["tier"], found["method005 (cheat-a)"]["tier"]} == {
        "recomputed",
        "targets unseen",
    }
    assert found["method005 (cheat-a)"]["why"] == "its data are others than those of the table"
    assert found["method005 (cheat-b)"]["why"].startswith("nobody here can tell")


def test_other_data_and_other_versions_are_not_compared(maker, build):
    three(maker)
    part = json.loads((maker.run("theirs", 0, "method009", 0) / "record.json").read_text())["task"]
    for seed in range(3):
        maker.run("theirs", 0, "other-data", seed, record={"task": part | {"data_digest": "9" * 64}})
        maker.run("theirs", 0, "older", seed, record={"task": part | {"version": 0}})
    maker.seal("theirs")
    found = rows(build())
    assert found["other-data (theirs)"]["why"] == "its data are others than those of the table"
    assert found["older (theirs)"]["why"] == "of version 0 of the task, which is now 1"


# ----------------------------------------------------------------------------------- what stops no board


def test_a_broken_submission_is_a_line_and_the_others_stay(maker, build):
    three(maker)
    for slug, content in (("broken", "{"), ("other", json.dumps({"slug": "third"})), ("Big", "{}")):
        (maker.folder / slug).mkdir()
        (maker.folder / slug / "submission.json").write_text(content)
    (maker.folder / "empty").mkdir()
    board = build()
    assert len(ranked(board)) == 3
    for problem, slug in zip(board.problems, ("Big:", "broken/", "empty/", "other/"), strict=True):
        assert slug in problem
    assert not [problem for problem in board.problems if str(maker.folder) in problem or "\n" in problem]


def test_hidden_characters_in_a_manifest_are_refused(maker, build):
    three(maker)
    three(maker, "theirs")
    maker.seal("theirs", authors=["Ada \N{RIGHT-TO-LEFT OVERRIDE}adA"])
    (problem,) = build().problems
    assert problem == "theirs/submission.json holds characters that are never shown"


def test_names_are_composed(maker, build):
    three(maker)
    maker.seal("reference", authors=["Zoe\N{COMBINING DIAERESIS}"])
    assert build().submissions["reference"]["authors"] == ["Zo\N{LATIN SMALL LETTER E WITH DIAERESIS}"]


def test_an_unknown_task_is_shown_as_such(maker, build):
    three(maker)
    (maker.folder / "reference" / identity(0)).rename(maker.folder / "reference" / "no_such_task")
    for path in maker.folder.rglob("record.json"):
        record = json.loads(path.read_text())
        record["task"] |= {"name": "no_such_task", "identity": "no_such_task"}
        path.write_text(json.dumps(record))
    maker.seal("reference")
    table = build().tables["no_such_task"]
    assert "unknown task 'no_such_task'" in table["problem"]
    assert {row["why"] for row in table["entries"]} == {"its task is not known here"}


def test_no_folder_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="is no folder of submissions"):
        boarding.build(tmp_path / "nothing")


# -------------------------------------------------------------------------------------- where arrays are


def emptied(submission, store=None):
    """Takes the arrays away from a submission, into a store if one is given."""
    for path in submission.rglob("arrays.safetensors"):
        if store is not None:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            (store / digest[:2]).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, store / digest[:2] / f"{digest}.safetensors")
        path.unlink()


def test_arrays_in_the_store_are_as_good_as_those_beside(maker, build, tmp_path):
    submission = three(maker)
    before = build()
    emptied(submission, tmp_path / "store")
    after = build(cache=tmp_path / "other cache")
    assert after.tables == before.tables
    assert after.not_again == []


def test_without_arrays_claims_are_ranked_on_seeds_alone_and_told(maker, build):
    submission = three(maker, seeds=5)
    before = build()
    emptied(submission)
    board = build()
    table = board.tables[identity(0)]
    assert table["basis"].startswith("seeds alone: the metrics that records claim")
    assert ranked(board) == ranked(before)
    values = [
        Entry(e.name, [Replicate(run.value) for run in e.runs]) for e in entries(maker, 0, (0, 1, 2), 5)
    ]
    assert [tuple(row["ranks"]) for row in table["entries"]] == [p.ranks for p in rank(values, False).places]
    assert {row["tier"] for row in table["entries"]} == {"self-reported"}
    assert len(board.not_again) == 3


def test_a_strangers_entry_is_not_ranked_alone_where_ours_have_no_arrays(maker, build, capsys, tmp_path):
    """As in a clone without its history: all stand by their claims, and page and terminal say so on top."""
    emptied(three(maker))
    three(maker, "theirs", methods=(5,))
    board = build()
    assert ranked(board) == ["method005 (theirs)", "method002", "method001", "method000"]
    table = board.tables[identity(0)]
    assert table["basis"].startswith("seeds alone")
    assert table["without_arrays"] == 3
    assert board.without_arrays.startswith("the predictions of 3 of 4 entries are not here")
    site = tmp_path / "site"
    pages.write(board, site)
    for page in ("index.html", f"tasks/{identity(0)}.html"):
        text = " ".join((site / page).read_text().split())
        assert text.index("of 4 entries are not here") < text.index("<table"), page
    arguments = ["--submissions", str(tmp_path / "submissions"), "--import", boards.task_name(0)]
    assert cli.main(["board", "build", *arguments, "--out", str(site), "--cache", str(tmp_path / "c")]) == 1
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("bench: the predictions of 3 of 4 entries are not here")


def test_one_entry_without_arrays_costs_the_others_nothing(maker, build):
    three(maker)
    emptied(three(maker, "theirs", methods=(2,)))
    board = build()
    row = rows(board)["method002 (theirs)"]
    assert (row["why"], row["tier"]) == (
        "could not be computed again: its arrays are not here",
        "self-reported",
    )
    assert ranked(board) == ["method002", "method001", "method000"]
    assert board.not_again == [f"method002 (theirs) on {identity(0)}: {row['why']}"]


# ---------------------------------------------------------------------------------------------- the cache


def test_a_second_build_computes_nothing_and_finds_the_same(maker, build, monkeypatch):
    three(maker)
    first = build()
    monkeypatch.setattr(boarding, "compute", None)
    monkeypatch.setattr(boarding, "across", None)
    second = build()
    assert second.tables == first.tables
    assert (second.pairs, second.figures, second.overall) == (first.pairs, first.figures, first.overall)
    assert second.standings[identity(0)].places == first.standings[identity(0)].places


def test_a_changed_file_or_word_is_computed_anew(maker, build, tmp_path):
    three(maker)
    before = build()
    maker.run("reference", 0, "method002", 0, skill=0.1, method_number=2)
    maker.seal("reference")
    changed = build()
    assert rows(changed)["method002"]["mean"] > rows(before)["method002"]["mean"]
    (tmp_path / "status.toml").write_text('[reference]\nwithdrawn = "all of it"\n')
    assert ranked(build()) == []


def test_a_damaged_cache_costs_time_alone(maker, build, tmp_path):
    three(maker)
    before = build()
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(kept) >= 2
    for path in kept:
        path.write_bytes(path.read_bytes()[:-20].replace(b"method002", b"method001"))
    assert build().tables == before.tables


STOPPED = """
import sys, time
from bench import cli
from bench.leaderboard.rank import board

compute, last = board.compute, int(sys.argv[1])

def counted(task, cells):
    print(task, flush=True)
    if last == 0:
        time.sleep(600)
    globals().update(last=last - 1)
    return compute(task, cells)

board.compute = counted
sys.exit(cli.main(sys.argv[2:]))
"""


def test_a_build_that_is_stopped_goes_on_behind_what_it_has(maker, build, tmp_path):
    """Stopped in the second of three tasks, killed in the third; what was computed is not computed again."""
    for task in range(3):
        three(maker, slug=f"of-{task}", task=task)
    (tmp_path / "code.py").write_text(STOPPED)
    places = ["--submissions", tmp_path / "submissions", "--cache", tmp_path / "stopped"]
    places += ["--out", tmp_path / "site", *(f"--import={name}" for name in task_names(3))]

    def begun(whole_tasks):
        return subprocess.Popen(
            [sys.executable, tmp_path / "code.py", str(whole_tasks), "board", "build", *places],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            text=True,
        )

    first, second, third = names = [identity(task) for task in range(3)]
    for expected, number, code in (
        ([first, second], signal.SIGTERM, 128 + signal.SIGTERM),
        ([second, third], signal.SIGKILL, -signal.SIGKILL),
    ):
        with begun(whole_tasks=1) as process:
            assert [process.stdout.readline().strip() for _ in expected] == expected
            process.send_signal(number)
            assert process.wait(300) == code
        assert not (tmp_path / "site").exists()
    with begun(whole_tasks=-1) as process:
        assert process.communicate(timeout=600)[0].split() == [third, f"{tmp_path}/site/index.html"]
    pages.write(build(imports=task_names(3)), tmp_path / "whole")
    at_once, bit_by_bit = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
        for folder in (tmp_path / "whole", tmp_path / "site")
    )
    assert {f"tasks/{name}.html" for name in names} <= {str(path) for path in at_once}
    assert at_once == bit_by_bit


@pytest.mark.slow
def test_processes_find_the_same(maker, build, tmp_path):
    three(maker)
    three(maker, task=1)
    alone, together = build(workers=1), build(workers=2, cache=tmp_path / "other")
    assert (alone.tables, alone.pairs, alone.overall) == (together.tables, together.pairs, together.overall)


# -------------------------------------------------------------------------------------------- the example


def test_the_example_holds_something_of_everything():
    """The tests of the pages stand on it."""
    board = example().board
    found = rows(board)
    assert {row["status"] for row in found.values()} == {"ranked", "not ranked", "withdrawn", "superseded"}
    assert {row["tier"] for row in found.values()} == {"recomputed", "self-reported", "re-run"}
    assert len(board.problems) == 1
    assert board.overall["rows"][0]["ranks"]
