"""Methods and tasks with one known behaviour each, named `toys:Class`, and processes that run them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import altair as alt
import torch

from bench.contract import Arrays, Batch, Comparison, FinishedRun, Noise, Prediction, Problem
from bench.errors import UsageError
from bench.methods.map import MAP
from bench.methods.mfvi import MFVI
from bench.networks import mlp
from bench.predictions import Categorical
from bench.settings import Count, Whole, settings
from bench.tasks import split_mnist
from bench.tasks.split_mnist import SplitMNIST

FEW = {"epochs": 1, "test_samples": 4}
"""Settings of split tasks that take a second."""


@settings
class FewSettings(split_mnist.Settings):
    """The split task on digits, in a second."""

    dataset: Literal["digits"] = "digits"
    """Images."""
    epochs: Count = 1
    """Epochs per step."""
    test_samples: Count = 4
    """Weight samples S per prediction."""


@settings
class NaNSettings:
    """Settings of a method whose loss becomes NaN."""

    at_step: Whole = 3
    """Training steps, counted over the fit, before the loss is NaN."""
    learning_rate: float = 1e-3
    """Step size of the optimiser."""
    optimizer: str = "adam"
    """Name of the optimiser."""


class TurnsNaN(MAP):
    """The loss of training step `at_step` is NaN, in every fit that has so many steps."""

    settings_class = NaNSettings
    steps_taken = 0

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        """The loss of MAP, or NaN."""
        self.steps_taken += 1
        factor = float("nan") if self.steps_taken == self.settings.at_step else 1.0
        return {name: value * factor for name, value in super().training_step(batch, batch_idx).items()}


class NeverConverges(MFVI):
    """Has a density, and a loss that is NaN."""

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
        """The terms of MFVI, the first as NaN."""
        likelihood_term, prior_term = super().loss_terms(batch, noise)
        return likelihood_term * float("nan"), prior_term


class PredictsNaN(MAP):
    """Trains well and predicts NaN."""

    def predict(self, inputs: torch.Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """A prediction that cannot be one."""
        prediction = super().predict(inputs, num_samples, generator)
        return type(prediction)(prediction.log_probs * float("nan"))


class PredictsHuge(MAP):
    """Trains well and predicts numbers that float16 does not hold."""

    def predict(self, inputs: torch.Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """A prediction that is one, and a million off."""
        prediction = super().predict(inputs, num_samples, generator)
        return replace(prediction, mean=prediction.mean + 1e6)


class HasBug(MAP):
    """Raises in its first training step, with a message of two lines."""

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
        """Never returns."""
        raise RuntimeError("this method has a bug\nand says so in two lines")


class MissesFile(MAP):
    """Raises what a full disk also raises, but is a bug of the method."""

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
        """Never returns."""
        raise FileNotFoundError(2, "No such file", "table.bin")


class CannotGoOn(MAP):
    """MAP without the capability that sequential tasks need."""

    provides = MAP.provides - {"sequential"}


class OnlyFirstStep(MFVI):
    """Learns the first fit and returns every later start unchanged."""

    def __init__(self, problem: Any, settings: Any, start: Any = None) -> None:
        super().__init__(problem, settings, start)
        self.trains = start is None


class Waits(MFVI):
    """MFVI; in the fit whose number, counted from 1, is in the environment's WAITS_IN_FIT it never ends."""

    def __init__(self, problem: Any, settings: Any, start: Any = None) -> None:
        super().__init__(problem, settings, start)
        self.number = 1 if start is None else start.number + 1

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        """A step of MFVI, or a wait for a signal."""
        while os.environ.get("WAITS_IN_FIT") == str(self.number):
            time.sleep(0.02)
        return super().training_step(batch, batch_idx)


class Signals(MFVI):
    """Sends its process the signal `number`, or that in the environment's SIGNALS, at every training step."""

    number: int | None = None

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        """A step of MFVI."""
        number = self.number or int(os.environ.get("SIGNALS", 0))
        if number:
            os.kill(os.getpid(), number)
        return super().training_step(batch, batch_idx)


