"""The cost of a run, told beforehand: steps and parameters exactly, time by steps that last a known time."""

import time
from pathlib import Path

import pytest
import torch

from bench.contract import Batch, Noise
from bench.errors import UsageError
from bench.methods.map import MAP
from bench.runs.forecast import forecast
from bench.runs.plan import Plan

STEP = 0.1


class Slow(MAP):
    """MAP, each of whose steps lasts a known time."""

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of MAP, later."""
        time.sleep(STEP)
        return super().loss_terms(batch, noise)


class Pretrains(Slow):
    """The same after three epochs that pass at once, in the first of its fits."""

    def __init__(self, problem, settings, start=None):
        super().__init__(problem, settings, start)
        self.extra_epochs = 3 if start is None else 0

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of MAP, later once the pretraining is over."""
        wait = 0 if self.epoch < self.extra_epochs else STEP
        time.sleep(wait)
        return MAP.loss_terms(self, batch, noise)


def plan(
    tmp_path: Path, method: str = "test_forecast:Slow", task: str = "split_digits", **settings: object
) -> Plan:
    return Plan(method=method, task=task, out=tmp_path, threads=1, **settings)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecast")
    return folder, forecast(plan(folder, task_settings={"epochs": 10}))


def test_time_is_that_of_the_steps_that_are_left_out(told):
    _, cost = told
    sleeping = cost.steps * STEP
    assert sleeping < cost.training < 1.5 * sleeping
    assert cost.seconds > cost.training + cost.prediction


def test_steps_that_pretrain_are_timed_by_themselves(told, tmp_path):
    """Timed as the pretraining is, a fit with ten costly epochs after it would cost next to nothing."""
    _, plain = told
    cost = forecast(plan(tmp_path, "test_forecast:Pretrains", task_settings={"epochs": 10}))
    sleeping = plain.steps * STEP
    assert cost.steps > plain.steps
    assert sleeping < cost.training < 1.5 * sleeping


@pytest.mark.parametrize("stacked", [True, False])
def test_fits_that_may_stop_early_are_told_whole(stacked, tmp_path):
    """Ten fits with patience; side by side they make as many steps, in less time."""
    settings = {"task_settings": {"epochs": 4}, "trainer": {"accelerator": "cpu", "stacked": stacked}}
    cost = forecast(plan(tmp_path, "map", "iris_depth", **settings))
    assert cost.unknown is None
    assert cost.may_stop
    assert (cost.fits, cost.steps) == (10, 10 * 4 * 7)


def test_steps_and_parameters_are_those_of_the_run(told, tmp_path):
    _, cost = told
    from bench.runs import runner

    record = runner.execute(plan(tmp_path, "map", task_settings={"epochs": 10})).record
    assert cost.steps == sum(fit.steps for fit in record.fits)
    assert cost.fits == len(record.fits)
    assert cost.parameters == cost.weights
    assert not cost.may_stop
    assert cost.unknown is None


def test_nothing_is_written(told):
    folder, _ = told
    assert not any(folder.iterdir())


def test_several_devices_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"^--dry-run tells the cost on one device"):
        forecast(plan(tmp_path, "map", trainer={"accelerator": "cpu", "devices": 2}))
