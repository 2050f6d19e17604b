"""`bench compare` beside other entries: the statistics are the ranking's, of the right runs; words fit them.

Runs are made up: 40 test images, of which every method gets some right, in the layout that runs really have.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bench import cli
from bench.commands import formats
from bench.data import array_digest
from bench.errors import UsageError
from bench.intervals import Interval
from bench.leaderboard.evidence.entries import directory_of
from bench.leaderboard.rank import against
from bench.leaderboard.rank.against import Result, Rival, read_board, stand
from bench.leaderboard.rank.ranking import Entry, Replicate, rank
from bench.runs import records, resolution
from bench.runs.searches import NONE_TUNED
from bench.spec import Metric, Spec

EXAMPLE = json.loads((directory_of("split_mnist", "mfvi") / "record.json").read_text())
LABELS = np.repeat(np.arange(10), 4).astype(np.uint8)
"""Balanced, so that every image weighs the same in the accuracy over pairs."""
NOTHING = {"metrics": {"average_accuracy": None}, "undefined": {"average_accuracy": "the run diverged"}}
SKILL = {"good": 0.9, "fair": 0.6, "poor": 0.2}


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Calls `bench compare ARGUMENTS` in a folder without committed entries; returns code, out and err."""
    monkeypatch.chdir(tmp_path)
    for console in (cli.errors, cli.output):
        monkeypatch.setattr(console, "_width", 140)
    for place in ("SUBMISSIONS", "RECORDS", "STATUS"):
        monkeypatch.setattr(against, place, tmp_path / place.lower())

    def call(*arguments):
        capsys.readouterr()
        return cli.main(["compare", *map(str, arguments)]), *capsys.readouterr()

    return call


def right(method, seed, skill):
    """Which of the images a method gets right under a seed: some are harder than others, for all methods."""
    hardness = np.random.default_rng(0).random(len(LABELS))
    noise = np.random.default_rng([seed, *method.encode()]).normal(0, 0.15, len(LABELS))
    return hardness + noise < skill


def made(folder, method, seed, is_right, arrays=True, **changes):
    """Writes a run; changes name fields of its record by a path such as `task__version`."""
    record = json.loads(json.dumps(EXAMPLE))
    record["method"] |= {"name": "map", "identity": method}
    record |= {"seed": seed, "metrics": dict.fromkeys(EXAMPLE["metrics"], 0.125)}
    record["metrics"]["average_accuracy"] = float(np.mean(is_right))
    probabilities = np.full((len(LABELS), 10), 0.01)
    guess = np.where(is_right, LABELS, (LABELS + 1) % 10)
    probabilities[np.arange(len(LABELS)), guess] = 0.91
    kept = {"log_probs": np.log(probabilities).astype(np.float16), "labels": LABELS}
    record["provenance"]["arrays_digest"] = array_digest(kept)
    for name, change in changes.items():
        part, _, field = name.rpartition("__")
        (record[part] if part else record)[field] = change
    directory = Path(folder, record["task"]["identity"], method, f"seed{seed}")
    directory.mkdir(parents=True)
    (directory / "record.json").write_text(json.dumps(record))
    if arrays:
        records.write_arrays(directory, kept)
    return directory


def several(folder, methods, seeds=3, **options):
    """Writes runs of some methods; returns of each what it gets right, `[S, N]`."""
    found = {m: np.array([right(m, s, SKILL[m.split("+")[0]]) for s in range(seeds)]) for m in methods}
    for method, rows in found.items():
        for seed, row in enumerate(rows):
            made(folder, method, seed, row, **options)
    return found


def entries(found, paired=True):
    """What the ranking is to be asked, from what methods get right."""
    return [
        Entry(name, [Replicate(float(row.mean()), row.astype(float) if paired else None) for row in rows])
        for name, rows in found.items()
    ]


def rows_of(out):
    return {row["entry"]: row for row in json.loads(out)}


def limits(row, column):
    return row[column], row[f"{column}_low"], row[f"{column}_high"]


def expected(interval):
    return pytest.approx(tuple(interval)[:3], abs=1e-12)


# ---- known answers


