"""Cells mean the same wherever they come from, and a class is its exact text or integer: laws over both."""

import csv
import json
import warnings
from collections import namedtuple
from datetime import date, datetime
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import cells, encoding
from bench.errors import UsageError
from bench.tasks.own_table import OwnTable, Settings

pandas = pytest.importorskip("pandas")
FEW = settings(max_examples=40, deadline=None, derandomize=True)


def write(path, columns):
    """Writes columns as CSV, as Python prints them; returns the path."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(columns)
        lines.writerows(zip(*columns.values(), strict=True))
    return path


def task(path, target="t", **values):
    return OwnTable(Settings(file=str(path), target=target, **values))


# ---- the identity of a class

CODES = st.one_of(
    st.integers(10**6, 10**6 + 20).map(str),
    st.integers(-(10**30), 10**30).map(str),
    st.integers(2**53, 2**53 + 9).map(str),
    st.dates(date(2020, 1, 1), date(2020, 2, 1)).map(lambda d: d.strftime("%Y%m%d")),
    st.integers(0, 99).map(lambda v: f"{v:05d}"),
    st.sampled_from(["1e3", "1000", "12e4", "120000", "0.10", "0.1", "-0.5", "1_0", "a b", "True", "true"]),
)


@FEW
@given(st.lists(CODES, min_size=2, max_size=12, unique=True))
def test_every_code_is_a_class_of_its_own_and_keeps_its_name(tmp_path_factory, codes):
    """From the file to the classes and back; Python's own strings are the truth."""
    rows = [codes[i % len(codes)] for i in range(max(20, 5 * len(codes)))]
    path = write(tmp_path_factory.mktemp("codes") / "t.csv", {"x": range(len(rows)), "t": rows})
    made = task(path, kind="classification", split_column=None)
    assert sorted(made.encoder.target.classes) == sorted(codes)
    for part in ("train", "test"):
        found = [made.encoder.target.classes[i] for i in made.own_data(part)[1]]
        assert found == [rows[row] for row in made.rows[part]]


def test_codes_of_seven_digits_stay_apart_and_lose_their_score(tmp_path):
    """Negative control: as six digits, which is what they were written with, they are one."""
    codes = [1234561, 1234562, 1234563]
    path = write(tmp_path / "t.csv", {"x": range(30), "t": codes * 10})
    assert task(path).encoder.target.classes == list(map(str, codes))
    assert len({f"{code:g}" for code in codes}) == 1


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["2.0", "10.0"], ["2", "10"]),
        (["1", "1.0", "+1", "2"], ["1", "2"]),
        (["7", "007"], ["007", "7"]),
        (["-3", "20", "-20"], ["-20", "-3", "20"]),
        (["1.5", "1", "10"], ["1", "1.5", "10"]),
        ([9007199254740993, 9007199254740992], ["9007199254740992", "9007199254740993"]),
    ],
)
def test_names_of_classes_and_their_order(given, names, tmp_path):
    path = write(tmp_path / "t.csv", {"x": range(24), "t": (given * 24)[:24]})
    assert task(path, kind="classification").encoder.target.classes == names


def test_classes_of_parquet_have_the_names_of_csv(tmp_path):
    """Integers beyond 2^53 and whole numbers of floating point."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, values in {"big": [2**60 + 1, 2**60 + 2] * 10, "float": [1.0, None, 3.0, 1e22] * 8}.items():
        table = pyarrow.table({"x": list(range(len(values))), "t": values})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    big, floats = (task(tmp_path / f"{n}.parquet", kind="classification").encoder for n in ("big", "float"))
    assert big.target.classes == [str(2**60 + 1), str(2**60 + 2)]
    assert floats.target.classes == ["1", "3", "1" + "0" * 22]


# ---- one row, many origins

COLUMNS = {
    "flag": ["true", "false", "", "true"],
    "code": ["1", "2", "x", "2"],
    "word": ["None", "none", " a b ", "NA"],
    "day": ["2024-03-01", "never", "2024-03-02", ""],
    "whole": ["3", "4", "5", ""],
    "real": ["0.5", "-2.25", "1e-3", "7"],
}
ROWS = 24


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A file with a column of every kind, and what encodes it."""
    columns = {name: (values * ROWS)[:ROWS] for name, values in COLUMNS.items()}
    path = write(tmp_path_factory.mktemp("table") / "t.csv", columns | {"t": range(ROWS)})
    return path, task(path, kind="regression").encoder


def test_every_origin_of_the_file_is_encoded_as_the_file(table):
    """To the last bit: pandas, its rows, Series, named tuples and records, csv.DictReader and JSON."""
    path, encoder = table
    expected = encoder.encode_rows(path)
    frame = pandas.read_csv(path)
    with path.open(newline="", encoding="utf-8") as file:
        reader = list(csv.DictReader(file))
    origins = {
        "frame": frame,
        "records": frame.to_dict("records"),
        "nullable": frame.convert_dtypes(),
        "categorical": frame.astype({n: "category" for n in frame if n != "t"}),
        "series": [row for _, row in frame.iterrows()],
        "tuples": list(frame.itertuples()),
        "structured": frame.to_records(index=False),
        "objects": frame.astype(object),
        "DictReader": reader,
        "JSON": json.loads(frame.to_json(orient="records")),
        "generator": (row for row in reader),
        "path as text": str(path),
    }
    for name, rows in origins.items():
        assert np.array_equal(encoder.encode_rows(rows), expected), name
    assert len(np.unique(expected, axis=0)) == 4


