"""Posteriors as estimators of scikit-learn: its own checks, the run's numbers, weights, pickles, mistakes."""

import copy
import multiprocessing
import operator
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from given import PENGUINS
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, check_n_features_in_after_fitting
from torch import nn

import bench
from bench import own_network
from bench.batches import batches
from bench.errors import UsageError
from bench.runs import registry
from bench.sklearn import PosteriorClassifier, PosteriorRegressor
from bench.studies import own_rows
from bench.tasks.own_table import OwnTable, Settings

QUICK = {"method": "map", "epochs": 2}
DIABETES, IRIS = load_diabetes(return_X_y=True), load_iris(return_X_y=True)

FLOAT32 = "networks compute in float32, whose rounding depends on how many rows stand in a product, and where"
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": f"{FLOAT32}: equal to 1e-4, while 1e-7 is asked",
    "check_methods_subset_invariance": f"{FLOAT32}: equal to 1e-6, while 1e-7 is asked",
    "check_methods_sample_order_invariance": f"{FLOAT32}: equal to 1e-6, while 1e-7 is asked",
}
"""Checks of scikit-learn that may fail, and why."""


@pytest.mark.slow
@pytest.mark.parametrize("cls", [PosteriorRegressor, PosteriorClassifier])
def test_scikit_learn_finds_an_estimator(cls, capsys):
    """Every check that its tags call for, and more than fifty of them; the three that may fail are named."""
    estimator = cls("map", epochs=10, batch_size=16, method_settings={"learning_rate": 0.05})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(estimator, on_skip=None, on_fail=None, expected_failed_checks=EXPECTED)
    status = {check["check_name"]: check["status"] for check in found}
    with capsys.disabled():
        print(
            f"\n{cls.__name__}: "
            + ", ".join(f"{list(status.values()).count(s)} {s}" for s in set(status.values()))
        )
    assert {name: s for name, s in status.items() if s == "failed"} == {}
    assert {name for name, s in status.items() if s == "skipped"} <= {"check_array_api_input"}
    assert list(status.values()).count("passed") > 50


@pytest.mark.parametrize(
    ("cls", "data", "method"),
    [
        (PosteriorRegressor, DIABETES, "predict"),
        (PosteriorClassifier, IRIS, "predict_proba"),
    ],
)
def test_order_and_company_of_rows_move_predictions_by_rounding_alone(cls, data, method):
    """To 1e-6 of their spread, which the checks that may fail leave open; a seed moves them by far more."""
    rows, targets = data
    fitted, other = (cls(**QUICK, random_state=seed).fit(rows, targets) for seed in (0, 1))
    predict = getattr(fitted, method)
    together, order = predict(rows), np.random.default_rng(0).permutation(len(rows))
    alone = np.concatenate([predict(rows[i : i + 1]) for i in range(20)])
    most = 1e-6 * together.std()
    np.testing.assert_allclose(predict(rows[order]), together[order], rtol=0, atol=most)
    np.testing.assert_allclose(alone, together[:20], rtol=0, atol=most)
    assert abs(getattr(other, method)(rows) - together).max() > 1000 * most


def test_a_check_that_is_not_met_is_found():
    """Negative control of the test above: an estimator that takes fewer columns than it was fitted to."""

    class Careless(PosteriorRegressor):
        def predict(self, X):
            return super().predict(np.resize(X, (len(X), 4)))

    with pytest.raises(AssertionError):
        check_n_features_in_after_fitting("Careless", Careless(**QUICK))


# ---- the run's numbers


@pytest.fixture(scope="module")
def frame():
    """The penguins with a body mass, as pandas reads them."""
    return pd.read_csv(PENGUINS).dropna(subset=["body_mass_g"]).reset_index(drop=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Directories of a run of numbers and of one of classes."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        target: bench.run(
            method,
            "own_table",
            seed=3,
            task_settings={"file": str(PENGUINS), "target": target, "epochs": 3, "hidden": 20},
            out=folder,
        ).directory
        for method, target in (("mfvi", "body_mass_g"), ("deep_ensemble", "species"))
    }