def test_ranks_and_differences_are_those_of_the_ranking(call):
    mine, theirs = several("runs", ["fair"], 4), several("others", ["good", "poor", "fair+own=1"])
    standing = rank(entries({"your fair": mine["fair"]} | theirs), True)
    code, out, err = call("runs", "--against", "others", "--format", "json")
    assert (code, err) == (0, "")
    rows = rows_of(out)
    assert list(rows) == [place.name for place in standing.places]
    for place in standing.places:
        row = rows[place.name]
        assert limits(row, "mean") == expected(place.cell)
        assert (row["best_rank"], row["worst_rank"], row["group"]) == (*place.ranks, place.group)
        if row["entry"] != "your fair":
            difference = standing.difference("your fair", place.name)
            assert limits(row, "yours minus it") == expected(difference)
    assert rows["your fair"]["seeds"] == 4
    assert rows["poor"]["yours minus it_low"] > 0 > rows["good"]["yours minus it_high"]


def test_the_sentence_says_by_how_much_which_is_better_and_the_rank(call):
    mine, theirs = several("runs", ["fair"]), several("others", ["good", "poor"])
    # Simulated worlds depend on the order of the names in the last digits.
    difference = rank(entries({"your fair": mine["fair"]} | theirs), True).difference("your fair", "good")
    code, out, err = call("runs", "--against", "others")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "split_mnist, standard: average_accuracy (fraction, higher is better)"
    assert (
        f"your fair against good, the best other, on split_mnist: {formats.interval(difference)} fraction of "
        "average_accuracy, higher is better: worse; rank 2 of 3" in lines
    )
    assert any("fresh seeds and fresh test examples" in line for line in lines)
    out = call("others/split_mnist/good", "--against", "runs")[1]
    assert f"your good against fair, the best other, on split_mnist: +{formats.interval(difference)[1:]}"[
        :60
    ] in (out)
    assert "higher is better: better; rank 1 of 2" in out


def test_entries_that_are_not_tuned_stand_below_a_line_and_marks_have_a_star(call, tmp_path, monkeypatch):
    """In the table alone: programs get the order of the one ranking, with what is tuned and marked."""
    monkeypatch.setattr(resolution, "TUNED", tmp_path / "tuned")
    still = [EXAMPLE["fits"][0] | {"diagnostics": {"weight_ess": 1.5, "draws": 50.0}}]
    several("runs", ["fair"], method__tuning="tuned")
    several("others", ["good"])
    several("others", ["poor"], method__tuning="tuned", fits=still)
    assert NONE_TUNED in call("runs", "--against", "others")[1]
    (tmp_path / "tuned" / "split_mnist").mkdir(parents=True)
    content = json.dumps({"method": "map", "budget": 10, "criterion": {"metric": "average_accuracy"}})
    (tmp_path / "tuned" / "split_mnist" / "map.json").write_text(content)
    code, out, err = call("runs", "--against", "others")
    assert (code, err) == (0, "")
    named = ("your fair  ", "good ", "poor ", "not ")
    table = [line for line in out.splitlines() if line.startswith(named)]
    assert [line.split()[0] for line in table] == ["your", "poor", "not", "good"]
    assert [" * " in line for line in table] == [False, True, False, False]
    assert set(table[2]) == set("not tuned ─")
    assert NONE_TUNED not in out
    assert "* poor: a weight did not move: in 3 of 3 seeds, in seed 0: its slowest weight is worth 1.5" in out
    rows = rows_of(call("runs", "--against", "others", "--format", "json")[1])
    assert [(row["entry"], row["tuned"]) for row in rows.values()] == [
        ("good", False),
        ("your fair", True),
        ("poor", True),
    ]
    assert [len(row["marks"]) for row in rows.values()] == [0, 0, 1]


def test_pairing_on_examples_tells_more_than_seeds_and_its_lack_is_said(call):
    """Where arrays are missing on one side, nobody is paired: Welch, as scipy has it."""
    mine, theirs = several("runs", ["fair"]), several("others", ["good"], arrays=False)
    rows = rows_of(call("runs", "--against", "others", "--format", "json")[1])
    a, b = mine["fair"].mean(1), theirs["good"].mean(1)
    welch = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert limits(rows["good"], "yours minus it") == pytest.approx((a.mean() - b.mean(), *welch), abs=1e-12)
    assert rows["good"]["basis"].endswith("(Welch), since there are no losses per example of good")
    assert "no losses per example of good" in call("runs", "--against", "others")[1]
    paired = rank(entries(mine | theirs), True).difference("fair", "good")
    assert tuple(paired)[:3] != pytest.approx(limits(rows["good"], "yours minus it"))


