"""A table of one's own: what encodes it, which rows are held out, what is refused, what predicts new rows."""

import csv
import json
import math
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from given import PENGUINS
from scipy.stats import norm
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_diabetes, load_iris
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import bench
from bench import cells, cli, encoding
from bench.contract import Undefined
from bench.errors import UsageError
from bench.runs import registry
from bench.runs.records import read_curves, read_record
from bench.runs.runner import load_scores
from bench.studies import normals, own
from bench.tasks.own_table import OwnTable, Settings


def make(file=PENGUINS, target="body_mass_g", **values):
    """The task on a file."""
    return OwnTable(Settings(file=str(file), target=target, **values))


def write(path, columns):
    """Writes columns as CSV; returns the path."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(columns)
        lines.writerows(zip(*columns.values(), strict=True))
    return path


def table(rows=40, **columns):
    """A number x, its double y, and further columns; a column None is left out."""
    x = [i * 0.5 for i in range(rows)]
    found = {"x": x, "y": [2 * v + 1 for v in x]} | columns
    return {name: values for name, values in found.items() if values is not None}


# ---- encoding


def of_sklearn(task, fitted_on, rows):
    """The matrix of scikit-learn's transformers, fitted on these rows: column after column."""
    inputs = task.inputs
    frame = np.empty((len(task.target_column.values), len(inputs)), object)
    for k, column in enumerate(inputs):
        missing = np.nan if column.is_number else None
        frame[:, k] = [missing if value is None else value for value in column.values]
    numbers = make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler())
    categories = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    parts = [(c.name, numbers if c.is_number else categories, [k]) for k, c in enumerate(inputs)]
    return ColumnTransformer(parts).fit(frame[fitted_on]).transform(frame[rows]).astype(np.float64)


@pytest.mark.parametrize("target", ["body_mass_g", "species", "sex"])
def test_inputs_are_those_of_scikit_learn_fitted_on_the_training_rows(target, tmp_path):
    """From the stored file too; negative control: fitted on all rows they are others."""
    task = make(holes(tmp_path), target)
    rows = task.rows["test"]
    expected = of_sklearn(task, task.rows["train"], rows)
    cheating = of_sklearn(task, np.arange(len(task.target_column.values)), rows)
    path = tmp_path / "encoder.json"
    path.write_text(task.notes()["encoder.json"])
    values = {c.name: [c.values[row] for row in rows] for c in task.inputs}
    for encoder in (task.encoder, own.read_encoder(tmp_path, encoding.Encoder)):
        found = encoder.encode(values)
        assert found.shape == (len(rows), encoder.width)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        assert np.abs(found - cheating).max() > 1e-3
    torch.testing.assert_close(task.own_data("test")[0], torch.from_numpy(expected).float())


def holes(folder):
    """The penguins with every seventh flipper missing."""
    columns = cells.read(PENGUINS)
    flippers = columns["flipper_length_mm"]
    columns["flipper_length_mm"] = ["?" if i % 7 == 0 else value for i, value in enumerate(flippers)]
    return write(folder / "holes.csv", columns)


def test_what_is_missing_or_new_is_encoded_as_said(tmp_path):
    """Median and a flag; a category of its own where training rows lack it; all 0 of a new one."""
    colours = ["red", "blue", None, "red"] * 10
    x = [None if i % 5 == 0 else float(i) for i in range(40)]
    parts = ["train"] * 30 + ["test"] * 10
    path = write(tmp_path / "t.csv", table(x=x, colour=colours, part=parts))
    encoder = make(path, "y", split_column="part").encoder
    kept = np.array([v for v in x[:30] if v is not None])
    median = float(np.median(kept))
    filled = np.array([median if v is None else v for v in x[:30]])
    rows = [
        {"x": "NA", "colour": ""},
        {"x": 4, "colour": "green", "more": 1},
        {"x": np.nan, "colour": "blue"},
    ]
    found = encoder.encode_rows(rows)
    share = 6 / 30
    flags = [(f - share) / math.sqrt(share * (1 - share)) for f in (1, 0, 1)]
    first = [(v - filled.mean()) / filled.std() for v in (median, 4, median)]
    ones = [[0, 0, 1], [0, 0, 0], [1, 0, 0]]  # blue, red, missing
    np.testing.assert_allclose(found, np.column_stack([first, flags, ones]))