@pytest.mark.parametrize(
    ("cls", "method", "target"),
    [(PosteriorRegressor, "mfvi", "body_mass_g"), (PosteriorClassifier, "deep_ensemble", "species")],
)
def test_an_estimator_on_the_training_rows_of_a_run_is_the_run_to_the_last_bit(
    cls, method, target, frame, runs
):
    """So is the one that the run gives, and its copy and clone; negative control: another seed is another."""
    if target == "species":
        frame = pd.read_csv(PENGUINS)
    task = OwnTable(Settings(file=str(PENGUINS), target=target))
    train, test = (frame.iloc[task.rows[part]].drop(columns=target) for part in ("train", "test"))
    y = frame[target].iloc[task.rows["train"]]
    own = cls(method, epochs=3, hidden=20, random_state=3).fit(train, y)
    predictor = bench.load(runs[target])
    of_run = predictor.estimator()
    told, number = predictor.predict(test), cls.__name__ == "PosteriorRegressor"

    def said(estimator):
        if number:
            return np.column_stack([estimator.predict(test), estimator.predict_interval(test, 0.9)])
        return estimator.predict_proba(test)

    names = ("mean", "low", "high") if number else of_run.classes_
    expected = np.array([[(row if number else row["probabilities"])[name] for name in names] for row in told])
    for estimator in (own, of_run, copy.deepcopy(of_run), clone(of_run).fit(train, y)):
        np.testing.assert_array_equal(said(estimator), expected)
    assert (said(clone(own).set_params(random_state=4).fit(train, y)) != expected).any()
    if not number:
        assert own.predict(test).tolist() == [row["class"] for row in told]


def test_of_many_rows_those_that_a_run_keeps_aside_are_kept_aside(frame, tmp_path, monkeypatch):
    """As one fit to the last bit, and stopped early; negative control: of few rows none is kept aside."""
    monkeypatch.setattr(own_rows, "LARGE", 200)
    settings = {"file": str(PENGUINS), "target": "species", "epochs": 40}
    method = {"learning_rate": 0.3}
    run = bench.run("map", "own_table", task_settings=settings, method_settings=method, out=tmp_path)
    frame, task = pd.read_csv(PENGUINS), OwnTable(Settings(**settings))
    rows = np.sort(np.concatenate([task.rows["train"], task.rows["val"]]))
    X, y = frame.drop(columns="species"), frame["species"]
    own = PosteriorClassifier("map", epochs=40, method_settings=method).fit(X.iloc[rows], y[rows])
    of_run = bench.load(run.directory).estimator()
    assert own.posterior_.encoder.rows == of_run.posterior_.encoder.rows == len(task.rows["train"])
    np.testing.assert_array_equal(own.predict_proba(X), of_run.predict_proba(X))
    assert own.posterior_.method.problem.val is not None
    weighted = clone(own).fit(X.iloc[rows], y[rows], np.full(len(rows), 2.0))
    assert len(weighted.posterior_.method.problem.train) == len(task.rows["train"])
    monkeypatch.undo()
    few = clone(own).fit(X.iloc[rows], y[rows])
    assert few.posterior_.encoder.rows == len(rows)
    assert (few.predict_proba(X) != own.predict_proba(X)).any()


def wide_table(path, rows=260):
    """Codes that are categories, dates, many names, a note to leave out, groups, and decimal commas."""
    draw = np.random.default_rng(2)
    table = pd.DataFrame(
        {
            "zip": draw.choice([10115, 20095, 80331], rows),
            "name": [f"n{i}" for i in draw.integers(0, 60, rows)],
            "day": pd.date_range("2020-01-01", periods=rows).strftime("%d.%m.%Y"),
            "note": [f"text {i}" for i in range(rows)],
            "who": draw.integers(0, 30, rows),
            "width": [f"{x:.3f}".replace(".", ",") for x in draw.normal(size=rows)],
        }
    )
    table["y"] = [f"{x:.3f}".replace(".", ",") for x in draw.normal(size=rows) + table["zip"] / 1e4]
    table.to_csv(path, sep=";", index=False)
    return table