def test_a_lower_number_that_is_better_is_called_better(call):
    """By a board's JSON of a task whose metric is a cross-entropy: seeds alone, and it says so."""
    example = json.loads((directory_of("iris_depth", "mfvi") / "record.json").read_text())
    mine, theirs = [0.30, 0.31, 0.33], [0.40, 0.44, 0.45]
    for seed, value in enumerate(mine):
        made(
            "runs", "mfvi", seed, [True], False, task=example["task"], metrics={"cross_entropy": value},
            provenance__arrays_digest=str(seed),
        )  # fmt: skip
    board = {
        **{"task": "iris_depth", "task_version": example["task"]["version"]},
        **{"data_digest": example["task"]["data_digest"], "metric": "cross_entropy"},
        "higher_is_better": False,
        "entries": [board_entry("map (x)", theirs)],
        "more": "is passed over",
    }
    Path("board.json").write_text(json.dumps(board))
    out = call("runs", "--against", "board.json")[1]
    low, high = stats.ttest_ind(mine, theirs, equal_var=False).confidence_interval(0.95)
    words = formats.interval(Interval(np.mean(mine) - np.mean(theirs), low, high, ""))
    assert f"your mfvi against map (x), the best other, on iris_depth: {words} nats of cross_entropy, " in out
    assert "lower is better: better; rank 1 of 2" in out
    assert "fresh seeds alone (Welch), since there are no losses per example of any entry" in out


# ---- whose runs


def test_entries_are_those_of_submissions_and_else_the_committed_records(call):
    """A name is shown with its slug, the project's own without; one's own method is named apart."""
    several("runs", ["fair"])
    several("records", ["fair", "poor"])
    assert set(rows_of(call("runs", "--format", "json")[1])) == {"your fair", "fair", "poor"}
    several("submissions/reference", ["good"])
    several("submissions/someone", ["good", "fair"])
    for slug in ("reference", "someone"):
        Path("submissions", slug, "submission.json").write_text("{}")
    code, out, err = call("runs", "--format", "json")
    assert (code, err) == (0, "")
    rows = rows_of(out)
    assert set(rows) == {"your fair", "good", "good (someone)", "fair (someone)"}
    assert {row["submission"] for row in rows.values()} == {"yours", "reference", "someone"}
    assert rows["fair (someone)"]["yours minus it"] == 0
    assert set(rows_of(call("runs", "--against", "submissions/someone", "--format", "json")[1])) == {
        *("your fair", "good (someone)", "fair (someone)"),
    }


def test_withdrawn_and_superseded_submissions_are_no_rivals(call):
    several("runs", ["fair"])
    for slug, method in (("first", "poor"), ("second", "good"), ("third", "good")):
        several(f"submissions/{slug}", [method])
        Path("submissions", slug, "submission.json").write_text("{}")
    Path("status").write_text('[first]\nwithdrawn = "wrong data"\n[second]\nsuperseded_by = "third"\n')
    assert set(rows_of(call("runs", "--format", "json")[1])) == {"your fair", "good (third)"}


def test_own_runs_are_no_rivals_of_themselves(call):
    several("runs", ["fair", "good"])
    rows = rows_of(call("runs/split_mnist/fair", "--against", "runs", "--format", "json")[1])
    assert set(rows) == {"your fair", "good"}


def test_several_own_methods_have_a_difference_each(call):
    several("runs", ["fair", "poor"])
    several("others", ["good"])
    rows = rows_of(call("runs", "--against", "others", "--format", "json")[1])
    assert rows["good"]["fair minus it"] > rows["good"]["poor minus it"]
    assert rows["your poor"]["fair minus it"] == -rows["your fair"]["poor minus it"]
    assert rows["your fair"]["fair minus it"] is None


def test_differences_of_many_own_methods_are_those_of_the_best_as_far_as_there_is_room(call):
    """And the table says how many are left out; forms for programs have all of them."""
    methods = [f"{name}+hidden={k}" for k in range(4) for name in ("fair", "good", "poor")]
    several("runs", methods)
    lines = call("runs")[1].splitlines()
    rule = next(k for k, line in enumerate(lines) if line.startswith("─"))
    heading = [word for line in lines[:rule] if not line.startswith("your ") for word in line.split()]
    (left_out,) = (
        line for line in lines if line.endswith("left out for want of width: --format csv has all")
    )
    ranked = [row["entry"].removeprefix("your ") for row in json.loads(call("runs", "--format", "json")[1])]
    assert 0 < heading.count("minus") < 12
    assert {word for word in heading if word in methods} == set(ranked[: heading.count("minus")])
    assert left_out.startswith(f"{12 - heading.count('minus')} columns of differences")
    assert call("runs", "--format", "csv")[1].splitlines()[0].count(" minus it,") == 12


