"""Marks at both sides of every limit, and the line: in records, on the board's pages, on a terminal.

What is marked is compared with an exact enumeration, and with draws whose effective sample size is known.
"""

import json
import re
from itertools import pairwise

import boards
import numpy as np
import pytest
import safetensors.numpy
from boards import identity, task_names
from scipy import stats

from bench import cli
from bench.commands import formats
from bench.diagnostics import effective_sample_size
from bench.errors import UsageError
from bench.leaderboard.evidence.entries import directory_of
from bench.leaderboard.evidence.submission import SUBMISSIONS
from bench.leaderboard.rank.board import build
from bench.leaderboard.site import pages
from bench.runs import marks, measures, registry, resolution
from bench.runs.marks import MEANINGS, Mark, at_least, of_run, together
from bench.runs.records import Record
from bench.runs.searches import NONE_TUNED, Searches, parted, searches
from bench.sweep import tune
from bench.sweep.edges import edges

EXAMPLE = json.loads((directory_of("split_mnist", "mfvi") / "record.json").read_text())
FIT = {"stage": "fit", "epochs": 1, "steps": 1, "seconds": 1.0}
TEN = np.repeat(np.arange(10), 20).astype(np.uint8)
"""Two hundred examples, a tenth of each class."""


def record(metrics=(), fits=(), **changes):
    """A completed run with these metrics beside its own, and fits with these diagnostics."""
    content = EXAMPLE | changes | {"fits": [FIT | {"diagnostics": one} for one in fits]}
    return Record.model_validate_json(json.dumps(content | {"metrics": EXAMPLE["metrics"] | dict(metrics)}))


def names(*arguments):
    return [mark.name for mark in marks.marks(*arguments)]


# ------------------------------------------------------------------------------------------------ the limits