FURTHER = {
    "drop": "note",
    "categorical": "zip,name",
    "dates": "day",
    "decimal": ",",
    "validation": 0.25,
    "patience": 2,
}


@pytest.mark.parametrize("rows_by", [{"group": "who"}, {"split": 3}], ids=["group", "split"])
def test_the_estimator_of_a_run_poses_the_runs_problem_again(rows_by, tmp_path):
    """Its clone, fitted to the run's rows of the file; negative control: other settings pose another."""
    table = wide_table(tmp_path / "t.csv")
    settings = {"file": str(tmp_path / "t.csv"), "target": "y", "epochs": 5, **FURTHER, **rows_by}
    run = bench.run("map", "own_table", seed=5, task_settings=settings, out=tmp_path / "runs")
    task, estimator = OwnTable(Settings(**settings)), bench.load(run.directory).estimator()
    rows = np.sort(np.concatenate([task.rows["train"], task.rows["val"]]))
    X, y = table.drop(columns="y").iloc[rows], table["y"].iloc[rows].str.replace(",", ".").astype(float)

    def posed(estimator):
        problem = estimator.posterior_.method.problem
        return [*problem.train.tensors, *problem.val.tensors]

    again = clone(estimator).fit(X, y)
    expected = task.problem()
    for found, true in zip(posed(again), [*expected.train.tensors, *expected.val.tensors], strict=True):
        assert torch.equal(found, true)
    told = [row["mean"] for row in bench.load(run.directory).predict(str(tmp_path / "t.csv"))]
    np.testing.assert_array_equal(again.predict(table.drop(columns="y")), told)
    assert copy.deepcopy(again).task_settings == {**FURTHER, **rows_by}
    for name, value in {"validation": 0.5, "categorical": "name", "split": 4}.items():
        if name == "split" and "group" in rows_by:
            continue
        other = clone(estimator).set_params(task_settings={**FURTHER, **rows_by, name: value}).fit(X, y)
        assert [t.shape for t in posed(other)] != [t.shape for t in posed(again)] or any(
            not torch.equal(a, b) for a, b in zip(posed(other), posed(again), strict=True)
        )


def test_a_frame_of_polars_is_predicted_as_the_file_is(runs, frame):
    """By the run and by its estimator, to the last bit; and fitted as the frame of pandas is."""
    polars = pytest.importorskip("polars", reason="polars is not installed")
    of_file = polars.read_csv(PENGUINS, null_values="NA")
    for target, directory in runs.items():
        predictor = bench.load(directory)
        assert predictor.predict(of_file) == predictor.predict(str(PENGUINS))
        pandas_, estimator = pd.read_csv(PENGUINS).drop(columns=target), predictor.estimator()
        for rows in (of_file.drop(target), polars.DataFrame(pandas_.to_dict("list"), strict=False)):
            np.testing.assert_array_equal(estimator.predict(rows), estimator.predict(pandas_))
    X, known = frame.drop(columns="body_mass_g"), of_file.drop_nulls("body_mass_g")
    own = PosteriorRegressor(**QUICK).fit(X, frame["body_mass_g"])
    of_polars = PosteriorRegressor(**QUICK).fit(known.drop("body_mass_g"), known["body_mass_g"])
    np.testing.assert_array_equal(of_polars.predict(X), own.predict(X))


def test_a_column_that_parts_the_rows_of_a_run_is_left_out_by_its_estimator(frame, tmp_path):
    parts = np.resize(["train", "train", "test"], len(frame))
    table = frame.assign(part=parts)
    table.to_csv(tmp_path / "t.csv", index=False)
    settings = {"file": str(tmp_path / "t.csv"), "target": "body_mass_g", "split_column": "part", "epochs": 2}
    run = bench.run("map", "own_table", task_settings=settings, out=tmp_path / "runs")
    estimator = bench.load(run.directory).estimator()
    X, y = table[parts == "train"].drop(columns="body_mass_g"), frame["body_mass_g"][parts == "train"]
    again = clone(estimator).fit(X, y)
    told = [row["mean"] for row in bench.load(run.directory).predict(table)]
    np.testing.assert_array_equal(again.predict(table.drop(columns="body_mass_g")), told)