def test_an_installation_without_records_says_so_and_compares_what_is_given(call):
    several("runs", ["fair", "good"])
    code, out, err = call("runs")
    assert code == 0
    assert err.splitlines() == [
        "bench: this installation holds no committed entries: the given runs are compared among themselves; "
        "--against takes a folder of submissions or the JSON of a board"
    ]
    assert "your fair against your good, the best other, on split_mnist: -" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task__version": 7}, "of version 7 of the task, yours of "),
        ({"task__data_digest": "f" * 64}, "on data ffffffff, yours on "),
    ],
)
def test_runs_of_another_version_or_other_data_are_not_compared(call, change, said):
    several("runs", ["fair"])
    several("others", ["good"], **change)
    several("more", ["poor"])
    code, out, err = call("runs", "--against", "others")
    assert code == 0
    assert "split_mnist: 3 runs in others are " + said in err
    assert "your fair on split_mnist: rank 1 of 1: it stands alone" in out
    assert "good" not in out


def test_a_smoke_run_and_an_unranked_task_have_means_alone(call):
    several("runs", ["fair"], preset="smoke")
    several("others", ["good"], preset="smoke")
    code, out, err = call("runs", "--against", "others")
    assert (code, "smoke runs prove the pipe" in err, "rank" in out) == (0, True, False)
    permuted = json.loads((directory_of("permuted_mnist", "mfvi") / "record.json").read_text())["task"]
    made("unranked", "mfvi", 0, [True], False, task=permuted)
    code, out, err = call("unranked", "--against", "others")
    assert (code, "permuted_mnist does not rank methods: means alone" in err) == (0, True)


def test_a_run_that_diverged_and_too_few_seeds_are_not_ranked_and_said(call):
    mine = several("runs", ["fair"], 2)
    several("others", ["good", "poor"])
    made("others", "lost", 0, mine["fair"][0], status="diverged", reason="nan", **NOTHING)
    out = call("runs", "--against", "others")[1]
    assert "your fair on split_mnist: not ranked (runs that differ: 2; needed: 3)" in out
    assert "not ranked (1 of 1 runs gave no value): lost" in out


def test_copies_of_one_seed_are_one(call):
    """The cheat: one good seed, handed in three times."""
    row = right("good", 0, 0.9)
    for seed in range(3):
        made("runs", "good", seed, row)
    several("others", ["fair"])
    assert "not ranked (runs that differ: 1; needed: 3)" in call("runs", "--against", "others")[1]


def test_a_record_whose_metric_is_not_that_of_its_arrays_is_refused(call):
    """The cheat: a better number written over the honest one."""
    several("runs", ["fair"])
    for seed in range(3):
        made("others", "poor", seed, right("poor", seed, 0.2), metrics={"average_accuracy": 0.99})
    code, out, err = call("runs", "--against", "others")
    assert (code, out) == (2, "")
    assert err == "bench: poor (): the losses of a run have another mean than its value\n"


# ---- a board's JSON


def board_entry(name, values, **more):
    runs = [{"seed": seed, "value": value} for seed, value in enumerate(values)]
    return {"name": name, "slug": "x", "seed_matters": True, "runs": runs} | more


def board(**changes):
    return {
        "task": EXAMPLE["task"]["identity"],
        "task_version": EXAMPLE["task"]["version"],
        "data_digest": EXAMPLE["task"]["data_digest"],
        "metric": "average_accuracy",
        "higher_is_better": True,
        "entries": [board_entry("good (x)", [0.8, 0.9, 0.85]), board_entry("bad", [0.1, None, 0.2])],
    } | changes


