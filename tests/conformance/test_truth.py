"""The held-out truth of every discovered task reaches nothing but its score; cheats are caught."""

import importlib
from dataclasses import replace

import eyes
import numpy as np
import pytest
import torch
from given import GIVEN
from torch.utils.data import TensorDataset

from bench.contract import Budget
from bench.errors import UsageError
from bench.photographs import photographs
from bench.runs import registry
from bench.studies import active
from bench.tasks.active_learning import ActiveLearning
from bench.tasks.active_testing import ActiveTesting, losses_and_scores
from bench.tasks.split_mnist import SplitMNIST
from bench.tasks.uci_regression import UCIRegression
from conformance import moons, truth


def once_a_file():
    """Every task; of several names of one file the first alone is quick."""
    firsts = {entry.file: name for name, entry in reversed(list(registry.tasks().items()))}
    return [
        pytest.param(name, marks=[] if firsts[entry.file] == name else pytest.mark.slow)
        for name, entry in registry.tasks().items()
    ]


@pytest.mark.parametrize("name", once_a_file())
def test_held_out_truth_moves_nothing_else(name, monkeypatch, tmp_path):
    """Other test labels and inputs move the targets and the predictions of those inputs, and nothing else."""
    entry = registry.task(name)
    if entry.fixed.get("dataset") in photographs.SOURCES:
        monkeypatch.setenv("BENCH_DATA", str(eyes.write_all(tmp_path)))
    truth.held_out_truth_is_only_scored(entry, GIVEN.get(name))


def test_law_passes_a_sound_task():
    truth.the_held_out_truth_moves_nothing_else(moons.TwoMoons, moons.SETTINGS, set())


@pytest.mark.parametrize("more", [False, True])
def test_inputs_of_many_worlds_explain_their_own_places_alone(more):
    """Four worlds of five inputs `[W, S, N]`: the changed ones alone; the cheat moves one beside them."""
    moved = np.zeros((4, 5), bool)
    moved.flat[truth.some(20)] = True
    beside = np.flatnonzero(~moved)[3]
    moved.flat[beside] = more
    places = [set(np.flatnonzero(at).tolist()) for at in truth.along_axes(np.stack([moved] * 3, 1))]
    lengths = (4, 3, 5, 12, 20, 15)
    said = [truth.explained(at, (20,), length) for at, length in zip(places, lengths, strict=True)]
    assert any(said) != more


class LooksAtTheTest(moons.TwoMoons):
    """Nothing is predicted, but the training loss is shifted by a held-out label."""

    def run(self, engine):
        """The loss of a fit, moved."""
        method = engine.fit(self.problem(), Budget(self.settings.epochs))
        return {"loss": np.array([method.history[-1]["loss"] + self.shift()])}

    def shift(self):
        """By what it is moved."""
        return float(self.own_data("test")[1][0])

    def targets(self):
        """None."""
        return {}


class LooksAtTraining(LooksAtTheTest):
    """The same without the peek."""

    def shift(self):
        """By nothing."""
        return 0.0


def test_law_of_tasks_without_predictions():
    truth.held_out_data_move_nothing(LooksAtTraining, moons.SETTINGS)
    with pytest.raises(AssertionError, match="held-out data move loss"):
        truth.held_out_data_move_nothing(LooksAtTheTest, moons.SETTINGS)


class Closed(LooksAtTraining):
    """Nothing is fitted."""

    spec = replace(moons.TwoMoons(moons.SETTINGS).spec, closed_form=True)

    def run(self, engine):
        """A constant, but for what a cheat adds."""
        return {"number": np.array(0.5 + self.shift())}


class ReadsData(Closed):
    """A training label moves a number."""

    def shift(self):
        """By the label of the first point."""
        return float(self.own_data("train")[1][0])


class Fits(Closed):
    """A method after all."""

    def shift(self):
        """By nothing, at the cost of a fit."""
        engine = self.engine
        engine.fit(self.problem(), Budget(1))
        return 0.0

    def run(self, engine):
        """Keeps the engine."""
        self.engine = engine
        return super().run(engine)


