"""A table as it comes: what columns are taken for, what is wrong with them, and that no test row leaks."""

import csv
from datetime import date, datetime
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.preprocessing import TargetEncoder

from bench import cells, columns, learning
from bench.errors import UsageError
from bench.studies import own
from bench.studies.own_rows import LARGE
from bench.tasks.own_table import OwnTable, Settings


def write(path, columns, delimiter=","):
    """Writes columns as CSV; returns the path."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file, delimiter=delimiter)
        lines.writerow(columns)
        lines.writerows(zip(*columns.values(), strict=True))
    return path


def make(path, target="y", **values):
    """The task on a file."""
    return OwnTable(Settings(file=str(path), target=target, **values))


def numbers(rows=60, **columns):
    """A random input x, a random target y, and further columns."""
    x, y = np.random.default_rng(0).normal(size=(2, rows)).round(6).tolist()
    return {"x": x} | columns | {"y": y}


# ---- what is wrong, all of it at once


def test_all_faulty_columns_are_told_with_their_first_bad_cells(tmp_path):
    """Blank lines and a cell of two lines are counted as an editor counts them."""
    notes = [f"text {i}" for i in range(60)]
    notes[0] = "text\n0"
    weights = [str(i) for i in range(60)]
    weights[3], weights[5], weights[7], weights[8] = "n. a.", "inf", "-inf", "1e999"
    mixed = [str(i / 7) for i in range(60)]
    mixed[10], mixed[59] = "12,5", "about 3"
    columns = numbers(note=notes, weight=[*map(str, range(59)), "inf"], mixed=mixed, empty=[""] * 60)
    path = write(tmp_path / "t.csv", columns)
    with pytest.raises(UsageError) as caught:
        make(path).data_digest()
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert "column 'note' holds 60 different texts in 60 rows, such as 'text 0' in line 3, 'text 1'" in said
    assert "'text 2' in line 5 and 57 more" in said
    assert "column 'weight' holds 'inf' in line 62" in said
    assert "column 'mixed' is of numbers, but for '12,5' in line 13, 'about 3' in line 62: mend" in said
    assert "column 'empty' is empty" in said
    assert "column 'x'" not in said
    made = make(path, drop="note,weight, mixed,empty")
    assert [column.name for column in made.inputs] == ["x"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"drop": "nothing"}, "--task.drop nothing: .* has no such column; it has x, c, y"),
        ({"drop": "y"}, "--task.target and --task.drop name one column, y"),
        ({"categorical": "c", "dates": "c"}, "--task.categorical and --task.dates name one column, c"),
        ({"group": "c", "time": "x"}, "--task.group and --task.time: a column says it all"),
        (
            {"dates": "c"},
            "column 'c' holds 'a' in line 2, 'b' in line 3, 'a' in line 4 and 57 more, no dates",
        ),
    ],
)
def test_flags_that_cannot_be_are_refused_in_one_line(values, said, tmp_path):
    with pytest.raises(UsageError, match=said) as caught:
        make(write(tmp_path / "t.csv", numbers(c=["a", "b"] * 30)), **values).data_digest()
    assert "\n" not in str(caught.value)


# ---- decimal commas


def test_decimal_commas_read_as_points_do(tmp_path):
    """From semicolons, tabs and quoted cells; new rows as text, numbers and a file."""
    points = numbers(z=[i / 4 for i in range(60)])
    expected = make(write(tmp_path / "p.csv", points))
    commas = {name: [str(value).replace(".", ",") for value in values] for name, values in points.items()}
    for number, delimiter in enumerate(";\t,"):
        made = make(write(tmp_path / f"{number}.csv", commas, delimiter), decimal=",")
        for part in ("train", "test"):
            assert all(map(torch.equal, made.own_data(part), expected.own_data(part)))
        truth = expected.encoder.encode_rows(tmp_path / "p.csv")
        assert np.array_equal(made.encoder.encode_rows(tmp_path / f"{number}.csv"), truth)
        rows = [{"x": "0,5", "z": "-1"}, {"x": 0.5, "z": -1}]
        assert len(np.unique(made.encoder.encode_rows(rows), axis=0)) == 1
        with pytest.raises(UsageError, match=r"'x' must be a number with a decimal comma, not '0.5'"):
            made.encoder.encode_rows([{"x": "0.5", "z": 1}])
    with pytest.raises(UsageError, match=r"comma, as in '0,0' in line 2, '0,25' in line 3.*--task.decimal ,"):
        make(tmp_path / "0.csv", drop="x").data_digest()
    with pytest.raises(UsageError, match=r"'z' holds numbers with a point, .* --task.decimal , wants"):
        make(tmp_path / "p.csv", decimal=",").data_digest()


@pytest.mark.parametrize(
    ("values", "decimal", "is_ambiguous"),
    [
        (["1,100", "12,345", "999"], ".", True),
        (["-1,100,200"], ".", True),
        (["1.100", "-2.345", "9,5"], ",", True),
        (["1,1", "12,345", "999"], ".", False),
        (["0,100", "12,345"], ".", False),
        (["1,1000"], ".", False),
    ],
)
def test_marks_of_thousands_are_not_taken_for_decimal_ones(values, decimal, is_ambiguous, tmp_path):
    """`--task.decimal ,` would read 1,100 as 1.1; so it is not the first advice. Negative controls below."""
    table = {"a": (values * 60)[:60], "k": [*"pq"] * 30}
    path = write(tmp_path / "t.csv", table, delimiter=";")
    with pytest.raises(UsageError) as caught:
        make(path, "k", decimal=decimal).data_digest()
    assert (
        "which may be thousands or decimals: write thousands without" in str(caught.value)
    ) == is_ambiguous


def test_times_of_several_zones_do_not_decide_what_is_later(tmp_path):
    """23:30 at +02:00 is before 22:00 at UTC; negative control: one zone is in order."""
    ends = {"+02:00": "+00:00", "+0200": "", "Z": "+01:00"}
    for one, other in ends.items():
        when = [f"2024-03-{i // 2 + 1:02} {(23, 22)[i % 2]}:30{(one, other)[i % 2]}" for i in range(60)]
        path = write(tmp_path / "t.csv", numbers(when=when))
        with pytest.raises(
            UsageError, match=r"--task\.time when: holds times of several zones \(.*write all"
        ):
            make(path, time="when").data_digest()
        same = [value.removesuffix(one).removesuffix(other or "no") + one for value in when]
        make(write(tmp_path / "t.csv", numbers(when=same)), time="when").data_digest()


ALIKE = {
    "capitals": ("Male", "male"),
    "two accents": ("caf\u00e9", "cafe\u0301"),
    "hidden": ("a", "a\u200b"),
    "blanks": ("a b", "a  b"),
    "a wide blank": ("a b", "a\u00a0b"),
}


@pytest.mark.parametrize("two", ALIKE.values(), ids=ALIKE)
def test_texts_that_look_alike_are_noted_as_inputs_and_as_classes(two, tmp_path):
    """Both as Python writes them; negative control: other texts are not."""
    path = write(tmp_path / "t.csv", numbers(c=[*two, "else"] * 20))
    for target in ("y", "c"):
        said = make(path, target).notes()["notes.txt"]
        assert f"are taken for two: c ({two[0]!a} and {two[1]!a})" in said, said
    others = write(tmp_path / "t.csv", numbers(c=["a", "b"] * 30))
    assert "taken for two" not in make(others).notes()["notes.txt"]


def test_numbers_that_stand_for_missing_ones_are_told_as_inputs_and_as_targets(tmp_path):
    """Negative controls: one alone, one among others of its size, and another number far away."""
    x = [-999.0 if i % 20 == 3 else i / 7 for i in range(60)]
    for target, name in (("y", "c"), ("c", "c")):
        said = make(write(tmp_path / "t.csv", numbers(c=x)), target).notes()["notes.txt"]
        assert f"warning: {name} is -999 in 3 rows, and 0 to 8.429 in all others: where" in said
    alone = [-999.0 if i == 3 else i / 7 for i in range(60)]
    among = [99.0 if i % 20 == 3 else float(i * 3) for i in range(60)]
    another = [-1000.0 if i % 20 == 3 else i / 7 for i in range(60)]
    path = write(tmp_path / "t.csv", numbers(c=alone, d=among, e=another))
    assert "warning" not in make(path).notes()["notes.txt"]


def test_an_accent_is_the_same_in_a_new_row_however_it_is_coded(tmp_path):
    """As one character or two; negative control: where the table has both, each is its own."""
    one, two = ALIKE["two accents"]
    encoder = make(write(tmp_path / "t.csv", numbers(c=[one, "tea"] * 30))).encoder
    rows = [{"x": 0, "c": value} for value in (one, two)]
    same, again = encoder.encode_rows(rows)
    assert np.array_equal(same, again)
    assert same[1:].sum() == 1
    find = cells.among([one, two])
    assert (find(one), find(two)) == (one, two)


def test_a_target_of_true_and_false_in_several_spellings_has_two_classes(tmp_path):
    """Negative controls: one spelling stays as it is written; true and no are two texts."""
    for values, expected in {
        ("True", "FALSE", "true", "False"): ["false", "true"],
        ("True", "False"): ["False", "True"],
        ("true", "True"): ["true"],
        ("True", "true", "no"): ["True", "no", "true"],
    }.items():
        path = write(tmp_path / "t.csv", numbers(c=(list(values) * 60)[:60]))
        task = make(path, "c")
        assert learning.classes(task.labels) == expected


def test_rows_that_are_trained_on_and_held_out_are_counted(tmp_path):
    """Against a count by hand; negative control: of different rows nothing is said."""
    table = numbers(c=[*"ab"] * 30)
    table["x"][30:] = table["x"][:30]
    task = make(write(tmp_path / "t.csv", table))
    pairs = list(zip(table["x"], table["c"], strict=True))
    trained = {pairs[row] for row in task.rows["train"]}
    number = sum(pairs[row] in trained for row in task.rows["test"])
    assert (
        f"{number} of {len(task.rows['test'])} held-out rows have the very inputs"
        in task.notes()["notes.txt"]
    )
    assert "very inputs" not in make(write(tmp_path / "t.csv", numbers())).notes()["notes.txt"]


def test_unquoted_decimal_commas_between_commas_are_refused_clearly(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,y\n" + "1,5,2,5\n" * 30)
    with pytest.raises(
        UsageError, match=r"line 2 has 4 cells, and .* 2 columns: cells with decimal commas are"
    ):
        make(path, decimal=",").data_digest()


# ---- dates

DAYS = [date(2020 + i % 4, 1 + i % 12, 1 + (7 * i) % 28) for i in range(60)]


def parts_by_hand(days, trained):
    """Year, day of year and weekday, by Python's own calendar."""
    rows = []
    years = [days[i].year for i in trained]
    for day in days:
        first = date(day.year, 1, 1)
        share = (day - first).days / (date(day.year + 1, 1, 1) - first).days
        week = day.weekday() / 7
        angles = [f(2 * np.pi * t) for t in (share, week) for f in (np.sin, np.cos)]
        rows.append([(day.year - np.mean(years)) / np.std(years), *angles])
    return np.array(rows)


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%Y%m%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d 00:00"])
def test_dates_become_calendar_parts_however_they_are_written(form, tmp_path):
    """Against Python's calendar; new rows as text, dates of Python, numpy and pandas."""
    pandas = pytest.importorskip("pandas")
    written = [day.strftime(form) for day in DAYS]
    made = make(write(tmp_path / "t.csv", numbers(day=written)), dates="day", drop="x")
    expected = parts_by_hand(DAYS, made.rows["train"])
    np.testing.assert_allclose(made.own_data("test")[0], expected[made.rows["test"]], atol=1e-6)
    stamps = pandas.to_datetime(pandas.Series(DAYS))
    frame = pandas.DataFrame({"day": stamps})
    for column in (written, DAYS, [datetime(d.year, d.month, d.day) for d in DAYS], list(stamps)):
        np.testing.assert_allclose(made.encoder.encode_rows([{"day": d} for d in column]), expected)
    np.testing.assert_allclose(made.encoder.encode_rows(frame), expected)
    np.testing.assert_allclose(made.encoder.encode_rows([{"day": np.datetime64(DAYS[3])}])[0], expected[3])
    with pytest.raises(UsageError, match=r"'day' must be a date .*, not 'soon'"):
        made.encoder.encode_rows([{"day": "soon"}])