def test_cells_of_every_origin_are_alike(tmp_path):
    """A number as text, as float, as numpy has it; semicolons and tabs; a byte order mark."""
    expected = make(write(tmp_path / "a.csv", table(colour=["a", "b"] * 20)), "y")
    for name, delimiter in (("b.csv", ";"), ("c.csv", "\t")):
        content = (tmp_path / "a.csv").read_text().replace(",", delimiter)
        (tmp_path / name).write_text("\ufeff" + content, encoding="utf-8")
        assert make(tmp_path / name, "y").data_digest() == expected.data_digest()
    rows = [{"x": value, "colour": "a"} for value in ("0.5", 0.5, np.float32(0.5), " 5e-1 ")]
    assert len(np.unique(expected.encoder.encode_rows(rows), axis=0)) == 1


# ---- which rows are held out


def test_a_fifth_is_held_out_at_random_whatever_the_seed_of_the_fit():
    first, again, other = (make(split=split).rows["test"] for split in (0, 0, 1))
    assert np.array_equal(first, again)
    assert len(first) == round(0.2 * 342)
    assert len(np.intersect1d(first, other)) < 30
    rows = make().rows
    assert sorted(np.concatenate([rows["train"], rows["test"]])) == list(range(342))


def test_of_every_class_the_same_share_is_held_out():
    task = make(target="species")
    labels = task.own_data("test")[1]
    assert torch.bincount(labels).tolist() == [round(0.2 * n) for n in (152, 68, 124)]
    assert task.encoder.target.classes == ["Adelie", "Chinstrap", "Gentoo"]


def test_groups_stay_together_and_are_no_input(tmp_path):
    groups = [f"g{i % 13}" for i in range(60)]
    task = make(write(tmp_path / "t.csv", table(60, customer=groups)), "y", group="customer")
    held_out = {groups[i] for i in task.rows["test"]}
    assert not held_out & {groups[i] for i in task.rows["train"]}
    assert 5 <= len(task.rows["test"]) <= 12
    assert [column.name for column in task.inputs] == ["x"]
    other = make(tmp_path / "t.csv", "y", group="customer", split=1)
    assert {groups[i] for i in other.rows["test"]} != held_out


def test_a_column_may_say_what_is_held_out(tmp_path):
    parts = ["test" if i % 4 == 3 else "train" for i in range(40)]
    task = make(write(tmp_path / "t.csv", table(part=parts)), "y", split_column="part")
    assert task.rows["test"].tolist() == list(range(3, 40, 4))
    assert [column.name for column in task.inputs] == ["x"]


def test_rows_without_a_target_are_left_out_and_told():
    said = make().notes()["notes.txt"]
    assert "274 rows trained on, 68 held out (--task.split 0), 2 left out" in said
    assert "target body_mass_g: regression, mean 4220, sd 805.5" in said
    assert "guessed from 94 different numbers" in said
    assert "sex (female, male, missing)" in said


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 1] * 20, "classification"),
        (["no", "yes"] * 20, "classification"),
        ([1.5, 2] * 20, "regression"),
        ([i % 20 for i in range(40)], "regression"),
    ],
)
def test_the_kind_of_target_is_guessed(values, kind, tmp_path):
    path = write(tmp_path / "t.csv", table(y=values))
    assert make(path, "y").kind == kind
    if kind == "classification" and values[0] == 0:
        assert make(path, "y", kind="regression").kind == "regression"


def test_the_digest_is_of_the_content_and_not_of_the_path(tmp_path):
    copy = shutil.copy(PENGUINS, tmp_path / "copy.csv")
    digests = {make().data_digest(), make(copy).data_digest()}
    assert len(digests) == 1
    copy.write_text(copy.read_text().replace("3750", "3751"))
    digests |= {make(copy).data_digest(), make(split=1).data_digest(), make(target="year").data_digest()}
    assert len(digests) == 4


# ---- what is refused