def test_polars_is_taken_as_it_is(table):
    path, encoder = table
    expected = encoder.encode_rows(path)
    polars = pytest.importorskip("polars", reason="polars is not installed")
    frame = polars.read_csv(path)
    lazy = polars.scan_csv(path, infer_schema=False).collect()  # every cell as text
    for rows in (frame, frame.to_dicts(), frame.iter_rows(named=True), lazy):
        assert np.array_equal(encoder.encode_rows(rows), expected)
    categories = frame.with_columns(polars.col(polars.String).cast(polars.Categorical))
    assert np.array_equal(encoder.encode_rows(categories), expected)


def test_arrow_is_taken_as_it_is(table):
    path, encoder = table
    expected = encoder.encode_rows(path)
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    arrow = pyarrow.Table.from_pandas(pandas.read_csv(path))
    parquet.write_table(arrow, path.with_suffix(".parquet"))
    for rows in (arrow, path.with_suffix(".parquet"), pandas.read_parquet(path.with_suffix(".parquet"))):
        assert np.array_equal(encoder.encode_rows(rows), expected)


FORMS = {
    "flag": {
        "true": [True, np.True_, "true", "TRUE", " true ", 1, 1.0, b"true", np.str_("true")],
        "false": [False, np.False_, "False", 0, Decimal(0)],
    },
    "code": {
        "1": [1, 1.0, np.int8(1), np.float32(1), Decimal("1.0"), True, "1", " 1", "1.0", np.array(1)],
        "x": ["x", "x ", np.str_("x")],
    },
    "day": {
        "2024-03-01": [
            date(2024, 3, 1),
            datetime(2024, 3, 1),
            np.datetime64("2024-03-01"),
            np.datetime64("2024-03-01T00:00:00.000000000"),
            pandas.Timestamp("2024-03-01"),
            "2024-03-01",
            "2024-03-01 00:00:00",
            "2024-03-01T00:00",
        ],
    },
    "whole": {"3": [3, 3.0, "3", "3.0", " 3 ", Decimal(3), np.uint16(3), np.float16(3), "0.3e1"]},
    "real": {"-2.25": [-2.25, "-225e-2", Decimal("-2.25"), np.float32(-2.25), "-2.250"]},
}
MISSING = [
    *(None, "", " ", "NA", "nan", "NaN", "null", "<NA>", "#N/A", "None", float("nan")),
    *(np.nan, np.float32("nan"), pandas.NA, pandas.NaT, np.datetime64("NaT"), Decimal("NaN"), np.ma.masked),
]
PLAIN = {"flag": "true", "code": "2", "word": "none", "day": "never", "whole": "4", "real": "0.5"}


@FEW
@given(st.data())
def test_every_form_of_a_value_is_the_value(table, data):
    """A random form of a random value in every column; the text of the file is the truth."""
    written, formed = dict(PLAIN), dict(PLAIN)
    for name in PLAIN:
        forms = {**FORMS.get(name, {}), "": MISSING}
        written[name] = data.draw(st.sampled_from(list(forms)))
        formed[name] = data.draw(st.sampled_from(forms[written[name]]))
    encoder = table[1]
    assert np.array_equal(encoder.encode_rows([formed]), encoder.encode_rows([written])), formed


@pytest.mark.parametrize("name", PLAIN)
def test_every_form_by_itself_and_other_values_differ(table, name):
    """Negative control: the values of a column are encoded differently."""
    encoder = table[1]
    seen = set()
    for written, forms in {**FORMS.get(name, {}), "": MISSING}.items():
        expected = encoder.encode_rows([PLAIN | {name: written}])
        for form in forms:
            assert np.array_equal(encoder.encode_rows([PLAIN | {name: form}]), expected), (name, form)
        seen.add(expected.tobytes())
    assert len(seen) == 1 + len(FORMS.get(name, {}))


def test_a_category_that_is_new_stays_none_of_theirs(table):
    """As text, number or date: nothing near is taken for it."""
    encoder = table[1]
    columns = [c.name for c in encoder.columns]
    widths = [len(c.mean) if isinstance(c, encoding.Numbers) else len(c.categories) for c in encoder.columns]
    start = sum(widths[: columns.index("code")])
    for value in ("3", 3, 1.5, "1.5", date(2024, 3, 1), "X", True + 1.0001, "01x"):
        found = encoder.encode_rows([PLAIN | {"code": value}])[0]
        assert not found[start : start + widths[columns.index("code")]].any(), value


