"""What holds on an accelerator: `pytest -m gpu`. Without one these tests are skipped."""

from functools import partial

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

from bench import networks, priors
from bench.contract import Batch, Budget, Problem
from bench.engine import fitting
from bench.engine.engine import Engine, TrainerOptions
from bench.engine.watch import Watch
from bench.errors import Diverged
from bench.likelihoods import Categorical
from bench.methods.map import MAP
from bench.methods.mfvi import MFVI
from bench.methods.radial import Radial
from bench.runs import runner
from bench.runs.plan import Plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator"),
]


@pytest.fixture
def problem():
    """Random images of ten classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 1, 28, 28, generator=generator)
    targets = torch.randint(10, (40,), generator=generator)
    return Problem(networks.lenet, Categorical(), priors.normal(), TensorDataset(inputs, targets), None, 40)


def engine(kind, accelerator="gpu", seed=0, precision="32-true", **settings):
    options = TrainerOptions(accelerator=accelerator, devices=1, precision=precision)
    return Engine(kind, kind.settings_class(**settings), seed, trainer=options)


def run_of(method, folder, **values):
    values = {"trainer": {"accelerator": "gpu", "devices": 1}, "preset": "smoke", "out": folder} | values
    return runner.execute(Plan(method=method, task="split_digits", threads=1, **values)).record


def test_a_fit_without_noise_is_that_of_a_processor(problem):
    """But for single weights whose gradient is a rounding error: Adam moves them by its rate all the same."""

    def fitted(where, epochs=2):
        fit = engine(MAP, where).fit(problem, Budget(epochs, 20))
        return parameters_to_vector(fit.network.parameters()).cpu()

    def far(one, other):
        return (one - other).square().mean().sqrt() / MAP.settings_class().learning_rate

    on_gpu, on_cpu = fitted("gpu"), fitted("cpu")
    assert far(on_gpu, on_cpu) < 0.1
    assert far(on_gpu, fitted("cpu", 1)) > 0.5


@pytest.mark.parametrize("kind", [MAP, MFVI, Radial])
def test_a_training_step_does_not_wait_for_the_device(kind, problem):
    method = kind(problem, kind.settings_class()).to("cuda")
    method.generator = torch.Generator("cuda").manual_seed(0)
    optimizer = method.configure_optimizers()
    batch = Batch(*(part.cuda() for part in problem.train.tensors))

    def step():
        optimizer.zero_grad(set_to_none=True)
        method.training_step(batch, 0)["loss"].backward()
        optimizer.step()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_same_seed_gives_the_same_predictions(problem):
    inputs = problem.train.tensors[0]
    found = []
    for _ in range(2):
        own = engine(MFVI)
        found.append(own.predict(own.fit(problem, Budget(2, 20)), inputs, 4).log_probs)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fits", [1, 3])
def test_stopped_fits_go_on_with_their_noise(fits, problem, tmp_path, monkeypatch):
    """Alone and side by side; checkpoints hold states of the device's generator, of finished fits too."""

    class Stops(Watch):
        def on_train_epoch_start(self, trainer, module):
            super().on_train_epoch_start(trainer, module)
            if trainer.current_epoch == 2:
                raise MemoryError

    def fitted(folder):
        options = TrainerOptions(accelerator="gpu", devices=1, stacked=True)
        own = Engine(MFVI, MFVI.settings_class(), 0, tmp_path / folder, options, checkpoint_seconds=0)
        return own.fit_many([posed] * fits, Budget(4, 20))

    small = partial(networks.mlp, 784, 10, (20,))
    posed = Problem(small, problem.likelihood, problem.prior, problem.train, None, 40)
    whole = fitted("whole")
    with monkeypatch.context() as patched:
        patched.setattr(fitting, "Watch", Stops)
        with pytest.raises(MemoryError):
            fitted("stopped")
    for again in (fitted("stopped"), fitted("stopped")):
        for first, second in zip(whole, again, strict=True):
            assert torch.equal(first.generator.get_state(), second.generator.get_state())
            for one, other in zip(first.parameters(), second.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_divergence_is_found_on_the_device(problem):
    inputs, targets = problem.train.tensors
    data = TensorDataset(torch.where(torch.arange(40)[:, None, None, None] == 7, torch.nan, inputs), targets)
    broken = Problem(problem.network, problem.likelihood, problem.prior, data, None, 40)
    with pytest.raises(Diverged, match="step"):
        engine(MAP).fit(broken, Budget(2, 20))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_completes_and_says_where_it_was_made(precision, tmp_path):
    record = run_of("mfvi", tmp_path, trainer={"accelerator": "gpu", "devices": 1, "precision": precision})
    assert record.status == "completed"
    assert torch.cuda.get_device_name() in str(record.environment)


def test_many_fits_side_by_side_are_those_made_alone(problem):
    small = partial(networks.mlp, 784, 10, (20,))
    posed = Problem(small, problem.likelihood, problem.prior, problem.train, None, 40)
    options = [TrainerOptions(accelerator="gpu", devices=1, stacked=stacked) for stacked in (True, False)]
    together, alone = (
        Engine(MAP, MAP.settings_class(), 0, trainer=own).fit_many([posed] * 3, Budget(2, 20))
        for own in options
    )
    for one, other in zip(together, alone, strict=True):
        for p, q in zip(one.network.parameters(), other.network.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