def test_dtypes_say_which_columns_are_of_categories_and_of_dates():
    """Numbers that are codes, more texts than are taken for categories, times; not so without the dtypes."""
    days = pd.date_range("2020-01-01", periods=60, freq="40D")
    X = pd.DataFrame({"code": [10115, 20095] * 30, "name": [f"n{i % 55}" for i in range(60)], "day": days})
    typed = X.astype({"code": "category", "name": "category"})
    kinds = [c.kind for c in fit(X=typed, y=np.arange(60)).posterior_.encoder.columns]
    assert kinds == ["category", "categories", "date"]
    with pytest.raises(
        ValueError, match=r"'name' holds 55 .* X without name leaves it out, the dtype category"
    ):
        fit(X=X, y=np.arange(60))
    kinds = [c.kind for c in fit(X=X[["code"]], y=np.arange(60)).posterior_.encoder.columns]
    assert kinds == ["number"]


def test_noise_of_its_own_for_every_row(frame, tmp_path):
    """As the run has it, to the last bit, pickled or not; negative control: learned noise is one for all."""
    given = {"epochs": 3, "noise": "heteroscedastic"}
    settings = {"file": str(PENGUINS), "target": "body_mass_g", **given}
    of_run = bench.load(
        bench.run("mfvi", "own_table", task_settings=settings, out=tmp_path).directory
    ).estimator()
    rows = OwnTable(Settings(file=str(PENGUINS), target="body_mass_g")).rows["train"]
    X, y = frame.drop(columns="body_mass_g").iloc[rows], frame["body_mass_g"].iloc[rows]
    own = PosteriorRegressor("mfvi", **given).fit(X, y)
    expected = own.predict_interval(X)
    for estimator in (of_run, copy.deepcopy(own), clone(of_run).fit(X, y)):
        np.testing.assert_array_equal(estimator.predict_interval(X), expected)
    assert np.ptp(own.predict_dist(X).aleatoric) > 1
    alike = PosteriorRegressor("map", epochs=3).fit(X, y).predict_dist(X).aleatoric
    assert np.ptp(alike) <= 1e-9 * alike[0]


def test_whole_targets_of_more_digits_than_a_float_has_are_refused():
    """As those of a file are; negative control: a step of the float's own size is taken."""
    X, steps = DIABETES[0][:40], np.arange(40)
    with pytest.raises(ValueError, match="of more digits than are computed with"):
        fit(X=X, y=2**60 + steps)
    fit(X=X, y=2**60 + 2**20 * steps)


def test_classes_of_a_run_are_whole_numbers_where_all_are(tmp_path):
    """In the order of the numbers, where their texts have another; as a file that pandas reads has them."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(size=60), "code": rng.permutation(np.repeat([9, 10, 2], 20))})
    table.to_csv(tmp_path / "t.csv", index=False)
    settings = {"file": str(tmp_path / "t.csv"), "target": "code", "kind": "classification", "epochs": 2}
    run = bench.run("map", "own_table", task_settings=settings, out=tmp_path)
    predictor = bench.load(run.directory)
    estimator = predictor.estimator()
    assert estimator.classes_.tolist() == [2, 9, 10]
    told = predictor.predict(table)
    assert estimator.predict(table[["x"]]).tolist() == [int(row["class"]) for row in told]
    assert estimator.score(table[["x"]], table["code"]) >= 0


def test_labels_of_any_kind_come_back_as_they_were():
    """Texts in the order of numpy's, where the encoder has that of their numbers; booleans; floats."""
    X = IRIS[0]
    for labels in (["10", "9", "x"], [10, 9, 2**60], [0.0, 1.0, 2.0], [True, False, True]):
        y = np.array(labels)[IRIS[1]]
        model = PosteriorClassifier("map", epochs=10, method_settings={"learning_rate": 0.05}).fit(X, y)
        assert model.classes_.dtype == y.dtype
        assert model.classes_.tolist() == np.unique(y).tolist()
        assert model.score(X, y) > 0.9
        assert (model.classes_[model.predict_proba(X).argmax(1)] == model.predict(X)).all()