@pytest.mark.parametrize(
    ("categories", "value", "said"),
    [
        (["7", "007", "x"], 7, "holds 7, which may be '7' and '007': write it as text"),
        (["1.1", "1.10", "x"], 1.1, "which may be '1.1' and '1.10'"),
        (["true", "True", "x"], True, "which may be 'true' and 'True'"),
        (["x"], [1, 2], "must be one value a row, not a list"),
        (["x"], {"a": 1}, "must be one value a row, not a dict"),
        (["x"], np.arange(2), "must be one value a row, not a ndarray"),
    ],
)
def test_what_may_be_several_categories_is_refused(categories, value, said):
    find = cells.among(categories)
    with pytest.raises(ValueError, match=said):
        find(value)
    assert [find(category) for category in categories] == categories


def test_versions_as_text_are_not_numbers():
    """1.1 is not 1.10, and 007 is not 7, where both sides are text."""
    find = cells.among(["1.10", "007", "x"])
    assert find("1.1") not in {"1.10", "007", "x"}
    assert find("7") not in {"1.10", "007", "x"}
    assert (find(7), find(1.1)) == ("007", "1.10")


def test_integers_beyond_two_to_53_are_exact():
    big = [str(2**53), str(2**53 + 1), "x"]
    find = cells.among(big)
    assert [find(int(value)) for value in big[:2]] == big[:2]
    with pytest.raises(ValueError, match="may be"):
        find(float(2**53))


Row = namedtuple("Row", "x")
REFUSED = [
    ({"x": 1}, r"a single row stands in a list, \[row\]"),
    (np.ones((3, 2)), "an array without names does not say which column is which"),
    ([[1, 2]], "must be dictionaries from column to value"),
    (7, "must be dictionaries from column to value"),
    ([{"x": 1, None: ["more"]}], "row 1 has more cells than there are names"),
    ([{"x": 1, " x": 2}], "two columns are named 'x'"),
    (pandas.DataFrame([[1, 2]], columns=["x", "x"]), "two columns are named 'x'"),
    (pandas.DataFrame({"x": []}), "there are no rows"),
    ([Row(date(2024, 1, 1))], "'x' must be a number, not '2024-01-01'"),
    ([Row(10**400)], "'x' must be a number"),
    ([Row(np.inf)], "'x' must be a number, not 'inf'"),
    ([Row(1 + 2j)], "'x' must be one value a row, not a complex"),
    ([Row([1])], "'x' must be one value a row, not a list"),
    ([Row(1e300)], "column 'x' holds 1e.300, more than 1e.12 standard deviations"),
]


@pytest.mark.parametrize(("rows", "said"), REFUSED)
def test_rows_that_cannot_be_are_refused_in_one_line(rows, said, tmp_path):
    path = write(tmp_path / "t.csv", {"x": range(24), "t": range(24)})
    with pytest.raises(UsageError, match=said) as caught:
        task(path, kind="regression").encoder.encode_rows(rows)
    assert "\n" not in str(caught.value)


def test_names_are_compared_without_blanks(tmp_path):
    """`x, t` in the first line: pandas and csv.DictReader keep the blank, the file's own reading does not."""
    path = tmp_path / "t.csv"
    path.write_text("a, x, t\n" + "".join(f"{i % 3},{i},{i}\n" for i in range(24)))
    encoder = task(path, kind="regression").encoder
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for found in (rows, pandas.read_csv(path)):
        assert np.array_equal(encoder.encode_rows(found), encoder.encode_rows(path))


# ---- numbers that cannot be standardised


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("t", [1e-200, 2e-200], "the target 't' differs too little from row to row to be standardised"),
        ("t", [5e-324, 1e-323], "the target 't' differs too little"),
        ("t", [1e-160, 2e-160], "the target 't' differs too little"),
        ("t", [1e200, -1e200], "the target 't' holds numbers too large"),
        ("x", [1e-200, 2e-200], "column 'x' differs too little from row to row beside the size"),
        ("x", [1e17, 1e17 + 16], "column 'x' differs too little from row to row beside the size"),
        ("x", [1e200, -1e200], "column 'x' holds numbers too large"),
    ],
)
def test_what_leaves_no_standard_deviation_is_refused_before_training(column, values, said, tmp_path):
    columns = {"x": range(24), "t": range(24)} | {column: values * 12}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(UsageError, match=said):
            task(write(tmp_path / "t.csv", columns), kind="regression").data_digest()


def test_small_numbers_that_can_be_standardised_are(tmp_path):
    """Negative control, against numpy: a unit of 1e-100 changes no input and no standardised target."""
    x = np.random.default_rng(0).normal(size=40)
    small = write(tmp_path / "s.csv", {"x": 1e-100 * x, "t": 1e-100 * x**2})
    made = task(small, kind="regression")
    rows = made.rows["train"]
    standard = (x[rows] - x[rows].mean()) / x[rows].std()
    np.testing.assert_allclose(made.own_data("train")[0][:, 0], standard, rtol=1e-5, atol=1e-6)
