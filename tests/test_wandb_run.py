"""Weights & Biases: what an offline run holds, read back from its file."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest
import toys
import wandb
from plans import resolved
from wandb.proto.wandb_internal_pb2 import Record

from bench import cli
from bench.engine import watch
from bench.errors import Diverged
from bench.runs import runner, wandb_run
from bench.runs.events import Reader

SMOKE = ["run", "mfvi", "split_digits", "--preset", "smoke", "--threads", "1"]
TASK = "split_digits_epochs_1_test_samples_4"
"""The task of these runs, as W&B has it: identity split_digits+epochs=1,test_samples=4."""


# ---- reading


HEAD, BLOCK = 7, 2**15
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(content):
    """The records of a LevelDB log: blocks of 32 KiB, each chunk with checksum, length and kind before it."""
    assert content[:4] == b":W&B"
    at, parts = HEAD, []
    while at + HEAD <= len(content):
        if BLOCK - at % BLOCK < HEAD:  # too short for a chunk: padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + HEAD])
        parts.append(content[at + HEAD : at + HEAD + length])
        at += HEAD + length
        assert kind in ((WHOLE, FIRST) if len(parts) == 1 else (MIDDLE, LAST))
        if kind in (WHOLE, LAST):
            yield b"".join(parts)
            parts = []
    assert not parts


class Held:
    """What an offline run holds."""

    def __init__(self, path):
        self.rows, self.config, self.summary, self.exit_codes, self.artifacts = [], {}, {}, [], {}
        self.axes = {}
        for data in records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                self.rows.append(values(record.history.item))
            elif kind == "run":
                self.run = record.run
                self.config |= values(record.run.config.update)
            elif kind == "config":
                self.config |= values(record.config.update)
            elif kind == "summary":
                self.summary |= values(record.summary.update)
            elif kind == "metric":
                self.axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
            elif kind == "artifact":
                files = {entry.path: entry for entry in record.artifact.manifest.contents}
                self.artifacts[record.artifact.type] = files
            elif kind == "exit":
                self.exit_codes.append(record.exit.exit_code)

    def curve(self, name):
        """The values of a name, in order."""
        return [row[name] for row in self.rows if name in row]

    def numbers(self):
        """The rows without what W&B adds to them, which begins with `_`."""
        return [{k: v for k, v in row.items() if not k.startswith("_")} for row in self.rows]


def values(items):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def held(folder):
    """What the offline runs below a folder hold, oldest first; waits for the service that writes it."""
    paths = sorted(folder.rglob("*.wandb"), key=lambda path: path.parent.name)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(AssertionError):  # half a record
            found = [Held(path) for path in paths]
            if all(one.exit_codes for one in found):
                return found
        time.sleep(0.05)
    return pytest.fail("the end of a run was not written")


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A finished offline run: its folder and what its process said."""
    folder = tmp_path_factory.mktemp("offline")
    done = toys.call([*SMOKE, "--logger", "wandb-offline"], folder)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture(autouse=True)