class TurnsInterrupts(Signals):
    """As `Signals`; what answers the interrupt makes an error of it, as C extensions and loaders do."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        """A step of MFVI."""
        try:
            return super().training_step(batch, batch_idx)
        except KeyboardInterrupt:
            raise RuntimeError("initialization failed") from None


class KilledOnce(Waits):
    """Kills its process in the second fit if there is the file in the environment's KILLS, and removes it."""

    variable = "KILLS"

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        """A step of MFVI, or none."""
        file = Path(os.environ.get(self.variable, os.devnull))
        if self.number == 2 and file.is_file():
            self.kills(file)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def kills(self, file: Path) -> None:
        """What it does before."""
        file.unlink()


class KilledAlways(KilledOnce):
    """Kills its process in the second fit, as long as there is the file in the environment's KILLS_ALWAYS."""

    variable = "KILLS_ALWAYS"

    def kills(self, file: Path) -> None:
        """What it does before."""


class Exits(MAP):
    """Ends the process in its first training step, as if all were well."""

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
        """Never returns."""
        sys.exit(0)


class SaysNonsense(MAP):
    """Has diagnostics of which one is a number."""

    def diagnostics(self, inputs: Any = None) -> dict[str, Any]:
        """Of the fit; none of predictions."""
        return {} if inputs is not None else {"good": 1, "bad": float("nan"), "worse": "no number"}


class Recorder:
    """An engine that fits nothing and keeps what it was asked; fitted methods are numbered from 1."""

    def __init__(self) -> None:
        self.problems: list[Any] = []
        self.budgets: list[Any] = []
        self.starts: list[Any] = []
        self.inputs: list[torch.Tensor] = []
        self.predictors: list[int] = []
        self.stages: list[tuple[Any, ...]] = []
        self.logged: list[tuple[Any, ...]] = []

    def fit(self, problem: Any, budget: Any, start: Any = None, probe: Any = None) -> Any:
        """Fits nothing."""
        self.problems.append(problem)
        self.budgets.append(budget)
        self.starts.append(start)
        return Fitted(len(self.problems))

    def fit_stages(self, stages: Any, pose: Any, budget: Any) -> Any:
        """Fits nothing, stage after stage."""
        for k, stage in enumerate(stages):
            self.stage(stage, k + 1, len(stages))
            yield self.fit(pose(k), budget)

    def predict(self, method: Any, inputs: torch.Tensor, num_samples: int) -> Prediction:
        """Of method 1 all classes are alike; of method k class k - 1 is likelier, to tell who predicted."""
        self.inputs.append(inputs)
        self.predictors.append(method.number)
        outputs = torch.zeros(num_samples, len(inputs), 10)
        outputs[..., (method.number - 1) % 10] = float(method.number > 1)
        return Categorical(outputs.log_softmax(-1))

    def log(self, *arguments: Any) -> None:
        """Keeps them."""
        self.logged.append(arguments)

    def stage(self, *arguments: Any) -> None:
        """Keeps them."""
        self.stages.append(arguments)


class Reader(Recorder):
    """Keeps the images of `Stored` inputs; predicts of each by its brightness, and draws differ.

    Args:
        classes: Number of classes.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.classes = classes

    def predict(self, method: Any, inputs: Any, num_samples: int) -> Prediction:
        """Brighter images are of higher classes, and less surely so under later draws."""
        images = inputs.finish(inputs.read(torch.arange(len(inputs)))[0], None)
        self.inputs.append(images)
        level = images.mean((1, 2, 3))
        logits = -((level[:, None] - torch.linspace(-1, 1, self.classes)) ** 2)
        tempers = torch.arange(1, 1 + num_samples)[:, None, None]
        return Categorical((logits / tempers).log_softmax(-1))


class Fitted:
    """A fitted method that knows its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def as_prior(self) -> str:
        """Its name."""
        return f"posterior {self.number}"


