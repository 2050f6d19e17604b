"""Loggers: each holds the numbers while the run goes on, and no run needs one."""

import csv
import io
import json
import os
import struct
import subprocess
import sys
from contextlib import contextmanager

import pytest
import toys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from bench import cli, loggers

SMOKE = ["run", "mfvi", "split_digits", "--preset", "smoke", "--threads", "1"]

# ---- csv and tensorboard


def events_of(*, stop=None):
    """Events of two stages, of an ensemble and of one fit; at most `stop` of them."""
    events = []
    for number, fits in ((1, 2), (2, 1)):
        events.append(("stage", {"name": "one name", "number": number, "of": 2}))
        for fit in range(1, fits + 1):
            place = {"fit": fit, "fits": fits}
            events += [("epoch", {"epoch": e, "loss": number + fit / e, "of": 3, **place}) for e in (1, 2, 3)]
            events.append(("fit", {"was_there": False, **place}))
        events.append(("log", {"name": "accuracy", "value": number / 2, "step": None}))
    return events[:stop]


def rows_of(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


def in_tensorboard(folder):
    """Tag -> (step, value)s, in order."""
    found = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }


def numbers_in(folder):
    """What both files hold."""
    board = folder / "tensorboard"
    return rows_of(folder / "log.csv"), in_tensorboard(board) if board.exists() else {}


@contextmanager
def both(folder):
    folder.mkdir(exist_ok=True)
    with loggers.logging(("csv", "tensorboard", "csv"), folder, None, 0) as observers:
        assert len(observers) == 2

        def tell(events):
            for event in events:
                for observer in observers:
                    observer(*event)

        yield tell


def test_numbers_are_there_while_the_run_goes_on(tmp_path):
    with both(tmp_path) as tell:
        tell(events_of(stop=2))
        rows, board = numbers_in(tmp_path)
        assert rows == [
            {"stage": "one name (1 of 2)", "fit": "1", "step": "1", "name": "loss", "value": "2.0"}
        ]
        assert board == {"one name (1 of 2)/loss": [(1, 2.0)]}


def test_every_number_has_its_place(tmp_path):
    with both(tmp_path) as tell:
        tell(events_of())
    rows, board = numbers_in(tmp_path)
    assert len(rows) == 11
    assert {tag: [step for step, _ in of] for tag, of in board.items()} == {
        "one name (1 of 2)/loss": [1, 2, 3],
        "one name (1 of 2), fit 2/loss": [1, 2, 3],
        "one name (2 of 2)/loss": [1, 2, 3],
        "validation/accuracy": [1, 2],
    }


@pytest.mark.parametrize("stop", [3, 5, 8, 10, 12])
def test_a_run_that_goes_on_appends_without_repeating(tmp_path, stop):
    """The second start tells of finished fits that they are there, and goes on an epoch before the stop."""
    with both(tmp_path / "whole") as tell:
        tell(events_of())
    with both(tmp_path / "stopped") as tell:
        tell(events_of(stop=stop))
    with (tmp_path / "stopped" / "log.csv").open("a") as file:
        file.write("one name (2 o")  # killed within a line
    goes_on = max(stop - 2, 0)
    again = [e for i, e in enumerate(events_of()) if i >= goes_on or e[0] != "epoch"]
    with both(tmp_path / "stopped") as tell:
        tell(again)
    assert numbers_in(tmp_path / "stopped") == numbers_in(tmp_path / "whole")


def test_loggers_hold_the_numbers_of_the_run(tmp_path, capsys):
    """A stacked ensemble too; the flag may be repeated and may hold several names."""
    flags = ["--members", "2", "--logger", "csv", "--logger", "tensorboard,csv", "--out", str(tmp_path)]
    assert cli.main([*SMOKE, *flags]) == 0
    (directory,) = (path.parent for path in tmp_path.rglob("record.json"))
    rows, board = numbers_in(directory)
    curves = rows_of(directory / "curves.csv")
    own = [float(row["value"]) for row in rows if row["name"] == "average_accuracy"]
    assert own == [float(r["value"]) for r in curves if r["curve"] == "average_accuracy (validation)"]
    assert [value for _, value in board["validation/average_accuracy"]] == pytest.approx(own)
    assert {f"step {t} ({t} of 5)/loss" for t in range(1, 6)} <= board.keys()
    capsys.readouterr()


# ---- Weights & Biases


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


def read(path):
    """What an offline run holds: logged rows, configuration, exit codes and names."""
    rows, config, exit_codes, names = [], {}, [], []
    for data in records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
        elif kind == "run":
            config = {u.key: json.loads(u.value_json) for u in record.run.config.update}
            names = [record.run.project, record.run.run_group, record.run.display_name]
        elif kind == "exit":
            exit_codes.append(record.exit.exit_code)
    return rows, config, exit_codes, names


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A finished offline run: its folder and what its process said."""
    folder = tmp_path_factory.mktemp("offline")
    done = toys.call([*SMOKE, "--logger", "wandb-offline"], folder)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch):
    """No setting of wandb in the environment, as `toys.environment` has it for processes."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)


@pytest.mark.slow
def test_offline_run_holds_the_numbers_of_the_record(offline):
    folder, _ = offline
    (path,) = folder.rglob("record.json")
    record = json.loads(path.read_text())
    (file,) = folder.rglob("*.wandb")
    history, config, exit_codes, names = read(file)
    values = [row["validation/average_accuracy"] for row in history if "validation/average_accuracy" in row]
    logged = [
        float(line.rpartition(",")[2])
        for line in (path.parent / "curves.csv").read_text().splitlines()
        if line.startswith("average_accuracy (validation)")
    ]
    assert values == logged
    assert len(values) == 5
    assert values[-1] == record["validation"]["average_accuracy"]
    tags = [f"step {t} ({t} of 5)/loss" for t in range(1, 6)]
    losses = [row[tag] for tag in tags for row in history if tag in row]
    assert len(losses) == 5
    assert config["method"] == {"name": "mfvi"} | record["method"]["settings"]
    assert config["task"] == {"name": "split_digits"} | record["task"]["settings"]
    assert (config["preset"], config["seed"]) == ("smoke", 0)
    assert exit_codes == [0]
    identities = f"{record['task']['identity']}/{record['method']['identity']}"
    assert names == ["posterior-bench", identities, "mfvi smoke seed 0"]


@pytest.mark.slow
def test_offline_run_keeps_its_files_in_its_directory_and_standard_output_clean(offline):
    folder, done = offline
    (path,) = folder.rglob("record.json")
    assert done.stdout == f"{path.parent.relative_to(folder)}\n"
    assert [p.name for p in folder.iterdir()] == ["runs"]
    (file,) = folder.rglob("*.wandb")
    assert path.parent / "wandb" in file.parents


@pytest.mark.slow
def test_diverged_offline_run_ends_with_its_exit_code(tmp_path, capsys):
    command = ["run", "toys:TurnsNaN", *SMOKE[2:], "--logger", "wandb-offline", "--out", str(tmp_path)]
    assert cli.main(command) == 4
    err = capsys.readouterr().err
    assert len([line for line in err.splitlines() if line.startswith("bench: ")]) == 1
    assert "Traceback" not in err
    (file,) = tmp_path.rglob("*.wandb")
    assert read(file)[2] == [1]


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
