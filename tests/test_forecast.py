"""The cost of a run, told beforehand: steps and parameters exactly, time by steps that last a known time."""

import time
from pathlib import Path

import pytest
import torch

from bench.contract import Batch, Noise
from bench.errors import UsageError
from bench.forecast import forecast
from bench.methods.map import MAP
from bench.plan import Plan

STEP = 0.1


class Slow(MAP):
    """MAP, each of whose steps lasts a known time."""

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of MAP, later."""
        time.sleep(STEP)
        return super().loss_terms(batch, noise)


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


def test_steps_and_parameters_are_those_of_the_run(told, tmp_path):
    _, cost = told
    from bench import runner

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