def test_law_of_studies_in_closed_form():
    truth.nothing_moves_anything(Closed, moons.SETTINGS)
    with pytest.raises(AssertionError, match="data move number"):
        truth.nothing_moves_anything(ReadsData, moons.SETTINGS)
    with pytest.raises(UsageError, match="METHOD none fits nothing"):
        truth.nothing_moves_anything(Fits, moons.SETTINGS)


@pytest.mark.parametrize("cheat", moons.CHEATS, ids=lambda cheat: cheat.__name__)
def test_law_catches(cheat):
    """Each in its own way."""
    with pytest.raises(AssertionError, match=moons.CHEATS[cheat]):
        truth.the_held_out_truth_moves_nothing_else(cheat, moons.SETTINGS, set())


def test_law_catches_data_kept_in_a_constant(tmp_path, monkeypatch):
    """Made while the task's file is imported, before any law looks."""
    (tmp_path / "kept.py").write_text(
        "from conformance import moons\n"
        "INPUTS, LABELS = moons.make_moons(500, noise=0.2, random_state=1)\n"
        "class Keeps(moons.TwoMoons):\n"
        "    def problem(self):\n"
        "        tensor = moons.torch.from_numpy\n"
        "        return moons.posed(self, [tensor(INPUTS).float(), tensor(LABELS)])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cheat = importlib.import_module("kept").Keeps
    with pytest.raises(AssertionError, match=r"read past .* make_moons"):
        truth.the_held_out_truth_moves_nothing_else(cheat, moons.SETTINGS, set())


class TrainsOnAnotherLabel(ActiveLearning):
    """Adds to the points that were bought one that was not."""

    def problem(self, points=None, objective="plain"):
        """One point more, a copy of the last but for its label."""
        if points is not None:
            left = next(i for i in range(len(self.data.pool)) if i not in points.index)
            label = int(self.data.pool_labels[left])
            points = active.Points(
                points.index, torch.cat([points.labels[:-1], torch.tensor([label])]), points.proposal
            )
        return super().problem(points, objective)


class StandardisesByTestRows(UCIRegression):
    """Standardises the test rows by themselves."""

    def standardised(self, split):
        """The split, but for its test inputs."""
        own = super().standardised(split)
        inputs = own.test_inputs
        return own._replace(test_inputs=(inputs - inputs.mean(0)) / inputs.std(0))


class StopsByTestImages(SplitMNIST):
    """Hands the test set to early stopping, and to whatever else looks at validation data."""

    def problem(self, step=0, prior=None):
        """The step, with other validation images."""
        test = TensorDataset(self.images.test_inputs, self.images.test_labels)
        return replace(super().problem(step, prior), val=test)


class TunesByTheTestPool(ActiveTesting):
    """Logs the risk that is scored where a search looks."""

    def run(self, engine):
        """The run, and the risk of the test pool."""
        arrays = super().run(engine)
        labels = {"full_labels": self.images.test_labels.numpy()}
        engine.log("risk", losses_and_scores(arrays | labels)[0].mean())
        return arrays


@pytest.mark.parametrize(
    ("cheat", "name", "said"),
    [
        (StandardisesByTestRows, "diabetes_regression", "held-out truth moves mean"),
        (StopsByTestImages, "split_digits", "held-out truth reaches what is given to fit"),
        (TrainsOnAnotherLabel, "active_digits", "held-out truth reaches what is given to fit"),
        (TunesByTheTestPool, "active_testing_digits", "held-out truth reaches what is logged risk"),
    ],
)
def test_law_catches_cheats_on_tables_images_and_pools(cheat, name, said):
    """The law's own world lies below these tasks, not their data."""
    with pytest.raises(AssertionError, match=said):
        truth.the_held_out_truth_moves_nothing_else(cheat, truth.smallest(registry.task(name)), set())


def test_a_task_without_data_of_its_own_says_so():
    with pytest.raises(AttributeError, match="SplitMNIST has no data of its own"):
        SplitMNIST(truth.smallest(registry.task("split_digits"))).own_data("test")