# ---- weights


def linear(inputs, outputs):
    """A linear model."""
    return nn.Linear(inputs[0], outputs)


@pytest.fixture
def weighted():
    """Rows with missing numbers and categories, targets, and whole weights from 0 to 4."""
    rng = np.random.default_rng(1)
    X = pd.DataFrame({"a": rng.normal(size=40), "b": rng.normal(5, 9, 40), "c": rng.choice(["u", "v"], 40)})
    X.loc[rng.random(40) < 0.2, "a"] = np.nan
    return X, X["b"] * 2 + rng.normal(size=40), rng.integers(0, 5, 40)


def loss_and_gradient(problem):
    """Of the mode under the same weights of the network, on all rows at once; in nats."""
    torch.manual_seed(0)
    entry = registry.method("map")
    method = entry.cls(problem, entry.cls.settings_class())
    (batch,) = batches(problem.train, None, None)
    loss = sum(method.loss_terms(batch, {}))
    parameters = list(method.parameters())
    return loss.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


@pytest.mark.parametrize("cls", [PosteriorRegressor, PosteriorClassifier])
def test_whole_weights_are_rows_repeated_in_encoder_loss_and_gradient(cls, weighted):
    """To rounding; negative control: without weights all three are others."""
    X, y, weights = weighted
    y = y if cls is PosteriorRegressor else np.where(y > 0, "no", "yes")
    again = np.repeat(np.arange(40), weights)
    fits = (cls(**QUICK).fit(X, y, weights), cls(**QUICK).fit(X.iloc[again], np.asarray(y)[again]))
    one, repeated, none = (fit.posterior_ for fit in (*fits, cls(**QUICK).fit(X, y)))
    encoded, wanted, plain = (each.encoder.encode_rows(X) for each in (one, repeated, none))
    np.testing.assert_allclose(encoded, wanted, atol=1e-12)
    assert np.abs(plain - wanted).max(0).min() == 0 < np.abs(plain - wanted)[:, :2].max(0).min()
    assert one.encoder.target.mean == pytest.approx(repeated.encoder.target.mean, rel=1e-12)
    assert one.encoder.target.scale == pytest.approx(repeated.encoder.target.scale, rel=1e-12)
    problems = [each.method.problem for each in (one, repeated, none)]
    (loss, gradient), (expected, slope), (other, _) = map(loss_and_gradient, problems)
    # `num_train` counts rows, so that a batch of all rows is the sum over them.
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-3)
    assert (other - expected).abs() > 1


def test_a_weighted_linear_mode_is_the_ridge_regression_in_closed_form(monkeypatch):
    """(X' W X / s^2 + I)^-1 X' W y / s^2 with s^2 = sum w r^2 / sum w, the mode of the noise; to 1e-3.

    Negative control: without weights the coefficients are others.
    """
    monkeypatch.setitem(own_network.imported, "own:linear", linear)
    rng = np.random.default_rng(2)
    X, weights = rng.normal(size=(60, 3)), rng.uniform(0.1, 4, 60)
    y = X @ [1.0, -2.0, 0.5] + rng.normal(size=60) * np.where(X[:, 0] > 0, 2, 0.3)
    settings = {"network": "own:linear", "epochs": 400, "batch_size": None}
    settings["method_settings"] = {"learning_rate": 0.03}
    model = PosteriorRegressor("map", **settings).fit(X, y, weights)
    inputs, targets, kept = (t.double().numpy() for t in model.posterior_.method.problem.train.tensors)
    np.testing.assert_allclose(kept, weights, rtol=1e-6)
    design, wanted = np.column_stack([inputs, np.ones(60)]), targets[:, 0]

    def ridge(w):
        noise = 1.0
        for _ in range(200):
            precision = design.T @ (w[:, None] * design) / noise + np.eye(4)
            found = np.linalg.solve(precision, design.T @ (w * wanted) / noise)
            noise = (w * (wanted - design @ found) ** 2).sum() / w.sum()
        return found, noise

    method = model.posterior_.method
    found = np.append(method.network.weight.detach().numpy(), method.network.bias.detach().numpy())
    np.testing.assert_allclose(found, ridge(weights)[0], atol=1e-3)
    np.testing.assert_allclose(method.likelihood.log_sigma.exp().item() ** 2, ridge(weights)[1], rtol=1e-3)
    assert np.abs(found - ridge(np.ones(60))[0]).max() > 0.02