class OwnTask(SplitMNIST):
    """A user's own task."""

    settings_class = FewSettings


class Held(OwnTask):
    """Waits before its first fit, as long as there is the file in the environment's HELD."""

    def run(self, engine: Any) -> Arrays:
        """The run of OwnTask, in its time."""
        while Path(os.environ.get("HELD", "")).is_file():
            time.sleep(0.02)
        return super().run(engine)


class EqualParameters(OwnTask):
    """A task that compares methods at equal numbers of parameters."""

    def problem(self, step: int = 0, prior: Any = None) -> Problem:
        """The problem of a step, with 20 hidden units at width 1."""
        pixels = self.images.train_inputs[0].numel()

        def network(dropout: float = 0.0, width: float = 1.0) -> torch.nn.Module:
            return mlp(pixels, 10, [round(20 * width**2)], dropout=dropout)

        return replace(super().problem(step, prior), network=network, equal_parameters=True)


class AsksForHalf(OwnTask):
    """A task that asks for half of the draws that its settings say."""

    def run(self, engine: Any) -> Arrays:
        """The run under an engine that is asked for half."""
        predict = engine.predict
        engine.predict = lambda method, inputs, num_samples: predict(method, inputs, num_samples // 2)
        return super().run(engine)


class Peeks(OwnTask):
    """A task whose run reads the test labels."""

    def run(self, engine: Any) -> Arrays:
        """Reads what it must not."""
        return self.targets()


class CannotScore(OwnTask):
    """A task whose score has a bug."""

    def score(self, arrays: Arrays) -> dict[str, float]:
        """Lacks most metrics."""
        return {"average_accuracy": 1.0}


class CannotDraw(OwnTask):
    """A task whose figures have a bug."""

    def figures(self, arrays: Arrays) -> Any:
        """Never returns."""
        raise RuntimeError("no pen\nand no paper")


class CannotCurve(OwnTask):
    """A task whose curves have a bug, of the kind that says that the user is wrong."""

    def curves(self, arrays: Arrays) -> Any:
        """Never returns."""
        raise UsageError("no curve")


class CurvesOfNothing(OwnTask):
    """A task whose curves are no points."""

    def curves(self, arrays: Arrays) -> Any:
        """No rows."""
        return [("accuracy", "pair 1", 1.0, "high")]


class ComparesItself(OwnTask):
    """A task that says itself how its runs stand together."""

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """A figure named like one of the other tasks of its kind, a row per run, and a sentence."""
        chart = alt.Chart(alt.Data(values=[{"x": run.seed} for run in runs])).mark_point().encode(x="x:Q")
        rows = [[run.method_identity, str(run.seed)] for run in runs]
        names = ", ".join(sorted(runs[0].arrays))
        return Comparison({"accuracy": chart}, ["method", "seed"], rows, [f"{len(runs)} runs kept {names}"])


class LogsInfinity(OwnTask):
    """A task that logs a number that is not finite."""

    def run(self, engine: Any) -> Arrays:
        """The run, and an infinite NLL."""
        engine.log("nll", float("inf"), 0)
        return super().run(engine)


def environment(**more: str) -> dict[str, str]:
    """The environment of a `bench` process that can import this module."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    path = os.pathsep.join([str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return own | {"PYTHONPATH": path.rstrip(os.pathsep), "COLUMNS": "200"} | more


def told(err: str) -> str:
    """Standard error without the lines that show progress."""
    return "".join(line for line in err.splitlines(True) if not re.match(r"\d\d:\d\d:\d\d  +\d+ %  ", line))


def start(arguments: list[str], cwd: Path, **options: Any) -> subprocess.Popen:
    """Starts `python -m bench ARGUMENTS` in a folder."""
    command = [sys.executable, "-m", "bench", *arguments]
    given = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, **given | options)


def call(arguments: list[str], cwd: Path, **options: Any) -> subprocess.CompletedProcess:
    """Runs `python -m bench ARGUMENTS` in a folder to its end."""
    process = start(arguments, cwd, **options)
    out, err = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