def test_times_of_the_day_and_missing_dates_are_inputs(tmp_path):
    days = [f"2024-03-{1 + i % 28:02} {i % 24:02}:30" for i in range(60)]
    days[::9] = [""] * len(days[::9])
    encoder = make(write(tmp_path / "t.csv", numbers(day=days)), dates="day").encoder
    assert encoder.width == 1 + 8
    found = encoder.encode_rows([{"x": 0, "day": "2024-03-04T06:00:00"}, {"x": 0, "day": None}])[:, 1:]
    np.testing.assert_allclose(found[0, 3:], [0, 1, 1, 0, 0], atol=1e-12)  # a Monday, six o'clock, there
    np.testing.assert_allclose(found[1], [0] * 7 + [1])


def test_dates_that_may_be_of_two_kinds_are_refused(tmp_path):
    days = [f"{1 + i % 12:02}/{1 + i % 9:02}/2024" for i in range(60)]
    with pytest.raises(UsageError, match="may be day/month/year or month/day/year: write year-month-day"):
        make(write(tmp_path / "t.csv", numbers(day=days)), dates="day").data_digest()


# ---- categories


def test_codes_are_categories_where_the_user_says_so(tmp_path):
    codes = [(10115, 20095, 80331)[i % 3] for i in range(60)]
    path = write(tmp_path / "t.csv", numbers(code=codes))
    encoder = make(path, categorical="code").encoder
    assert encoder.columns[1].categories == ["10115", "20095", "80331"]
    found = encoder.encode_rows([{"x": 0, "code": value} for value in ("20095", 20095, 20095.0, 99999)])
    assert found[:, 1:].tolist() == [[0, 1, 0]] * 3 + [[0, 0, 0]]
    assert make(path).encoder.width == 2


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A file of 60 shops whose target is their own, 70 users whose target is not, and classes of shops."""
    draw = np.random.default_rng(1)
    shop, user = draw.integers(0, 60, 900), draw.integers(0, 300, 900)
    y = draw.normal(size=60)[shop] + 0.1 * draw.normal(size=900)
    names = np.array(["low", "mid", "high"])[np.digitize(y, [-0.4, 0.4])]
    columns = {"shop": [f"s{s}" for s in shop], "user": [f"u{u}" for u in user]}
    return write(tmp_path_factory.mktemp("many") / "t.csv", columns | {"y": y.tolist(), "c": names.tolist()})


@pytest.mark.parametrize(("target", "left"), [("y", "c"), ("c", "y")])
def test_many_categories_have_the_means_of_scikit_learn(target, left, many):
    made = make(many, target, categorical="shop,user", drop=left)
    rows, test = made.rows["train"], made.rows["test"]
    cells_ = np.array([c.values for c in made.inputs], object).T
    aims = made.own_data("train")[1].double().numpy().ravel()
    kind = "continuous" if target == "y" else "multiclass"
    truth = TargetEncoder(target_type=kind).fit(cells_[rows], aims)
    np.testing.assert_allclose(made.own_data("test")[0], truth.transform(cells_[test]), atol=1e-5)
    unseen = made.encoder.encode_rows([{"shop": "new", "user": None}])[0]
    np.testing.assert_allclose(unseen, np.tile(truth.target_mean_, 2), atol=1e-6)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_a_weight_of_two_is_the_row_twice_in_means_of_categories_and_in_dates(kind):
    """Negative control: without weights something else is learned."""
    draw = np.random.default_rng(0)
    columns_ = [
        columns.column("shop", [f"s{i}" for i in draw.integers(0, 60, 200)], "category"),
        columns.column("day", [f"20{i:02}-03-04" for i in draw.integers(10, 30, 200)], "date"),
    ]
    targets = draw.normal(size=200).round(3) if kind == "regression" else draw.choice(["a", "b", "c"], 200)
    target, rows = columns.column("y", targets.tolist()), np.arange(200)
    weights = draw.integers(1, 4, 200)
    learned = learning.fit(columns_, target, kind, rows, weights)
    twice = learning.fit(columns_, target, kind, np.repeat(rows, weights))
    once = learning.fit(columns_, target, kind, rows)
    values = {c.name: c.values for c in columns_}
    np.testing.assert_allclose(learned.encode(values), twice.encode(values), atol=1e-12)
    assert (np.abs(learned.encode(values) - once.encode(values)).max(0) > 1e-3)[[0, -5]].all()


def test_no_row_sees_its_own_target_in_its_category(many):
    """Users tell nothing. Cheat: means with the row's own target correlate with it, and not in test rows."""
    made = make(many, categorical="shop,user", drop="c")
    (inputs, targets), rows = made.own_data("train"), made.rows["train"]

    def correlation(column):
        return np.corrcoef(column, targets[:, 0])[0, 1]

    values = {c.name: [c.values[row] for row in rows] for c in made.inputs}
    cheating = made.encoder.encode(values)
    assert correlation(inputs[:, 0]) > 0.9
    assert abs(correlation(inputs[:, 1])) < 0.15  # of 720 rows the standard deviation is 0.04
    assert correlation(cheating[:, 1]) > 0.4