def test_weights_of_classes_are_weights_of_their_rows_and_zero_is_no_row():
    """To the last bit; `balanced` gives every class the same sum."""
    X, y = IRIS[0][:110], IRIS[1][:110]
    by_class = {0: 2.0, 1: 0.5, 2: 3.0}
    per_row = np.array([by_class[label] for label in y])
    a = PosteriorClassifier(**QUICK, class_weight=by_class).fit(X, y).predict_proba(X)
    b = PosteriorClassifier(**QUICK).fit(X, y, per_row).predict_proba(X)
    plain = PosteriorClassifier(**QUICK).fit(X, y)
    assert (a == b).all()
    assert (a != plain.predict_proba(X)).any()
    model = PosteriorClassifier(**QUICK, class_weight="balanced").fit(X, y)
    weights = model.posterior_.method.problem.train.tensors[2].numpy()
    np.testing.assert_allclose(np.bincount(y, weights), 110 / 3, rtol=1e-6)
    zeros = PosteriorClassifier(**QUICK).fit(X, y, y < 2)
    without = PosteriorClassifier(**QUICK).fit(X[y < 2], y[y < 2])
    assert zeros.classes_.tolist() == [0, 1]
    assert (zeros.predict_proba(X) == without.predict_proba(X)).all()


# ---- scikit-learn's tools


def test_pipelines_searches_and_cross_validation_take_it():
    X, y = DIABETES[0][:60], DIABETES[1][:60]
    pipeline = make_pipeline(StandardScaler(), PosteriorRegressor(**QUICK))
    search = GridSearchCV(pipeline, {"posteriorregressor__hidden": [3, 5]}, cv=2, error_score="raise").fit(
        X, y
    )
    assert search.best_estimator_[-1].posterior_.task_settings["hidden"] in (3, 5)
    assert cross_val_predict(PosteriorClassifier(**QUICK), *IRIS, cv=2, method="predict_proba").shape == (
        150,
        3,
    )
    parameters = PosteriorClassifier("mfvi", epochs=7, class_weight="balanced").get_params()
    assert clone(PosteriorClassifier(**parameters)).get_params() == parameters


def test_it_pickles_into_a_new_process_and_holds_no_training_row(weighted):
    """Predictions are equal to the last bit; building it again draws nothing from torch's own generator."""
    X, y, _ = weighted
    model = PosteriorRegressor("swag", **{k: v for k, v in QUICK.items() if k != "method"}).fit(X, y)
    state = torch.get_rng_state()
    again = copy.deepcopy(model)
    assert (torch.get_rng_state() == state).all()
    assert len(again.posterior_.method.problem.train) == 1 < len(model.posterior_.method.problem.train)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(operator.methodcaller("predict_interval", X, 0.5), (model,))
    for other in (found, again.predict_interval(X, 0.5)):
        np.testing.assert_array_equal(other, model.predict_interval(X, 0.5))