WORDS = [f"a sentence, the {i}th" for i in range(40)]
REFUSED = {
    "five rows": (table(5), {}, "5 rows with a target are too few to learn and to test: at least 20"),
    "constant target": (table(y=[3] * 40), {}, "the target 'y' is 3 in all rows: there is nothing"),
    "no such target": (table(y=None, z=[1] * 40), {}, "--task.target y: .* has no such column; it has x, z"),
    "free text": (table(note=WORDS), {}, "column 'note' holds 40 different texts in 40 rows, such as 'a sen"),
    "dates": (table(day=[f"2024-03-{1 + i % 9:02}" for i in range(40)]), {}, "column 'day' holds dates such"),
    "infinity": (table(x=["inf", *range(39)]), {}, "column 'x' holds 'inf' in line 2"),
    "too large": (table(x=["1e999", *range(39)]), {}, "column 'x' holds '1e999' in line 2"),
    "empty column": (table(z=[""] * 40), {}, "column 'z' is empty"),
    "nothing to learn from": (table(x=None), {}, "no column but the target"),
    "a class in one row": (table(y=["a"] * 20 + ["b"] * 19 + ["c"]), {}, "the class c .* in only one row"),
    "text as a number": (
        table(y=["a", "b"] * 20),
        {"kind": "regression"},
        "holds texts, which are no numbers",
    ),
    "split neither": (table(p=["train", "later"] * 20), {"split_column": "p"}, "one says 'later'"),
    "few to test": (table(p=["test"] + ["train"] * 39), {"split_column": "p"}, "1 rows to test: at least 3"),
    "class to test alone": (
        table(y=["a"] * 16 + ["b"] * 18 + ["c"] * 6, p=["train"] * 34 + ["test"] * 6),
        {"split_column": "p"},
        "the class c is in test rows alone",
    ),
    "one group": (table(g=["a"] * 40), {"group": "g"}, "all rows are of one group"),
    "no group": (table(g=["a", ""] * 20), {"group": "g"}, "row 2 has no group"),
    "both": (table(g=["a", "b"] * 20), {"group": "g", "split_column": "g"}, "give one of them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_named_in_one_line(case, tmp_path):
    columns, values, said = REFUSED[case]
    with pytest.raises(UsageError, match=said) as caught:
        make(write(tmp_path / "t.csv", columns), "y", **values).data_digest()
    assert "\n" not in str(caught.value)


FILES = {
    "two columns are named 'x'": b"x,y,x\n1,2,3\n",
    "column 2 has no name": b"x,,y\n1,2,3\n",
    "line 3 has 2 cells, and the first line names 3": b"x,y,z\n1,2,3\n1,2\n",
    "is no text in UTF-8": b"x,y\n\xff\xfe,2\n",
    "holds no rows below a line of names": b"x,y\n",
    "holds no rows": b"",
}


@pytest.mark.parametrize("said", FILES)
def test_a_file_that_is_no_table_is_refused_in_one_line(said, tmp_path, capsys):
    (tmp_path / "t.csv").write_bytes(FILES[said])
    words = ["run", "map", "own_table", "--task.file", str(tmp_path / "t.csv"), "--task.target", "y"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1


def test_a_file_that_is_not_there_or_not_given_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"none.csv: cannot be read: No such file"):
        make(tmp_path / "none.csv").data_digest()
    with pytest.raises(
        UsageError, match=r"own_table needs a table: --task.file FILE.csv --task.target COLUMN"
    ):
        OwnTable(Settings()).data_digest()


def test_parquet_is_read_as_csv_is_or_refused_in_one_line(tmp_path):
    columns = {"x": [0.5 * i for i in range(40)], "y": [i % 3 for i in range(40)], "z": ["a", None] * 20}
    expected = make(write(tmp_path / "t.csv", columns), "y").data_digest()
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        with pytest.raises(UsageError, match=r"Parquet needs pip install 'posterior-bench\[parquet\]'"):
            make(tmp_path / "t.parquet", "y").data_digest()
        return
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    assert make(tmp_path / "t.parquet", "y").data_digest() == expected


# ---- scores, by hand


def test_scores_of_a_number_are_in_its_unit():
    """Standardised N(0.5, 4) with centre 10 and scale 3 is N(11.5, 36)."""
    arrays = {
        "mean": np.array([[0.5, 0.5]], np.float16),
        "variance": np.array([[4.0]], np.float32),
        "centre_and_scale": np.array([10.0, 3.0]),
        "targets": np.array([11.5, 17.5]),
    }
    task = make()
    scores = task.score(arrays)
    assert scores["nll"] == pytest.approx(-norm.logpdf([0, 6], 0, 6).mean())
    np.testing.assert_allclose(task.losses(arrays), -norm.logpdf([0, 6], 0, 6))
    assert scores["rmse"] == pytest.approx(math.sqrt(18))
    assert scores["coverage_error"] == pytest.approx(0.1)
    assert scores["accuracy"] == Undefined("the target is a number")


def test_scores_of_classes():
    log_probs = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]])).astype(np.float16)
    scores = make(target="species").score({"log_probs": log_probs, "labels": np.array([0, 2])})
    assert scores["nll"] == pytest.approx((math.log(2) + math.log(4)) / 2, rel=1e-3)
    assert scores["accuracy"] == 0.5
    assert scores["brier"] == pytest.approx((0.375 + 0.875) / 2, rel=1e-3)
    assert scores["rmse"] == Undefined("the target is a class")