SPLITS = {
    "random": {},
    "group": {"group": "g"},
    "time": {"time": "t", "dates": "t"},
    "kept aside": {"validation": 0.2},
    "group kept aside": {"group": "g", "validation": 0.2},
    "time kept aside": {"time": "t", "dates": "t", "validation": 0.2},
}


def leaky(folder, changed=(), name="a.csv"):
    """A file of every kind of column; of `changed` rows targets, numbers and categories are others."""
    draw = np.random.default_rng(2)
    rows, change = 300, np.isin(np.arange(300), changed)
    columns = {
        "x": np.where(change, 1e3, draw.normal(size=rows)).round(5).tolist(),
        "c": np.where(change, "new", draw.choice(["a", "b"], rows)).tolist(),
        "m": np.where(change, "other", [f"m{i}" for i in draw.integers(0, 80, rows)]).tolist(),
        "g": [f"g{i}" for i in draw.integers(0, 40, rows)],
        "t": [
            f"20{10 + i // 28 // 12:02}-{1 + i // 28 % 12:02}-{1 + i % 28:02}"
            for i in draw.integers(0, 600, rows)
        ],
        "y": np.where(change, -1e3, draw.normal(size=rows)).round(5).tolist(),
    }
    return write(folder / name, columns)


@pytest.mark.parametrize("split", SPLITS)
def test_nothing_of_a_row_that_is_not_trained_on_reaches_training(split, tmp_path):
    """Its cells and target may be anything: what is learned stays. Cheat: those of a training row."""
    settings = SPLITS[split] | {"categorical": "m", "drop": None if "group" in split else "g"}
    if "t" not in settings.get("dates", ""):
        settings |= {"drop": ",".join(filter(None, (settings["drop"], "t")))}
    first = make(leaky(tmp_path), **settings)
    beyond = np.concatenate([first.rows["test"], first.rows["val"]])
    again = make(leaky(tmp_path, beyond, "b.csv"), **settings)
    assert again.encoder == first.encoder
    assert all(map(torch.equal, again.own_data("train"), first.own_data("train")))
    cheat = make(leaky(tmp_path, first.rows["train"][:1], "c.csv"), **settings)
    assert cheat.encoder != first.encoder