def test_it_is_quiet_and_leaves_no_file(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    model = PosteriorRegressor("deep_ensemble", epochs=2).fit(*DIABETES)
    model.predict_interval(DIABETES[0])
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


# ---- mistakes


def fit(cls=PosteriorRegressor, X=DIABETES[0], y=DIABETES[1], sample_weight=None, **parameters):
    return cls(**{**QUICK, **parameters}).fit(X, y, sample_weight)


TEXTS = pd.DataFrame({"note": [f"text {i}" for i in range(442)]})


def labelled(labels):
    """Iris with other labels of its three classes."""
    return IRIS[0], np.array(labels, object)[IRIS[1]]


MISTAKES = {
    "method": (lambda: fit(method="mvfi"), "unknown method 'mvfi': did you mean mfvi"),
    "no weights": (lambda: fit(method="vgr", sample_weight=np.arange(442)), "vgr cannot weight"),
    "setting": (lambda: fit(method_settings={"lr": 1}), "method_settings: lr: map has no such setting"),
    "hidden": (lambda: fit(hidden=0), "hidden 0: must be 1 or more"),
    "negative": (lambda: fit(sample_weight=np.r_[-1, np.ones(441)]), "one is negative"),
    "zeros": (lambda: fit(sample_weight=np.zeros(442)), "all are zero"),
    "shape": (lambda: fit(sample_weight=np.ones(441)), "one weight per row"),
    "masked": (lambda: fit(X=np.ma.masked_array(DIABETES[0], DIABETES[0] > 0)), "X is a masked array"),
    "masked target": (lambda: fit(y=np.ma.masked_array(DIABETES[1], DIABETES[1] > 99)), "y is a masked"),
    "dates": (lambda: fit(y=np.arange(442).astype("datetime64[D]")), "y holds dates or times"),
    "times": (lambda: fit(y=np.arange(442).astype("timedelta64[s]")), "y holds dates or times"),
    "a parameter twice": (lambda: fit(task_settings={"hidden": 3}), "task_settings: hidden is a parameter"),
    "a file": (lambda: fit(task_settings={"file": "t.csv"}), "file has no meaning here: the rows are X"),
    "no such column": (lambda: fit(task_settings={"drop": "z"}), "X without z: X has no such column; it has"),
    "free text": (lambda: fit(X=TEXTS), "X: column 'note' holds 442 different texts"),
    "constant": (lambda: fit(y=np.ones(442)), "there is nothing to learn"),
    "infinite": (lambda: fit(X=np.where(DIABETES[0] > 0.1, np.inf, 0)), "infinity"),
    "one class": (lambda: fit(PosteriorClassifier, *IRIS, IRIS[1] == 0), "y has one class, 0"),
    "merged": (lambda: fit(PosteriorClassifier, IRIS[0], np.array(["a", "a ", "b"])[IRIS[1]]), "written 'a'"),
    "missing": (lambda: fit(PosteriorClassifier, IRIS[0], np.array(["a", "NA", "b"])[IRIS[1]]), "'NA'"),
    "None": (lambda: fit(PosteriorClassifier, *labelled(["a", None, "b"])), "label None of row 50 stands"),
    "None of numbers": (lambda: fit(PosteriorClassifier, *labelled([0, None, 2])), "label None of row 50"),
    "NaN": (lambda: fit(PosteriorClassifier, *labelled(["a", np.nan, "b"])), "label nan of row 50 stands"),
    "NA of pandas": (lambda: fit(PosteriorClassifier, *labelled(["a", pd.NA, "b"])), "label <NA> of row 50"),
    "level": (lambda: fit().predict_interval(DIABETES[0], 90), "level 90"),
    "abstain": (lambda: fit().predict_dist(DIABETES[0]).abstain(10), "abstain 10"),
    "samples": (lambda: fit(num_samples=0).predict(DIABETES[0]), "0 samples"),
    "columns": (lambda: fit().predict(DIABETES[0][:, 1:]), "X has 9 features"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_told_in_one_line_as_scikit_learn_expects(case):
    make, said = MISTAKES[case]
    with pytest.raises((ValueError, UsageError), match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_an_estimator_that_is_not_fitted_says_so():
    with pytest.raises(NotFittedError):
        PosteriorClassifier().predict(IRIS[0])