def own_settings(monkeypatch, tmp_path):
    """No setting of the user's, and nothing left in the user's folders."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


# ---- a finished run


@pytest.mark.slow
def test_a_finished_run_holds_settings_numbers_tables_figures_and_record(offline):
    folder, _ = offline
    (path,) = folder.rglob("record.json")
    record = json.loads(path.read_text())
    (found,) = held(folder)
    assert found.run.project == "posterior-bench"
    assert found.run.run_group == f"{record['task']['identity']}/{record['method']['identity']}"
    assert found.run.display_name == "mfvi smoke seed 0"
    assert set(found.run.tags) == {"split_digits", "mfvi", "smoke", f"v{record['provenance']['version']}"}
    method = {"name": "mfvi", "identity": "mfvi", "members": 1}
    assert found.config["method"] == method | record["method"]["settings"]
    task = {"name": "split_digits", "identity": record["task"]["identity"]}
    assert found.config["task"] == task | record["task"]["settings"]
    assert (found.config["preset"], found.config["seed"]) == ("smoke", 0)
    for part in ("environment", "provenance"):
        assert found.config[part] == record[part]
    assert found.config["trainer"] | {"workers": None} == record["trainer"]  # no number depends on these
    assert found.exit_codes == [0]

    logged = [
        float(line.rpartition(",")[2])
        for line in (path.parent / "curves.csv").read_text().splitlines()
        if line.startswith("average_accuracy (validation)")
    ]
    assert found.curve(f"{TASK}/validation/average_accuracy") == logged
    stages = [f"step_{t}_{t}_of_5" for t in range(1, 6)]
    assert [len(found.curve(f"{TASK}/epochs/{stage}/loss")) for stage in stages] == 5 * [1]
    assert [len(found.curve(f"{TASK}/steps/{stage}/loss")) for stage in stages] == 5 * [1]
    steps = found.curve("trainer/global_step")
    assert steps == sorted(steps)
    assert steps[-1] == sum(fit["steps"] for fit in record["fits"])
    axis = {name.split("/")[1]: axis for name, axis in found.axes.items() if name.startswith(TASK)}
    by_steps = dict.fromkeys(("steps", "epochs"), "trainer/global_step")
    assert axis == by_steps | {"validation": f"{TASK}/validation/step"}

    final = {name.removeprefix(f"{TASK}/metrics/"): value for name, value in found.summary.items()}
    assert {name: final[name] for name in record["metrics"]} == record["metrics"]
    assert final["status"] == "completed"
    names = set(found.rows[-1])
    figures = {path.stem for path in (path.parent / "figures").glob("*.png")}
    assert len(figures) == 2
    assert {f"{TASK}/figures/{name}._type" for name in figures} <= names
    assert {f"{TASK}/tables/{name}.nrows" for name in ("metrics", "fits")} <= names
    files = found.artifacts["record"]
    sizes = {name: (path.parent / name).stat().st_size for name in ("record.json", "arrays.safetensors")}
    assert {name: file.size for name, file in files.items()} == sizes


@pytest.mark.slow
def test_offline_run_keeps_its_files_in_its_directory_and_standard_output_clean(offline):
    folder, done = offline
    (path,) = folder.rglob("record.json")
    assert done.stdout == f"{path.parent.relative_to(folder)}\n"
    assert [p.name for p in folder.iterdir()] == ["runs"]
    (file,) = folder.rglob("*.wandb")
    assert path.parent / "wandb" in file.parents


@pytest.mark.slow
def test_two_seeds_of_one_process_are_two_runs_of_a_group(tmp_path):
    options = {"preset": "smoke", "threads": 1, "out": tmp_path, "loggers": ("wandb-offline",)}
    for seed in (0, 1):
        runner.run("map", "split_digits", seed=seed, **options)
    first, second = held(tmp_path)
    assert first.run.run_group == second.run.run_group != ""
    assert first.run.run_id != second.run.run_id
    assert [found.config["seed"] for found in (first, second)] == [0, 1]
    assert first.exit_codes == second.exit_codes == [0]
    assert first.curve(f"{TASK}/steps/step_1_1_of_5/loss") != second.curve(f"{TASK}/steps/step_1_1_of_5/loss")


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path):
    ddp = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    done = toys.call([*SMOKE, *ddp, "--logger", "wandb-offline"], tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = held(tmp_path)
    assert found.exit_codes == [0]
    assert found.config["trainer"]["devices"] == 2
    assert len(found.curve(f"{TASK}/validation/average_accuracy")) == 5


# ---- a run that ends otherwise


@pytest.mark.slow
def test_diverged_run_ends_with_its_exit_code_and_shows_the_nan(tmp_path, capsys):
    command = ["run", "toys:TurnsNaN", *SMOKE[2:], "--logger", "wandb-offline", "--out", str(tmp_path)]
    assert cli.main(command) == Diverged.exit_code
    err = capsys.readouterr().err
    assert len([line for line in err.splitlines() if line.startswith("bench: ")]) == 1
    assert "Traceback" not in err
    (found,) = held(tmp_path)
    assert found.exit_codes == [Diverged.exit_code]
    assert found.summary["status"] == "diverged"
    (loss,) = found.curve(f"{TASK}/steps/step_1_1_of_5/loss")
    assert loss != loss  # NaN
    assert "record" in found.artifacts


@pytest.mark.slow
def test_a_crash_has_its_exit_code(tmp_path, capsys):
    command = ["run", "toys:HasBug", *SMOKE[2:], "--logger", "wandb-offline", "--out", str(tmp_path)]
    assert cli.main(command) == 1
    (found,) = held(tmp_path)
    assert found.exit_codes == [1]
    assert found.summary["status"] == "failed"


@pytest.mark.slow
def test_a_stopped_run_goes_on_in_the_same_run(tmp_path):
    """Stopped in step 3 by a scheduler; the second start's process reads steps 1 and 2 from checkpoints."""
    command = ["run", "toys:Waits", *SMOKE[2:], "--logger", "wandb-offline"]
    process = toys.start(command, tmp_path, env=toys.environment(WAITS_IN_FIT="3"))
    end = time.monotonic() + 120
    while "stage name=step 3" not in "".join(path.read_text() for path in tmp_path.rglob("log.txt")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    done = toys.call(command, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = held(tmp_path)
    assert first.run.run_id == second.run.run_id
    assert first.exit_codes == [130]
    assert second.exit_codes == [0]
    steps = [found.curve("trainer/global_step") for found in (first, second)]
    assert max(steps[0]) < min(steps[1])
    for t in range(1, 6):
        (_,) = (v for found in (first, second) for v in found.curve(f"{TASK}/epochs/step_{t}_{t}_of_5/loss"))
    accuracies = [found.curve(f"{TASK}/validation/average_accuracy") for found in (first, second)]
    assert [len(part) for part in accuracies] == [2, 3]


# ---- what is told, by made-up events


def events():
    """Of two stages with three fits: two of 120 steps in three epochs, one of 10 steps in ten epochs.

    The second stage logs two numbers after its fit, at the same step.
    """
    told, before = [], 0
    for number, fits in ((1, (120, 120)), (2, (10,))):
        told.append(("stage", {"name": "one name", "number": number, "of": 2, "steps": before}))
        for length in fits:
            epochs = 10 if length == 10 else 3
            for epoch in range(1, epochs + 1):
                ends = epoch * length // epochs
                last = length if epoch == epochs else None
                for step in range((epoch - 1) * length // epochs + 1, ends + 1):
                    if step % watch.STEPS_TOLD == 0 or step == last:
                        told.append(("steps", {"loss": 1.0 / step, "steps": before + step}))
                told.append(("epoch", {"epoch": epoch, "of": epochs, "loss": epoch, "steps": before + ends}))
            before += length
            told.append(("fit", {"was_there": False, "steps": before}))
        for size in range(number):
            told.append(("log", {"name": "nll", "value": 0.5, "step": size, "steps": before}))
    return told


@contextmanager
def started(folder, told, warn=None):
    """A start of a run in a folder, to which events are told; the block may end it."""
    choice = resolved("map", "split_digits", "smoke", {}, {})
    asked = {"method": {"members": 1}, "task": {}, "seed": 3}
    folder.mkdir(exist_ok=True)
    with wandb_run.logging("wandb-offline", folder, choice, asked, warn or pytest.fail) as observe:
        for event, given in told:
            observe(event, dict(given))
        yield observe


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The numbers of a run that was told all events in one start."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with started(folder, events()):
        pass
    (found,) = held(folder)
    return found.numbers()


def test_every_number_has_a_name_and_a_place_of_its_own(undisturbed):
    seen = [
        (name, row["trainer/global_step"]) for row in undisturbed for name in row if name.endswith("loss")
    ]
    assert len(seen) == len(set(seen))
    at = {}
    for name, steps in seen:
        at.setdefault(name.removeprefix(f"{TASK}/"), []).append(steps)
    assert at == {
        "steps/one_name_1_of_2/loss": [50, 100, 120],
        "epochs/one_name_1_of_2/loss": [40, 80, 120],
        "steps/one_name_1_of_2_fit_2/loss": [170, 220, 240],
        "epochs/one_name_1_of_2_fit_2/loss": [160, 200, 240],
        "steps/one_name_2_of_2/loss": [250],
        "epochs/one_name_2_of_2/loss": [250],  # not from 241 on
    }
    name = f"{TASK}/validation/nll"
    logged = [
        (row["trainer/global_step"], row[f"{TASK}/validation/step"]) for row in undisturbed if name in row
    ]
    assert logged == [(240, 0), (250, 0), (250, 1)]


@pytest.mark.parametrize("stop", [3, 13, -1])
def test_a_run_that_goes_on_repeats_nothing(tmp_path, undisturbed, stop):
    """It goes on two events before the stop, as from a checkpoint; fits before it are read."""
    told = events()[:stop]
    with suppress(KeyboardInterrupt), started(tmp_path / "run", told):
        raise KeyboardInterrupt
    time.sleep(1.1)  # W&B names folders by the second
    goes_on = len(told) - 2
    again = [e for i, e in enumerate(events()) if i >= goes_on or e[0] not in ("steps", "epoch")]
    with started(tmp_path / "run", again):
        pass
    first, second = held(tmp_path)
    assert first.run.run_id == second.run.run_id
    assert (first.exit_codes, second.exit_codes) == ([130], [0])
    numbers = first.numbers() + second.numbers()
    assert len({json.dumps(row, sort_keys=True) for row in numbers}) == len(numbers)
    extra = [row for row in numbers if row not in undisturbed]  # an epoch that the stop made the last
    assert [row for row in numbers if row not in extra] == undisturbed
    assert len(extra) <= 1
    assert all("trainer/epoch" in row for row in extra)


def test_trouble_with_it_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch):
    def broken(self, row):
        raise ConnectionResetError("the service is gone\nand so on")

    monkeypatch.setattr(wandb.Run, "log", broken)
    monkeypatch.setattr(wandb_run, "_SENT_EVERY", 0.0)
    told = []
    with started(tmp_path, events(), told.append):
        pass
    (sentence,) = told
    assert sentence.startswith("Weights & Biases: ConnectionResetError: the service is gone; wandb sync")


def test_names_hold_letters_and_figures_alone():
    assert (
        wandb_run.key("a+b=1,c", "steps", "step 2, coresets (2 of 5)")
        == "a_b_1_c/steps/step_2_coresets_2_of_5"
    )


def test_a_stage_that_comes_again_goes_on_counting_its_fits():
    reader, places = Reader(), []
    for _ in range(2):
        reader.read("stage", {"name": "again", "number": 1, "of": 1})
        places.append(reader.place)
        reader.read("fit", {})
    assert places == ["again", "again, fit 2"]


def steps_of(out, **options):
    """The numbers of steps that a run tells, its losses there, and the steps of its fits."""
    told = []
    options = {"preset": "smoke", "threads": 1, "out": out} | options
    run = runner.run("map", "split_digits", observers=(lambda *event: told.append(event),), **options)
    found = [values for event, values in told if event == "steps"]
    lengths = [fit.steps for fit in run.record.fits]
    return [values["steps"] for values in found], [values["loss"] for values in found], lengths


def test_steps_are_means_over_so_many_steps(tmp_path, monkeypatch):
    """Over every step each is told; over two, the mean of two, and at a fit's end of what is left."""
    monkeypatch.setattr(watch, "STEPS_TOLD", 1)
    steps, losses, lengths = steps_of(tmp_path / "one")
    assert steps == list(range(1, sum(lengths) + 1))
    monkeypatch.setattr(watch, "STEPS_TOLD", 2)
    pairs = steps_of(tmp_path / "two")
    assert set(lengths) == {2, 3}
    at, expected, before = [], [], 0
    for length in lengths:
        for first in range(0, length, 2):
            part = losses[before + first : before + min(first + 2, length)]
            at.append(before + first + len(part))
            expected.append(sum(part) / len(part))
        before += length
    assert pairs[0] == at
    assert pairs[1] == pytest.approx(expected, rel=1e-6)


def test_steps_of_fits_side_by_side_count_for_each(tmp_path):
    steps, _, lengths = steps_of(tmp_path, members=2, trainer={"stacked": True})
    assert steps == [sum(lengths[: 2 * stage]) for stage in range(1, 6)]


# ---- without it


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("wandb", "tensorboard"):
            raise ImportError(f"{name} is blocked in this test")

import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("wandb", "tensorboard") else find(name, *more)
sys.meta_path.insert(0, Blocked())
from bench.cli import main

assert main(sys.argv[1:]) == 0
print("finished without wandb", file=sys.stderr)
sys.exit(main([*sys.argv[1:], "--logger", "wandb-offline", "--seed", "1"]))
"""


@pytest.mark.slow
def test_run_without_wandb_needs_no_wandb(tmp_path):
    """The block is real: in the second run, which asks for wandb, it cannot be had."""
    command = [sys.executable, "-c", BLOCKED, *SMOKE]
    environment = toys.environment()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "finished without wandb" in done.stderr, done.stderr
    assert not list(tmp_path.rglob("wandb"))
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("bench: ")]
    assert line == "bench: --logger wandb-offline needs wandb: pip install 'posterior-bench[wandb]'"
    assert not list(tmp_path.rglob("*seed1"))


@pytest.mark.slow
def test_online_without_a_login_is_one_line(tmp_path, capsys, monkeypatch):
    """Nobody to ask for a key: no terminal, and no key in the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert cli.main([*SMOKE, "--logger", "wandb", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("bench: ")]
    assert line.startswith("bench: --logger wandb: ")
    assert "Traceback" not in err
