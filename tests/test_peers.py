"""Posteriors of other libraries: Laplace's equals ours, the others the closed forms of a linear model."""

import runpy
import subprocess
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pages
import pytest
import torch
from conformance import problems
from oracles.linear import Truth
from torch.testing import assert_close

import bench
from bench import likelihoods, peers, priors
from bench.contract import Budget
from bench.diagnostics import effective_sample_size
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods.laplace import Laplace
from bench.runs.records import read_record
from bench.runs.runner import task_of


@contextmanager
def imported_in_silence():
    """Leaves aside what a library warns of while the first test that needs it imports it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fitted(cls, problem, budget, **values):
    """A fit, during which our classes import their library."""
    engine = Engine(cls, cls.settings_class(**values), 3, trainer=TrainerOptions(accelerator="cpu"))
    with imported_in_silence():
        return engine.fit(problem, budget)


@pytest.mark.parametrize("name", ["LaplaceTorch", "PosteriorsLaplace"])
@pytest.mark.parametrize("posed", [problems.mlp, problems.straight_line])
def test_laplace_is_ours(name, posed):
    """Mode, variances and the mean of predictions, after the same fit."""
    problem = replace(posed(), prior=priors.normal(0, 0.8))
    theirs = fitted(getattr(peers, name), problem, Budget(30, 8), learning_rate=0.02)
    ours = fitted(Laplace, problem, Budget(30, 8), learning_rate=0.02, curvature="full")
    mean, variance = (torch.cat([t.flatten() for t in tree.values()]) for tree in ours.moments())
    assert_close(theirs.mode, mean.detach(), rtol=1e-5, atol=1e-6)
    assert_close(theirs.root.square().sum(1), variance, rtol=1e-3, atol=1e-6)
    inputs = posed().val.tensors[0]
    means = [
        m.predict(inputs, 2000, torch.Generator().manual_seed(0)).average().exp()
        if posed is problems.mlp
        else m.predict(inputs, 2000, torch.Generator().manual_seed(0)).mean.mean(0)
        for m in (theirs, ours)
    ]
    assert_close(*means, rtol=0, atol=0.05)


def page_file(name):
    """A file of the page."""
    (block,) = (block for block in pages.blocks("entering-a-library.md") if block.file == name)
    return block


def test_class_of_the_page_is_ours(tmp_path):
    """`docs/entering-a-library.md` to the letter: its file, on classes under N(0, 1)."""
    block = page_file("my_laplace.py")
    (tmp_path / block.file).write_text(block.text)
    problem = replace(problems.mlp(), prior=priors.normal(0, 1))
    with imported_in_silence():
        theirs = runpy.run_path(str(tmp_path / block.file))["MyLaplace"]
    found = [fitted(cls, problem, Budget(10, 8), learning_rate=0.02) for cls in (theirs, peers.LaplaceTorch)]
    assert_close(found[0].mode, found[1].mode, rtol=0, atol=0)
    assert_close(found[0].root, found[1].root, rtol=0, atol=0)
    assert found[0].root.any()


def test_mean_field_inference_finds_the_optimum_of_a_linear_model():
    """Means of the posterior, variances 1 / diag(precision), within the noise of one sample a step."""
    truth = Truth()
    found = fitted(peers.PosteriorsVI, truth.problem, Budget(2000), learning_rate=3e-3)
    mean, sd = found.normal.double()
    exact = truth.precision.diagonal() ** -0.5
    assert ((mean - truth.mean).abs() < 0.6 * exact).all()
    assert_close(sd, exact, rtol=0.15, atol=0)
    assert not torch.allclose(sd, truth.precision.inverse().diagonal().sqrt(), rtol=0.15)  # the marginal ones


def test_langevin_dynamics_has_the_moments_of_its_own_law():
    """Along an eigenvector of precision p a step is v <- (1 - e p) v + sqrt(2 e) z, whose law is known.

    Within 4.5 standard errors, by the effective sample size. False alarm: 8 x 7e-6.
    """
    truth = Truth()
    p, vectors = torch.linalg.eigh(truth.precision)
    e = 0.6 / p.max().item()
    rate = e * truth.problem.num_train
    found = fitted(
        peers.PosteriorsSGLD, truth.problem, Budget(3000), learning_rate=rate, kept=1000, burn_in=0.1
    )
    away = (found.draws.double() - truth.mean) @ vectors
    variance = 1 / (p * (1 - e * p / 2))
    for values, expected, spread in ((away, 0 * p, variance), (away.square(), variance, 2 * variance**2)):
        draws = torch.from_numpy(effective_sample_size(values[None].numpy()))
        assert draws.min() > 50
        assert ((values.mean(0) - expected).abs() < 4.5 * (spread / draws).sqrt()).all()


@pytest.mark.parametrize("name", ["LaplaceTorch", "PosteriorsVI"])
def test_a_library_that_is_not_there_is_one_line_before_training(name, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda package: None)
    with pytest.raises(UsageError, match=r"laplace and posteriors cannot be imported: pip install"):
        fitted(getattr(peers, name), problems.mlp(), Budget(1))


def test_what_they_cannot_infer_is_one_line():
    with pytest.raises(UsageError, match="take another task"):
        fitted(peers.LaplaceTorch, problems.regression(), Budget(1))


# ---- predictions of tables that something else made


TABPFN = '''
"""Stands in for tabpfn, with what the page asks of it."""

import numpy as np
from scipy.stats import norm
from sklearn.linear_model import LinearRegression, LogisticRegression


class TabPFNRegressor:
    def fit(self, X, y):
        assert X.ndim == 2 and y.shape == (len(X),)
        self.line = LinearRegression().fit(X, y)
        self.sd = (y - self.line.predict(X)).std()
        return self

    def predict(self, X, *, output_type="mean", quantiles=None):
        assert output_type == "quantiles" and isinstance(quantiles, list)
        return [self.line.predict(X) + self.sd * norm.ppf(level) for level in quantiles]


class TabPFNClassifier:
    def fit(self, X, y):
        assert y.dtype.kind == "i" and y.shape == (len(X),)
        self.model = LogisticRegression(max_iter=1000).fit(X, y)
        self.classes_ = self.model.classes_
        return self

    def predict_proba(self, X):
        return self.model.predict_proba(X)
'''


def answered(folder, task, **task_settings):
    """The page's way: questions, its script with the stand-in, answers; the last run."""
    file = folder / "questions.npz"
    given = {"method_settings": {"file": str(file)}, "task_settings": task_settings, "preset": "smoke"}
    bench.run("bench.peers:Questions", task, out=folder / "asked", **given)
    (folder / "tabpfn.py").write_text(TABPFN)
    (folder / "answer.py").write_text(page_file("answer.py").text)
    subprocess.run([sys.executable, "answer.py", str(file)], cwd=folder, check=True, timeout=600)
    return bench.run("bench.peers:Answers", task, out=folder / "runs", **given)