# ---- from a run to a predictor


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of two methods with three seeds, and of classes; the file is gone by now."""
    folder = tmp_path_factory.mktemp("own")
    path = shutil.copy(PENGUINS, folder / "penguins.csv")
    done = {}
    for method, target, seed in (
        *((method, "body_mass_g", seed) for method in ("map", "mfvi") for seed in (0, 1, 2)),
        ("mfvi", "species", 0),
    ):
        settings = {"file": str(path), "target": target, "epochs": 5}
        run = bench.run(method, "own_table", seed=seed, task_settings=settings, out=folder / target)
        done[method, target, seed] = run.directory
    path.unlink()
    return folder, done


def rows_of(task):
    """The held-out rows as dictionaries."""
    return [{c.name: c.values[row] for c in (*task.inputs, task.target_column)} for row in task.rows["test"]]


def test_a_loaded_run_predicts_what_it_predicted(runs):
    """By map, which draws nothing: the stored means, in the target's unit; from dictionaries and a file."""
    task, directory = make(), runs[1]["map", "body_mass_g", 0]
    found = bench.load(directory).predict(rows_of(task))
    _, arrays = load_scores(directory)
    mean, sigma = normals.mixtures(arrays)
    np.testing.assert_allclose([row["mean"] for row in found], mean[0], rtol=1e-6)  # of 11 bits: 2e-4
    np.testing.assert_allclose([row["sd"] for row in found], sigma[0, 0], rtol=1e-5)
    width = norm.ppf(0.95) * sigma[0, 0]
    np.testing.assert_allclose([row["high"] - row["mean"] for row in found], width, rtol=1e-4)
    path = write(runs[0] / "new.csv", {k: [r[k] for r in rows_of(task)] for k in rows_of(task)[0]})
    assert bench.load(directory).predict(path) == found


def test_a_data_frame_predicts_what_its_file_predicts(runs):
    """Taken as it is and as its rows, to the last bit; missing values and categories among them."""
    pandas = pytest.importorskip("pandas")
    frame, predictor = pandas.read_csv(PENGUINS), bench.load(runs[1]["mfvi", "body_mass_g", 0])
    expected = predictor.predict(PENGUINS)
    assert predictor.predict(frame) == predictor.predict(frame.to_dict("records")) == expected
    assert predictor.predict(frame.drop(columns="sex").assign(sex="other")) != expected


def test_samples_widen_a_prediction_and_depend_on_the_seed_alone(runs):
    predictor = bench.load(runs[1]["mfvi", "body_mass_g", 0])
    first = predictor.predict(rows_of(make())[:3], num_samples=50)
    assert predictor.predict(rows_of(make())[:2], num_samples=50) == first[:2]
    assert predictor.predict(rows_of(make())[:3], num_samples=50, seed=1) != first
    noise = predictor.encoder.target.scale * math.exp(predictor.method.likelihood.log_sigma.item())
    assert all(row["sd"] > noise and row["low"] < row["mean"] < row["high"] for row in first)


def test_a_share_of_rows_is_left_to_somebody_else(runs):
    """Those of largest sd, or least largest probability; the other numbers are what they are without it."""
    for target, score in (
        ("body_mass_g", lambda row: -row["sd"]),
        ("species", lambda row: max(row["probabilities"].values())),
    ):
        rows, predictor = rows_of(make(target=target)), bench.load(runs[1]["mfvi", target, 0])
        plain, found = predictor.predict(rows), predictor.predict(rows, abstain=0.25)
        left = [row.pop("abstained") for row in found]
        assert found == plain
        assert sum(left) == len(rows) // 4
        kept = [score(row) for row, is_left in zip(plain, left, strict=True) if not is_left]
        assert max(score(row) for row, is_left in zip(plain, left, strict=True) if is_left) <= min(kept)
    with pytest.raises(UsageError, match="from 0 to below 1"):
        predictor.predict(rows, abstain=25)


