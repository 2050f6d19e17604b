"""Weights & Biases: an offline run holds the numbers, and no run needs it."""

import json
import os
import struct
import subprocess
import sys

import pytest
import toys
from wandb.proto.wandb_internal_pb2 import Record

from bench import cli

SMOKE = ["run", "mfvi", "split_digits", "--preset", "smoke", "--threads", "1"]

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
    done = toys.call([*SMOKE, "--wandb", "offline"], folder)
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
    losses = [row[f"step {t}/loss"] for t in range(1, 6) for row in history if f"step {t}/loss" in row]
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
    command = ["run", "toys:TurnsNaN", *SMOKE[2:], "--wandb", "offline", "--out", str(tmp_path)]
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
        if name.split(".")[0] == "wandb":
            raise ImportError("wandb is blocked in this test")

sys.meta_path.insert(0, Blocked())
from bench.cli import main

assert main(sys.argv[1:]) == 0
print("finished without wandb", file=sys.stderr)
sys.exit(main([*sys.argv[1:], "--wandb", "offline", "--seed", "1"]))
"""


@pytest.mark.slow
def test_run_without_wandb_needs_no_wandb(tmp_path):
    """The block is real: in the second run, which asks for wandb, it cannot be had."""
    command = [sys.executable, "-c", BLOCKED, *SMOKE]
    environment = toys.environment()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "finished without wandb" in done.stderr, done.stderr
    assert not list(tmp_path.rglob("wandb"))
    assert done.returncode == 1
    assert "wandb is blocked in this test" in done.stderr


@pytest.mark.slow
def test_online_without_a_login_is_one_line(tmp_path, capsys, monkeypatch):
    """Nobody to ask for a key: no terminal, and no key in the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert cli.main([*SMOKE, "--wandb", "online", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("bench: ")]
    assert line.startswith("bench: --wandb online: ")
    assert "Traceback" not in err