@pytest.mark.parametrize("split", SPLITS)
def test_groups_and_times_stay_on_one_side(split, tmp_path):
    """No row is twice, groups are whole, later parts later. Cheat: a random split breaks both."""
    made = make(
        leaky(tmp_path),
        **SPLITS[split],
        categorical="m",
        **({} if "dates" in SPLITS[split] else {"drop": "t"}),
    )
    rows = made.rows
    assert sorted(np.concatenate(list(rows.values()))) == list(range(300))
    assert 30 <= len(rows["test"]) <= 60
    assert bool(len(rows["val"])) == ("aside" in split)
    table = cells.read(tmp_path / "a.csv")
    parts = [part for part in ("train", "val", "test") if len(rows[part])]
    for one, other in pairwise(parts):
        of_group, of_time = ([{table[c][i] for i in rows[part]} for part in (one, other)] for c in "gt")
        assert bool(of_group[0] & of_group[1]) == ("group" not in split)
        assert (max(of_time[0]) < min(of_time[1])) == ("time" in split)


def test_equal_times_stay_together_and_numbers_are_times_too():
    times = np.array([3, 1, 2, 3, 3, 1, 2, 2, 1, 2])
    assert np.flatnonzero(own.latest(times, 0.3)).tolist() == [0, 3, 4]
    assert np.flatnonzero(own.latest(times, 0.2)).tolist() == [0, 3, 4]  # as few as there can be
    assert own.latest(np.array([1, 2, 2, 2]), 0.2).tolist() == [False, True, True, True]