def test_the_report_has_calibration_and_risk_by_the_rows_kept(runs, tmp_path):
    """Of a number and of classes: what the curves say at 100% is the metric."""
    for target, metric, curve in (("body_mass_g", "rmse", "risk, rmse"), ("species", None, "risk, error")):
        directory = runs[1]["mfvi", target, 0]
        record, rows = read_record(directory).metrics, read_curves(directory)
        (last,) = [row.value for row in rows if (row.curve, row.x) == (curve, 100)]
        expected = record[metric] if metric else 1 - record["accuracy"]
        assert last == pytest.approx(expected, rel=1e-6)
        cli.main(["report", str(directory), "--to", str(tmp_path / f"{target}.html")])
        page = (tmp_path / f"{target}.html").read_text()
        assert curve in page
        drawn = ("coverage", "pit", "risk") if metric else ("calibration", "risk")
        assert page.count("data:image/svg+xml") == len(drawn)


def test_classes_are_predicted_by_their_names(runs):
    task = make(target="species")
    predictor = bench.load(runs[1]["mfvi", "species", 0])
    (row,) = predictor.predict(rows_of(task)[:1])
    assert row["probabilities"].keys() == {"Adelie", "Chinstrap", "Gentoo"}
    assert sum(row["probabilities"].values()) == pytest.approx(1)
    assert row["class"] == max(row["probabilities"], key=row["probabilities"].get)


@pytest.mark.parametrize(
    ("kind", "level"), [("posterior", 0.9), ("residual", 0.8), ("quantile", 0.8), ("quantile", 0.5)]
)
def test_intervals_are_calibrated_on_the_runs_held_out_rows(kind, level, runs):
    """Against the definition, from what the same predictor says of these rows; the table is gone."""
    task, predictor = make(), bench.load(runs[1]["mfvi", "body_mass_g", 0])
    rows, targets = rows_of(task), task.own_data("test")[1].numpy()
    found = predictor.interval(rows[:9], level, kind, num_samples=20)
    assert found.shape == (9, 2)
    base = predictor.interval(rows, level, num_samples=20)
    if kind == "residual":
        means = np.array([row["mean"] for row in predictor.predict(rows, num_samples=20)])
        base = np.stack([means, means], 1)
    by = 0.0
    if kind != "posterior":
        scores = sorted(max(low - y, y - high) for (low, high), y in zip(base, targets, strict=True))
        by = scores[math.ceil((len(targets) + 1) * level) - 1]
    np.testing.assert_allclose(found, base[:9] + np.array([-by, by]), rtol=1e-5)
    if kind == "posterior":
        said = predictor.predict(rows[:9], num_samples=20)
        np.testing.assert_allclose(found, [[row["low"], row["high"]] for row in said])


def test_intervals_that_cannot_be_had_are_refused_in_one_line(runs):
    rows, predictor = rows_of(make())[:2], bench.load(runs[1]["map", "body_mass_g", 0])
    for words, said in [
        ((0.99, "quantile"), "takes at least 99 held-out rows, and the run has 68: take a smaller level"),
        ((1.0,), "level 1.0 must be above 0 and below 1"),
        (("0.9",), "level '0.9' must be above 0 and below 1"),
        ((0.9, "conformal"), "kind 'conformal' must be posterior, residual or quantile"),
    ]:
        with pytest.raises(UsageError, match=said):
            predictor.interval(rows, *words)
    predictor.held_out = None
    assert predictor.interval(rows).shape == (2, 2)
    with pytest.raises(UsageError, match="run it again with --force"):
        predictor.interval(rows, 0.9, "residual")
    with pytest.raises(UsageError, match="the target is a class"):
        bench.load(runs[1]["mfvi", "species", 0]).interval(rows_of(make(target="species"))[:1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"num_samples": 2.5}, "num_samples 2.5: must be a whole number"),
        ({"num_samples": 0}, "0 samples: at least 1 is needed"),
        ({"seed": 1.5}, "seed 1.5: must be a whole number"),
        ({"abstain": "0.1"}, "abstain '0.1': must be a share of the rows"),
        ({"abstain": math.nan}, "abstain nan: must be a share of the rows"),
    ],
)
def test_words_to_predict_that_mean_nothing_are_refused_in_one_line(words, said, runs):
    rows, predictor = rows_of(make())[:2], bench.load(runs[1]["map", "body_mass_g", 0])
    with pytest.raises(UsageError, match=said):
        predictor.predict(rows, **words)