FIFTY = [{"weight_ess": 1.45, "draws": 50.0}]
"""A fit whose slowest weight drifted, which nearly every chain of mini-batches has."""
MARKED = {
    "predictions did not move": (
        record(fits=FIFTY, diagnostics={"prediction_autocorrelation": 10.1}),
        record(fits=FIFTY, diagnostics={"prediction_autocorrelation": 10.0}),
        "half of what it predicts is worth fewer than 4.95 of 50 independent draws",
    ),
    "a weight did not move": (
        record(fits=[{"weight_ess": 30.0, "draws": 50.0}, {"weight_ess": 1.99, "draws": 50.0}]),
        record(fits=[{"weight_ess": 30.0, "draws": 50.0}, {"weight_ess": 2.0, "draws": 50.0}]),
        "its slowest weight is worth 1.99 of 50 independent draws",
    ),
    "chains disagree": (
        record(diagnostics={"prediction_rhat": 1.051}),
        record(diagnostics={"prediction_rhat": 1.05}),
        "R-hat of predictions is 1.051, above 1.05",
    ),
    "accuracy at chance": (
        record({"accuracy": 32 / 200}),
        record({"accuracy": 33 / 200}),
        "accuracy is 0.1600 on 200 examples, of which 0.1000 are of the largest class",
    ),
    "temperature at its bound": (
        record({"temperature": 99.5, "nll_scaled": 2.3}),
        record({"temperature": 98.5, "nll_scaled": 2.3}),
        "the fitted temperature is 99.5, looked for from 0.01 to 100",
    ),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_mark_begins_at_its_limit(name):
    """The same record on the other side of the limit is the negative control."""
    beyond, within, reason = MARKED[name]
    arrays = {"labels": TEN}
    assert marks.marks(beyond, arrays) == (Mark(name, reason),)
    assert marks.marks(within, arrays) == ()


def test_the_lower_bound_of_temperatures_is_one_too():
    assert names(record({"temperature": 0.01005, "nll_scaled": 2.3})) == ["temperature at its bound"]
    assert names(record({"temperature": 0.0102, "nll_scaled": 2.3})) == []


def test_no_mark_is_made_up():
    """Of a healthy run, of one without the diagnostic, of one that diverged."""
    healthy = {"accuracy": 0.9, "temperature": 1.2, "nll_scaled": 0.3}
    fine = record(healthy, [{"weight_ess": 20.0, "draws": 50.0}], diagnostics={"prediction_rhat": 1.01})
    assert names(fine, {"labels": TEN}) == []
    assert names(record(), {"labels": TEN}) == []
    assert names(record({"accuracy": 0.1})) == names(record({"accuracy": 0.1}), {"targets": TEN}) == []
    assert names(record({"temperature": 300.0})) == []  # nothing that was fitted to predictions
    nothing = dict.fromkeys(EXAMPLE["metrics"])
    diverged = {"status": "diverged", "reason": "a loss", "undefined": dict.fromkeys(nothing, "diverged")}
    assert names(record(nothing, [{"weight_ess": 1.0}], **diverged)) == []


def test_the_limit_of_draws_lies_between_independent_draws_and_a_drift():
    """Of 10,000 weights an exact sampler's slowest is above it; of 40 seeds none fails, the least is 2.2."""
    free = effective_sample_size(np.random.default_rng(0).standard_normal((1, 50, 10_000)))
    drift = effective_sample_size(np.arange(50.0)[None])
    assert 2 < free.min() < 5  # 5 would mark it
    assert names(record(fits=[{"weight_ess": float(free.min()), "draws": 50.0}])) == []
    assert names(record(fits=[{"weight_ess": float(drift), "draws": 50.0}])) == ["a weight did not move"]


def test_the_limit_of_predictions_lies_between_independent_draws_and_a_random_walk():
    """Of one number of 50 independent draws the mark is a false alarm with a probability of 0.2%.

    Half of many numbers of a random walk have it, and none of a chain that is worth a third of its draws.
    """

    def marked(draws):
        worth = float(np.median(effective_sample_size(draws[None])))
        found = {"prediction_autocorrelation": len(draws) / worth}
        return names(record(fits=[FIFTY[0] | {"draws": float(len(draws))}], diagnostics=found)) != []

    free = np.random.default_rng(0).standard_normal((50, 2000))
    assert sum(marked(free[:, [i]]) for i in range(2000)) <= 12  # expected are 4.6; more than 12 in 0.2%
    assert marked(free.cumsum(0))
    third = free.copy()
    for before, after in pairwise(third):
        after[:] = 0.5 * before + 0.75**0.5 * after
    assert not marked(third)
    assert not marked(np.arange(20.0)[:, None])  # so few draws do not tell a drift from chance
    assert marked(np.arange(50.0)[:, None])


def test_what_predictions_say_goes_before_what_a_weight_says():
    """Of a sequence of fits the longest time of the run counts, and the draws of a fit that tells them."""
    slow = {"prediction_autocorrelation": 30.0}
    assert names(record(fits=FIFTY)) == ["a weight did not move"]
    assert names(record(fits=FIFTY, diagnostics={"prediction_autocorrelation": 2.0})) == []
    assert names(record(fits=FIFTY, diagnostics=slow)) == ["predictions did not move"]
    assert names(record(fits=[{}, *FIFTY, {}], diagnostics=slow)) == ["predictions did not move"]
    assert names(record(fits=[{}], diagnostics=slow)) == []
    for absurd in (0.0, -1.0):  # a record is anybody's, and the board reads it
        assert names(record(fits=FIFTY, diagnostics={"prediction_autocorrelation": absurd})) == [
            "a weight did not move"
        ]


def test_chance_is_the_exact_binomial_of_the_largest_class():
    """The tail is scipy's, and the mark is what the interval of Clopper and Pearson says, for every count."""
    classes = np.repeat([0, 1, 2], [12, 6, 2])
    for right in range(21):
        assert at_least(right, 20, 0.6) == pytest.approx(stats.binom.sf(right - 1, 20, 0.6), rel=1e-9)
        low = stats.binomtest(right, 20).proportion_ci(0.99, "exact").low
        found = names(record({"accuracy": right / 20}), {"labels": classes})
        assert found == (["accuracy at chance"] if low <= 0.6 else [])


def test_accuracy_is_that_of_clean_images_where_a_task_shifts_them():
    shifted = {"accuracy": 0.1, "accuracy_clean": 0.9}
    assert names(record(shifted), {"labels": TEN}) == []
    assert names(record(shifted | {"accuracy_clean": 0.1}), {"labels": TEN}) == ["accuracy at chance"]


def test_classes_are_read_beside_the_record_and_damage_says_nothing(tmp_path):
    poor = record({"accuracy": 0.1})
    path = tmp_path / "arrays.safetensors"
    path.write_bytes(safetensors.numpy.save({"full_labels": TEN, "log_probs": np.zeros(3)}))
    assert [mark.name for mark in of_run(poor, lambda: path)] == ["accuracy at chance"]
    path.write_bytes(b"no arrays")
    assert of_run(poor, lambda: path) == of_run(poor, lambda: None) == ()
    assert of_run(record(), lambda: 1 / 0) == ()  # without an accuracy nobody asks


def test_an_entry_says_how_many_seeds_have_a_mark():
    first, other = Mark("chains disagree", "1.2"), Mark("a weight did not move", "1.4")
    assert together([(0, (first,))]) == (first,)
    assert together([(0, ()), (1, (first,)), (2, (first, other))]) == (
        Mark("a weight did not move", "in 1 of 3 seeds, in seed 2: 1.4"),
        Mark("chains disagree", "in 2 of 3 seeds, in seed 1: 1.2"),
    )


# --------------------------------------------------------------------------------------------- who is tuned


def test_tuned_means_the_budget_that_all_searches_of_the_task_have(tmp_path, monkeypatch):
    monkeypatch.setattr(resolution, "TUNED", tmp_path)
    assert searches("split_digits") == Searches({})
    (tmp_path / "split_digits").mkdir()
    metric = measures.written()["split_digits"].validation_metric
    for method, budget, criterion in (
        ("map", 10, metric),
        ("mfvi", 10, metric),
        ("radial", 20, "accuracy_of_old"),
    ):
        content = {"method": method, "budget": budget, "criterion": {"metric": criterion, "on": "validation"}}
        (tmp_path / "split_digits" / f"{method}.json").write_text(json.dumps(content))
    found = searches("split_digits")
    assert found.budget == 10
    assert found.is_tuned("tuned", "map")
    assert found.is_tuned("tuned", "deep_ensemble")  # by its member, map
    assert not found.is_tuned("tuned", "radial")  # by what no search of the task chooses by any more
    assert not found.is_tuned("by_hand", "map")
    assert found.is_tuned("tuned", "theirs", 10)
    assert not found.is_tuned("tuned", "theirs", 11)
    unequal = Searches(found.budgets | {"radial": 20})
    assert unequal.budget is None
    assert not unequal.is_tuned("tuned", "map")
    (tmp_path / "split_digits" / "map.json").write_text("{}")
    with pytest.raises(UsageError, match=r"map.json is no result of bench tune"):
        searches("split_digits")
    assert parted([1, 2, 3, 4], lambda n: n % 2 == 0) == ([2, 4], [1, 3])


def test_the_member_of_an_ensemble_is_known_without_its_file():
    """As the registry has it from the imported classes."""
    known = registry.methods()
    assert {name: known.member_of(name) for name in known} == {n: e.member.name for n, e in known.items()}
    assert known.member_of("deep_ensemble") == "map"
    assert known.member_of("package.own") == "package.own"


LOG = {"low": 1e-4, "high": 1e-2, "scale": "log"}
LINEAR = {"low": -6.0, "high": -1.0, "scale": "linear"}


@pytest.mark.parametrize(
    ("range_", "value", "edge"),
    [
        (LOG, 1e-4 * 100**0.049, "low"),
        (LOG, 1e-4 * 100**0.051, None),
        (LOG, 1e-4 * 100**0.951, "high"),
        (LOG, 5e-5, "low"),  # the untuned configuration may lie outside
        (LINEAR, -5.76, "low"),
        (LINEAR, -5.74, None),
        (LINEAR, -1.2, "high"),
        ({"low": 1, "high": 9, "scale": "linear"}, 1, "low"),
        ({"low": 1, "high": 9, "scale": "linear"}, 2, None),
        ({"choices": [1, 4, 16]}, 16, "high"),
        ({"choices": [1, 4, 16]}, 4, None),
        ({"choices": [4]}, 4, None),
        ({"choices": ["a", "b"]}, "a", None),
        ({"choices": [False, True]}, True, None),
    ],
)
def test_an_edge_is_the_outer_twentieth_of_a_range(range_, value, edge):
    path = next(resolution.TUNED.glob("split_digits/*.json"))
    result = json.loads(path.read_text()) | {"search": {"a": range_}, "chosen_number": 0}
    result["configurations"][0]["settings"] = {"a": value}
    found = edges(tune.Tuning.model_validate_json(json.dumps(result)))
    assert found == ({"a": edge} if edge else {})


# ------------------------------------------------------------------------------------------- where they show


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A board of three entries: the best is not tuned, the second is and did not move, the last is tuned."""
    top = tmp_path_factory.mktemp("marked")
    maker = boards.Maker(top / "submissions", examples=200)
    for method in range(3):
        for seed in range(3):
            run = maker.run("reference", 0, f"method{method:03}", seed, 0.5 + method, method_number=method)
            content = json.loads((run / "record.json").read_text())
            if method < 2:
                content["method"]["tuning"] = "tuned"
            if method == 1 and seed:
                content["fits"] = [FIT | {"diagnostics": {"weight_ess": 1.45, "draws": 50.0}}]
            (run / "record.json").write_text(json.dumps(content))
    maker.seal("reference")
    tuned = top / "tuned" / identity(0)
    tuned.mkdir(parents=True)
    for method in range(2):
        content = json.dumps({"method": f"method{method:03}", "budget": 10, "criterion": {"metric": "nll"}})
        (tuned / f"method{method:03}.json").write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolution, "TUNED", top / "tuned")
        board = build(top / "submissions", top / "cache", imports=task_names(1))
        again = build(top / "submissions", top / "cache", imports=task_names(1))
    assert again.tables == board.tables  # searches are read anew, marks come from what was kept
    pages.write(board, top / "site")
    return board.tables[identity(0)], top / "site"


def test_the_page_shows_every_mark_with_its_reason_and_explains_it(shown):
    """A law over the board's pages: a name in the column, its reason twice, its meaning below."""
    table, site = shown
    text = (site / "tasks" / f"{identity(0)}.html").read_text()
    reason = "in 2 of 3 seeds, in seed 1: its slowest weight is worth 1.45 of 50 independent draws"
    assert [row["marks"] for row in table["entries"] if row["marks"]] == [[["a weight did not move", reason]]]
    for row in table["entries"]:
        for name, why in row["marks"]:
            assert f'<abbr title="{why}">{name}</abbr>' in text
            assert f"<strong>{name}</strong>, {why}." in text
            assert f"<dt>{name}</dt><dd>{MEANINGS[name]}</dd>" in text
            assert why in (site / "methods" / "reference" / f"{row['folder']}.html").read_text()
            assert f"{name}: {why}" in (site / "tasks" / f"{identity(0)}.csv").read_text()
    assert text.count("<dt>chains disagree</dt>") == 0  # what nobody has needs no word
    reading = (site / "reading.html").read_text()
    assert all(f"<dt>{name}</dt><dd>{meaning}</dd>" in reading for name, meaning in MEANINGS.items())
    assert (site / "overall.html").read_text().count("*</abbr>") == 1


def test_the_page_has_a_line_and_one_ranking(shown):
    table, site = shown
    order = [row["name"] for row in table["entries"]]
    assert order == ["method002", "method001", "method000"]
    text = (site / "tasks" / f"{identity(0)}.html").read_text()
    body = text[text.index("<tbody>") : text.index("</table>")]
    seen = re.findall(r'<th scope="row"><a href="[^"]+">([^<]+)</a>|(Not tuned)</th>', body)
    assert ["".join(pair) for pair in seen] == ["method001", "method000", "Not tuned", "method002"]
    assert "Ranks\nand tie groups are those of one ranking" in text
    assert NONE_TUNED[1:] not in text
    assert [row["tuned"] for row in table["entries"]] == [False, True, True]
    assert body.index('aria-label="method002 against the next, method001"') > body.index("Not tuned")


def test_where_nothing_is_tuned_there_is_a_sentence_and_no_line():
    text = (boards.example().site / "tasks" / f"{identity(0)}.html").read_text()
    assert "Not tuned</th>" not in text
    assert NONE_TUNED[1:] in text


def test_a_terminal_shows_the_line_in_every_column():
    rows = [{"method": name, "rank": rank} for name, rank in (("b", 2), ("a", 1))]
    with cli.output.capture() as capture:
        cli.output.print(formats.drawn(rows, 80, line=(1, "not tuned")))
    body = [line.rstrip() for line in capture.get().splitlines()[2:]]
    assert body == ["b             2", "not tuned  ────", "a             1"]


def test_bench_show_ends_with_the_marks(capsys):
    """Committed chains of which one moved, and a method of the same task that has no such diagnostic."""
    folder = SUBMISSIONS / "reference" / "fidelity_iris"
    reason = "half of what it predicts is worth fewer than 1.84 of 50 independent draws"
    assert cli.main(["show", str(folder / "sgld" / "seed0")]) == 0
    assert f"mark: predictions did not move: {reason}" in capsys.readouterr().out
    assert cli.main(["show", str(folder / "sgld" / "seed2")]) == 0
    out = capsys.readouterr().out
    assert "mark:" not in out
    assert "half of what the chain predicts is worth 13.7 of 50 independent draws or more" in out
    assert cli.main(["show", str(folder / "map" / "seed0")]) == 0
    assert "mark:" not in capsys.readouterr().out
    assert cli.main(["show", str(folder / "sgld" / "seed0"), "--format", "json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        assert row["marks"] == [f"predictions did not move: {reason}"]