def test_a_board_is_read_without_what_was_withdrawn(call):
    several("runs", ["fair"])
    others = [*board()["entries"], board_entry("gone", [0.9] * 3, status="withdrawn")]
    Path("board.json").write_text(json.dumps(board(entries=others)))
    rows = rows_of(call("runs", "--against", "board.json", "--format", "json")[1])
    assert set(rows) == {"your fair", "good (x)", "bad (x)"}
    assert rows["good (x)"]["mean"] == pytest.approx(0.85)
    assert (rows["bad (x)"]["diverged"], rows["bad (x)"]["rank"]) == (1, None)
    Path("board.json").write_text(json.dumps(board(task_version=7)))
    assert "6 runs in board.json are of version 7" in call("runs", "--against", "board.json")[2]
    Path("board.json").write_text(json.dumps(board(metric="forgetting")))
    assert call("runs", "--against", "board.json") == (
        *(2, ""),
        "bench: the board ranks split_mnist by forgetting, the task here by average_accuracy\n",
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON: "),
        ("[" * 100_000, "is no JSON: "),
        ("\udcff", "is no JSON: "),
        ("[]", "is no JSON of a task of the board: "),
        (json.dumps({**board(), "entries": "many"}), "entries: "),
        (json.dumps({k: v for k, v in board().items() if k != "metric"}), "metric: Field required"),
        (json.dumps(board()).replace("0.85", "NaN"), "finite number"),
        (json.dumps(board()).replace("0.85", "1e999"), "finite number"),
        (json.dumps(board()).replace("0.85", '"0.85"'), "valid number"),
        (json.dumps(board(entries=board()["entries"][:1] * 2)), "an entry is there twice"),
        (json.dumps(board()).replace("good", "good\\u202e"), "never printed: 'good\\u202e (x)'"),
        (json.dumps(board()) + " " * 2**24, "more than 16 MiB"),
    ],
)
def test_what_is_no_board_is_refused_in_one_line(tmp_path, content, said):
    path = tmp_path / "board.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as refused:
        read_board(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


def test_a_board_that_is_not_there_is_said(call):
    several("runs", ["fair"])
    code, out, err = call("runs", "--against", "nowhere.json")
    assert (code, out, err) == (2, "", "bench: cannot read nowhere.json: No such file or directory\n")


# ---- overlapping splits


class OfSplits:
    """A task with overlapping splits, as far as its standing asks it."""

    spec = Spec(
        *("?", "none", 1, {"log_likelihood": Metric("of a target", "nats", np.inf, -np.inf)}),
        main_metric="log_likelihood",
        split_ratio=1 / 9,
    )


def of_splits(method, splits, **options):
    """An entry from values by seed and split `[S, K]`."""
    results = [Result("completed", float(np.mean(row)), np.array(row)) for row in splits]
    return Rival(method, "", results, **options)


def test_overlapping_splits_are_compared_by_the_corrected_resampled_t():
    """Nadeau and Bengio 2003, from the means of each split over the seeds; two entries, one interval."""
    g = np.random.default_rng(1)
    a, b = g.normal(0, 1, (2, 10)), g.normal(0.5, 1, (3, 10))
    stood = stand([of_splits("a", a, is_own=True), of_splits("b", b)], OfSplits)
    difference = a.mean(0) - b.mean(0)
    half = stats.t.ppf(0.975, 9) * np.sqrt((1 / 10 + 1 / 9) * difference.var(ddof=1))
    found = stood.standing.difference("your a", "b ()")
    assert (found.centre, found.half) == pytest.approx((difference.mean(), half))
    naive = stats.t.ppf(0.975, 9) * stats.sem(difference)
    assert found.half > 1.4 * naive  # the cheat: splits taken for independent data
    assert "overlapping splits" in stood.basis


def test_without_values_by_split_an_entry_is_left_out_and_false_ones_are_refused():
    good = of_splits("a", [[0.1, 0.2, 0.3]])
    bare = Rival("b", "", [Result("completed", 0.2)])
    stood = stand([good, bare], OfSplits)
    assert [place.name for place in stood.standing.places] == ["a ()"]
    assert "left out, since their values by split are not there: b" in stood.basis
    lost = Rival("c", "", [*good.results, Result("diverged", None)])
    (_, place) = stand([good, lost], OfSplits).standing.places
    assert (place.name, place.ranks) == ("c ()", None)
    for results, said in (
        ([Result("completed", 0.9, np.array([0.1, 0.2, 0.3]))], "another mean than its value"),
        ([*good.results, Result("completed", 0.2, np.array([0.2]))], "different numbers of splits"),
    ):
        with pytest.raises(UsageError, match=said):
            stand([good, Rival("d", "", results)], OfSplits)


def test_maintainers_words_that_are_wrong_are_one_line(call, tmp_path):
    made(tmp_path / "runs", "map", 0, right("map", 0, 0.6))
    (tmp_path / "status").write_text("[reference")
    code, out, err = call(tmp_path / "runs")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "status" in err