def test_a_row_outside_all_training_rows_is_told(runs):
    """By the first of them; within them nothing is said."""
    rows, predictor = rows_of(make())[:3], bench.load(runs[1]["map", "body_mass_g", 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predictor.predict(rows)
    rows[1]["bill_depth_mm"] = 1e6
    with pytest.warns(UserWarning, match=r"row 2: column 'bill_depth_mm' lies .* \(1 such rows\)"):
        predictor.predict(rows)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row.pop("island"), "the column 'island' is missing"),
        (lambda row: row.update(year="long ago"), "the column 'year' must be a number, not 'long ago'"),
        (lambda row: row.update(year=math.inf), "the column 'year' must be a number, not 'inf'"),
    ],
)
def test_rows_that_cannot_be_encoded_are_refused_in_one_line(change, said, runs):
    rows = rows_of(make())[:2]
    change(rows[1])
    predictor = bench.load(runs[1]["map", "body_mass_g", 0])
    with pytest.raises(UsageError, match=said):
        predictor.predict(rows)
    with pytest.raises(UsageError, match="must be dictionaries from column to value"):
        predictor.predict([[1, 2]])
    with pytest.raises(UsageError, match="there are no rows"):
        predictor.predict([])


def test_a_damaged_encoder_is_refused_in_one_line(runs, tmp_path):
    directory = shutil.copytree(runs[1]["map", "body_mass_g", 0], tmp_path / "run")
    (directory / "files.json").unlink()  # as of runs from before the list, which would say it first
    content = json.loads((directory / "encoder.json").read_text())
    content["target"]["scale"] = -1.0
    (directory / "encoder.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"encoder.json is no encoder: Input should be greater than 0"):
        bench.load(directory)
    (directory / "encoder.json").unlink()
    with pytest.raises(UsageError, match=r"encoder.json: cannot be read"):
        bench.load(directory)


def test_a_changed_file_is_not_taken_for_a_finished_run(tmp_path):
    path = shutil.copy(PENGUINS, tmp_path / "penguins.csv")
    settings = {"file": str(path), "target": "body_mass_g", "epochs": 1}
    first = bench.run("map", "own_table", task_settings=settings, out=tmp_path)
    again = bench.run("map", "own_table", task_settings=settings, out=tmp_path)
    assert "holds this run" in again.notices[0]
    path.write_text(path.read_text().replace("3750", "3751"))
    with pytest.raises(UsageError, match="holds a completed run with another data"):
        bench.run("map", "own_table", task_settings=settings, out=tmp_path)
    assert first.directory == again.directory


def test_compare_says_which_posterior_with_intervals(runs, capsys):
    folder, _ = runs
    assert cli.main(["compare", str(folder / "body_mass_g")]) == 0
    told = capsys.readouterr().out
    assert "nll (nats, lower is better)" in told
    assert "your mfvi against your map" in told
    assert "differences hold all at once with 95%" in told
    assert "fresh seeds and fresh test examples" in told
    assert cli.main(["show", str(next(iter(runs[1].values())))]) == 0
    assert "numbers, standardised: bill_length_mm" in capsys.readouterr().out


# ---- tables that are embedded in scikit-learn


@pytest.mark.parametrize(("load", "target"), [(load_diabetes, "number"), (load_iris, "class")])
def test_tables_of_scikit_learn_have_a_result(load, target, tmp_path):
    """On diabetes an error below the target's standard deviation, of iris 90% right: the targets are used."""
    data = load()
    columns = dict(zip(data.feature_names, data.data.T.tolist(), strict=True)) | {"t": data.target.tolist()}
    path = write(tmp_path / "t.csv", columns)
    settings = {"file": str(path), "target": "t", "epochs": 60 if target == "number" else 200}
    metrics = bench.run("map", "own_table", task_settings=settings, out=tmp_path).record.metrics
    if target == "class":
        assert metrics["accuracy"] >= 0.9
    else:
        assert metrics["rmse"] < 0.9 * data.target.std()


def test_a_sweep_takes_the_file_as_a_setting(tmp_path):
    words = ["sweep", "--methods", "map", "--tasks", "own_table", "--seeds", "0-1", "--task.epochs", "1"]
    words += ["--task.file", str(PENGUINS), "--task.target", "species", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    assert len(list(tmp_path.rglob("record.json"))) == 2


def test_it_is_on_no_board():
    spec = registry.task("own_table").cls(Settings()).spec
    assert spec.own_data
    assert not spec.ranked


# ---- noise that differs from row to row


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A table whose noise grows with |x|, and two runs: one noise for all rows, or one for each."""
    folder, draw = tmp_path_factory.mktemp("noisy"), np.random.default_rng(0)
    x = draw.normal(size=500)
    y = 5 + 3 * np.sin(x) + (0.1 + 0.7 * np.abs(x)) * draw.normal(size=500)
    path = write(folder / "noisy.csv", {"x": x, "y": y})
    done = {}
    for noise in ("learned", "heteroscedastic"):
        settings = {"file": str(path), "target": "y", "epochs": 25, "noise": noise}
        rate = {"learning_rate": 0.02}
        run = bench.run("map", "own_table", task_settings=settings, method_settings=rate, out=folder)
        done[noise] = run.directory
    return done


def test_a_variance_head_learns_noise_that_grows(noisy):
    """It predicts better, and its widths follow the truth, conformal or not."""
    nlls = {}
    for noise, directory in noisy.items():
        task, arrays = load_scores(directory)
        nlls[noise] = task.score(arrays)["nll"]
        assert arrays["variance"].shape[-1] == (1 if noise == "learned" else 100)
    assert nlls["heteroscedastic"] < nlls["learned"] - 0.1
    predictor, rows = bench.load(noisy["heteroscedastic"]), [{"x": 0.1}, {"x": 2.0}]
    near, far = predictor.predict(rows)
    assert far["sd"] > 2 * near["sd"]
    low, high = predictor.interval(rows, 0.8, "quantile").T
    assert high[1] - low[1] > 2 * (high[0] - low[0])


def test_coverage_by_width_is_told_by_the_run_and_by_its_report(noisy, tmp_path):
    """By quarters where widths differ; where not, it says so."""
    begins = {
        "learned": "the 90% intervals are equally wide in all rows",
        "heteroscedastic": "coverage of the 90% intervals by quarters of the rows, the narrowest first: ",
    }
    for noise, directory in noisy.items():
        task, arrays = load_scores(directory)
        (remark, *_) = remarks = task.remarks(arrays)
        assert remark.startswith(begins[noise])
        assert (directory / "notes.txt").read_text().splitlines()[-len(remarks) :] == remarks
        assert cli.main(["report", str(directory), "--to", str(tmp_path / "r.html")]) == 0
        assert f"seed 0: {remark}" in (tmp_path / "r.html").read_text()


def test_wrong_widths_are_warned_of():
    """Widths that grow fourfold where the noise does not; the same widths where it does: no warning."""
    draw, sd = np.random.default_rng(0), np.geomspace(0.5, 2, 400)
    arrays = {"mean": np.zeros((1, 400), np.float32), "variance": np.float32(sd**2)[None]}
    arrays["centre_and_scale"] = np.array([0.0, 1.0])
    for noise, is_warned in ((1.0, True), (sd, False)):
        remarks = make().remarks(arrays | {"targets": noise * draw.normal(size=400)})
        assert [remark.startswith("warning: some of these are too far from 0.90") for remark in remarks] == [
            False,
            *([True] if is_warned else []),
        ]


def test_noise_of_a_class_is_refused():
    with pytest.raises(UsageError, match=r"--task\.noise heteroscedastic: is of numbers"):
        make(target="species", noise="heteroscedastic").problem()


# ---- numbers at the ends of what can be computed with

TRAINED, TESTED = ["train"] * 30, ["test"] * 10


@pytest.mark.parametrize("scale", ["1e38", "1e-40", "1e150", "1e-150"])
def test_a_target_of_any_size_is_standardised_alike(scale, tmp_path):
    """Beyond the range of 32 bits too: the same numbers to train on, and a log density moved by the unit."""
    y = [math.sin(i) for i in range(40)]
    tasks = [
        make(write(tmp_path / f"{k}.csv", table(y=[v * unit for v in y])), "y", kind="regression")
        for k, unit in enumerate((1.0, float(scale)))
    ]
    first, second = (task.own_data("train")[1] for task in tasks)
    torch.testing.assert_close(first, second)
    target, held_out = tasks[1].encoder.target, tasks[1].own_data("test")[1].numpy()
    arrays = {"mean": np.zeros((1, 8), np.float32), "variance": np.ones((1, 1), np.float32)}
    arrays |= {"centre_and_scale": np.array([target.mean, target.scale]), "targets": held_out}
    expected = -norm.logpdf(held_out / target.scale, target.mean / target.scale).mean() + math.log(
        target.scale
    )
    assert tasks[1].score(arrays)["nll"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"y": [i * 1e160 for i in range(40)]}, "the target 'y' holds numbers too large to be standardised"),
        ({"y": [i * 1e-200 for i in range(40)]}, "the target 'y' differs too little from row to row"),
        ({"y": [*range(39), 1e30]}, "is 1e\\+30 in a held-out row, more than 1e\\+12 standard deviations"),
        (
            {"y": [2**60 + 100 * i for i in range(40)]},
            "column 'y' holds 11529215046068\\d+, of more digits than",
        ),
        ({"x": [2**60 + i % 2 for i in range(40)]}, "column 'x' holds 115292150460684697\\d, of more digits"),
        ({"x": [2**53 + i % 2 for i in range(40)]}, "column 'x' holds 900719925474099\\d, of more digits"),
    ],
)
def test_numbers_that_cannot_be_computed_with_are_refused_before_training(columns, said, tmp_path):
    columns = table(part=TRAINED + TESTED) | columns
    with pytest.raises(UsageError, match=said):
        make(write(tmp_path / "t.csv", columns), "y", split_column="part", kind="regression").data_digest()


def test_neighbours_beyond_32_bits_are_told_apart_or_it_is_said(tmp_path):
    """16777217 is no float of 32 bits: another input among its like; among numbers to 1e9 a line says so."""
    near = make(write(tmp_path / "near.csv", table(x=[16777216 + i % 2 for i in range(40)])), "y")
    assert len(near.own_data("train")[0].unique()) == 2
    assert not encoding.merged(near.encoder, near.inputs, near.rows["train"])
    x = [16777216, 16777217, *(i * 10**9 // 40 for i in range(2, 40))]
    wide = make(write(tmp_path / "wide.csv", table(x=x, part=TRAINED + TESTED)), "y", split_column="part")
    assert len(wide.own_data("train")[0].unique()) == 29
    assert "x: 30 different numbers are 29 different inputs in 32 bits" in wide.notes()["notes.txt"]
    fine = make(write(tmp_path / "fine.csv", table(x=[0.1] * 40, z=[i / 7 for i in range(40)])), "y")
    assert fine.data_digest()  # one text throughout is rounded, and the same


@pytest.mark.parametrize(
    ("only", "others", "settings", "missing"),
    [
        ("3.7", (4.0, 1e9), {}, False),
        ("3.7", (4.0, 1e9), {}, True),
        ("a", ("b", None), {}, False),  # a missing one would be a second category
        ("2024-03-01", ("2025-07-02", "2024-01-01"), {"dates": "c"}, False),
        ("2024-03-01", ("2025-07-02", "2024-01-01"), {"dates": "c"}, True),
    ],
)
def test_a_column_that_never_changed_is_not_looked_at(only, others, settings, missing, tmp_path):
    """What another value would mean nothing taught: its weights are where they started."""
    c = [None if missing and i % 3 == 0 else only for i in range(40)]
    task = make(write(tmp_path / "t.csv", table(c=c)), "y", **settings)
    found = task.encoder.encode_rows([{"x": 1.0, "c": value} for value in (only, *others)])
    assert (found == found[0]).all()
    assert ("not looked at: c" in task.notes()["notes.txt"]) == (not missing)


# ---- tuning


def test_test_rows_are_unseen_by_a_search(tmp_path, capsys):
    """Their targets may be anything: values and choice are the same. Cheat: training targets do move them."""
    made, table = make(), cells.read(PENGUINS)
    kept = [row for row, cell in enumerate(table["body_mass_g"]) if cell not in ("", "NA")]
    found = {}
    for part in ("none", "test", "train"):
        changed = {name: list(column) for name, column in table.items()}
        for row in made.rows.get(part, []):
            changed["body_mass_g"][kept[row]] = str(3000 + 7 * int(row))
        (tmp_path / part).mkdir()
        path = write(tmp_path / part / "t.csv", changed)
        words = ["tune", "mfvi", "own_table", "--budget", "2", "--task.file", str(path), "--task.epochs", "2"]
        words += ["--task.target", "body_mass_g", "--out", str(tmp_path / part), "--task.test_samples", "4"]
        assert cli.main(words) == 0
        told = capsys.readouterr()
        result = json.loads(Path(told.out.strip()).read_text())
        found[part] = [c["value"] for c in result["configurations"]], result["chosen"]
        assert "bench run mfvi own_table --task.file" in told.err
    assert None not in found["none"][0]
    assert found["none"] == found["test"]
    assert found["none"][0] != found["train"][0]
    assert np.array_equal(make(validation=0.2).rows["test"], made.rows["test"])