def test_a_column_may_say_validation_too(tmp_path):
    said = (["train"] * 4 + ["validation", "test"]) * 10
    rows = make(write(tmp_path / "t.csv", numbers(p=said)), split_column="p").rows
    assert rows["val"].tolist() == list(range(4, 60, 6))
    assert rows["test"].tolist() == list(range(5, 60, 6))


# ---- remarks


def test_columns_that_tell_the_target_or_number_the_rows_are_noted(tmp_path):
    columns = numbers(id=range(7, 67), c=["a", "b"] * 30, one=["z"] * 60, noisy=np.arange(60) ** 2)
    columns["inches"] = [round(2.54 * y + 1, 9) for y in columns["y"]]
    columns["code"] = [{"a": 4, "b": 9}[c] for c in columns["c"]]
    path = write(tmp_path / "t.csv", columns)
    said = make(path).notes()["notes.txt"]
    assert (
        "the target in other words, so that nothing else is learned: inches (--task.drop leaves out)" in said
    )
    assert "a number of the row, which new rows continue: id (--task.drop" in said
    assert "the same in every training row, which teaches nothing, and not looked at: one" in said
    assert "so that nothing else is learned: code (" in make(path, "c").notes()["notes.txt"]


# ---- large tables


def test_large_tables_have_larger_batches_and_stop_early(tmp_path):
    """From 10,000 rows on that are not held out; below nothing changes."""
    rows = round(LARGE / 0.8)
    path = write(tmp_path / "t.csv", numbers(rows))
    made = make(path)
    assert [len(made.rows[part]) for part in ("train", "val", "test")] == [9000, 1000, 2500]
    budget = made.budget
    assert (budget.epochs, budget.batch_size, budget.patience) == (100, 128, 5)
    assert make(path, validation=0).budget.patience is None
    assert make(path, batch_size=None, epochs=7).budget.batch_size is None
    below = make(write(tmp_path / "s.csv", numbers(rows - 2)))
    assert (below.budget.epochs, below.budget.batch_size, below.budget.patience) == (40, 32, None)
    assert below.problem().val is None
    stops = make(tmp_path / "s.csv", patience=3)
    assert stops.budget.patience == 3
    assert len(stops.rows["val"]) == 1000


def test_one_lookup_finds_a_category_among_many():
    """As many cells as categories, none of which is among them: the time of a table, not of its square."""
    find = cells.among([f"c{i}" for i in range(20_000)])
    assert [find(f"d{i}") for i in range(20_000)][-1] == "str d19999"