def test_numbers_are_answered_by_the_script_of_the_page(tmp_path):
    """The root mean squared error is that of the line, split by split, in the table's own unit."""
    from sklearn.linear_model import LinearRegression

    done = answered(tmp_path, "diabetes_regression")
    assert done.record.method.seed_matters is False
    task, errors, densities = task_of(done.record), [], []
    for split in range(task.num_splits):
        train, test = task.rows(split)
        train = train[: len(train) - len(train) // 10]
        inputs, targets = task.table.inputs, task.table.targets
        line = LinearRegression().fit(inputs[train], targets[train])
        off = targets[test] - line.predict(inputs[test])
        sd = (targets[train] - line.predict(inputs[train])).std()
        errors.append(np.sqrt((off**2).mean()))
        densities.append((-0.5 * (off / sd) ** 2 - np.log(sd * np.sqrt(2 * np.pi))).mean())
    assert done.record.metrics["rmse"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert done.record.metrics["log_likelihood"] == pytest.approx(np.mean(densities), abs=0.02)
    (asked,) = (tmp_path / "asked").rglob("record.json")
    baseline = read_record(asked.parent)
    assert done.record.metrics["rmse"] < 0.9 * baseline.metrics["rmse"]
    with np.load(tmp_path / "questions.npz") as found:
        assert len(found.files) == 5 * task.num_splits
        names = {name.partition("/")[2] for name in found.files}
    assert names == {"train_inputs", "train_targets", "inputs", "mean", "variance"}  # no target of a test row


def test_classes_are_answered_by_the_script_of_the_page(tmp_path):
    """Three clouds of points: far better than the share of each class."""
    rng = np.random.default_rng(0)
    centres = {"ada": (0, 0), "bo": (4, 0), "cy": (0, 4)}
    rows = [(*(rng.normal(at) for at in centres[name]), name) for name in rng.choice([*centres], 150)]
    lines = ["x,y,kind", *(f"{x:.4f},{y:.4f},{name}" for x, y, name in rows)]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    done = answered(tmp_path, "own_table", file=str(tmp_path / "table.csv"), target="kind")
    assert done.record.metrics["accuracy"] > 0.9
    (asked,) = (tmp_path / "asked").rglob("record.json")
    assert done.record.metrics["nll"] < 0.5 * read_record(asked.parent).metrics["nll"]


def posed_questions(folder):
    """A file with the questions of a straight line, and its problem."""
    problem, settings = problems.straight_line(), peers.QuestionsSettings(file=str(folder / "q.npz"))
    method = peers.Questions(problem, settings)
    method.predict(problem.val.tensors[0], 3, torch.Generator())
    return problem, settings, method.fit_name


def test_a_row_has_its_answer_wherever_it_stands(tmp_path):
    problem, settings, fit = posed_questions(tmp_path)
    rows = problem.val.tensors[0]
    found = peers.read_arrays(settings.file)
    assert_close(torch.from_numpy(found[f"{fit}/inputs"]), rows)
    mean = np.arange(2.0 * len(rows)).reshape(2, -1)
    np.savez(settings.file, **found, **{f"{fit}/mean": mean, f"{fit}/variance": np.ones_like(mean)})
    method = peers.Answers(problem, settings)
    there, back = (method.predict(of, 9, torch.Generator()).mean for of in (rows, rows.flip(0)))
    assert_close(there[..., 0], torch.from_numpy(mean).float())
    assert_close(back.flip(1), there)
    with pytest.raises(UsageError, match="has no answer to a row"):
        method.predict(rows + 1, 9, torch.Generator())


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, r"mean \[S, \d+\] is missing: nobody has answered"),
        ({"mean": np.ones((2, 3)), "variance": np.ones((2, 3))}, r"\[2, 3\], and must be floats \[S, "),
        ({"mean": np.nan, "variance": 1.0}, "holds what is no mean"),
        ({"mean": 0.0, "variance": 0.0}, "holds what is no variance"),
    ],
)
def test_answers_that_are_none_are_refused_in_one_line(tmp_path, answers, message):
    problem, settings, fit = posed_questions(tmp_path)
    found = peers.read_arrays(settings.file)
    whole = np.ones((2, len(found[f"{fit}/inputs"])))
    given = {f"{fit}/{name}": of * whole if np.ndim(of) == 0 else of for name, of in answers.items()}
    np.savez(settings.file, **found, **given)
    with pytest.raises(UsageError, match=message) as raised:
        peers.Answers(problem, settings)
    assert "\n" not in str(raised.value)


def test_other_fits_other_files_and_other_examples_are_refused_in_one_line(tmp_path):
    problem, settings, _ = posed_questions(tmp_path)
    other = replace(problem, train=problem.val)
    with pytest.raises(UsageError, match="has no questions of this fit"):
        peers.Answers(other, settings)
    (tmp_path / "q.npz").write_bytes(b"no file of arrays")
    with pytest.raises(UsageError, match="no NumPy file of arrays by name"):
        peers.Answers(problem, settings)
    with pytest.raises(UsageError, match="takes rows of a table"):
        peers.Questions(replace(problem, likelihood=likelihoods.Bernoulli()), settings)
