"""Plans: plain values, checked when made, and a command line that asks for the same run."""

import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import get_type_hints

import pytest

import bench
from bench import cli
from bench.commands.running import _run_parser
from bench.engine.trainer import TrainerOptions
from bench.errors import UsageError
from bench.runs import runner
from bench.runs.plan import Plan, options
from bench.runs.resolution import resolve
from bench.settings import build

MAIN = Path(__file__).resolve().parent.parent
FULL = {
    "preset": "smoke",
    "seed": 3,
    "members": 2,
    "method_settings": {"learning_rate": 0.01, "train_samples": 4},
    "task_settings": {"batch_size": None, "epochs": 2},
    "threads": 1,
    "trainer": {"precision": "bf16-mixed", "stacked": False, "num_nodes": 2, "strategy": "ddp; rm -r $HOME"},
}


def plan(**values):
    """A plan for mfvi on split_digits."""
    return build(Plan, {"method": "mfvi", "task": "split_digits", **values})


def test_names_alone_are_the_preset_standard_under_seed_0():
    assert plan().command() == "bench run mfvi split_digits --seed 0"
    chosen = "bench run mfvi split_digits --trainer.devices 2 --seed 0 --threads 3"
    assert plan().command(threads=3, processes=2) == chosen
    assert str(plan()) == "mfvi split_digits seed 0"
    assert resolve(plan()).directory(0).parts == ("split_digits", "mfvi", "standard-seed0")


@pytest.mark.parametrize("values", [{}, FULL])
def test_command_line_makes_the_same_plan(monkeypatch, values):
    """What a record gives as its command is read back by the command line as the plan that it came from."""
    seen = []

    def execute(plan, observers):
        seen.append(plan)
        raise UsageError("enough")

    monkeypatch.setattr(runner, "execute", execute)
    _, *arguments = shlex.split(plan(**values).command())
    assert cli.main(arguments) == UsageError.exit_code
    (read,) = seen
    assert resolve(read) == resolve(plan(**values))
    trainer = asdict(TrainerOptions(**values.get("trainer", {})))  # the command line gives all of them
    assert asdict(read) == asdict(plan(**values)) | {"trainer": trainer}


def test_every_option_is_written_once():
    """The keywords of `bench.run` and the flags of `bench run` are the plan's fields, in order and type."""
    shown = inspect.signature(bench.run).parameters
    assert [*shown] == [*(field.name for field in fields(Plan)), "observers"]
    kinds = get_type_hints(Plan)
    for field in fields(Plan)[2:]:
        assert shown[field.name].annotation == kinds[field.name]
        assert shown[field.name].default == ({} if field.default is MISSING else field.default)
        assert options()[field.name].help
    given = {"method_settings", "task_settings", "trainer"}  # by flags of their own fields
    flags = set(_run_parser(None, None, "standard").flags())
    assert {f"--{name.replace('_', '-')}" for name in options().keys() - given - {"loggers"}} < flags
    assert "--logger" in flags


def test_plans_are_data():
    """Equal if their values are, not to be changed, and made again of their values."""
    assert plan(**FULL) == plan(**FULL) != plan(**FULL | {"seed": 4})
    with pytest.raises(AttributeError):
        plan().seed = 1
    assert build(Plan, asdict(plan(**FULL))) == plan(**FULL)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "--seed -1: must be 0 or more"),
        ({"seed": 0.5}, "--seed 0.5: should be a valid integer"),
        ({"members": 0}, "--members 0: must be 1 or more"),
        ({"threads": 0}, "--threads 0: must be 1 or more"),
        ({"loggers": ["on"]}, "--loggers on: should be 'csv', 'tensorboard', 'wandb' or 'wandb-offline'"),
        ({"method_settings": [1]}, r"--method-settings \[1\]: should be a valid dictionary"),
        ({"data_dir": 3}, "--data-dir 3: should be a valid string"),
        ({"sed": 1}, "--sed 1: Unexpected keyword argument"),
    ],
)
def test_wrong_value_is_one_line_that_names_the_flag(values, message):
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        plan(**values)
    assert "\n" not in str(caught.value)


CALLS = {
    'bench.run("map", "toy_regression", seed=3, out=Path("runs"), loggers=("csv",), observers=())': "",
    'bench.run(method="map", task="toy_regression", members=None, trainer={"devices": 1}).record.metrics': "",
    'bench.run("map", "toy_regression", sed=3)': 'Unexpected keyword argument "sed"',
    'bench.run("map", "toy_regression", seed="3")': 'Argument "seed" to "run" has incompatible type "str"',
    'bench.run("map", "toy_regression", preset="paperr")': 'Argument "preset" to "run" has incompatible type',
    'bench.run("map")': 'Missing positional argument "task"',
}


def test_a_type_checker_knows_the_keywords_of_a_run(tmp_path):
    """Right calls pass, and each wrong one is an error; of the suite mypy reads what tells the keywords."""
    script = tmp_path / "calls.py"
    script.write_text("\n".join(["from pathlib import Path", "import bench", *CALLS]))
    names = ("__init__", "settings", "runs/plan", "runs/runner", "runs/events")
    told_by = [f"bench/{name}.py" for name in names]
    options = ["--follow-imports=skip", "--no-error-summary", "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, *told_by, str(script)]
    done = subprocess.run(command, cwd=MAIN, capture_output=True, text=True)
    assert not done.stderr
    errors = dict(re.findall(r"calls\.py:(\d+): error: (.*)", done.stdout))
    for line, error in enumerate(CALLS.values(), 3):
        assert errors.get(str(line), "").startswith(error), done.stdout
        assert bool(error) == (str(line) in errors), done.stdout
