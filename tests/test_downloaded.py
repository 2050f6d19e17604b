"""A run from somebody else: reading it runs no code, and nothing in it deceives the terminal.

Every attack is made on a copy of a good run, which all commands take.
"""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import bench
from bench import cli
from bench.data import array_digest
from bench.errors import BenchError, UsageError
from bench.methods.map import MAP
from bench.runs import records, registry
from bench.runs.plan import Plan
from bench.runs.resolution import resolve
from bench.settings import build
from bench.sweep import sweep

FEW = {"epochs": 1, "test_samples": 4}
PAYLOAD = """\
'''A method and a task that leave a trace when they are imported.'''
from pathlib import Path

from bench.methods.map import MAP
from bench.tasks.split_mnist import SplitMNIST

Path(__file__).with_name("executed").write_text("")


class Evil(MAP):
    '''MAP.'''


class EvilTask(SplitMNIST):
    '''The split task.'''
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A standard run whose record says that a commit holds its source; not to be changed."""
    out = tmp_path_factory.mktemp("runs")
    done = bench.run("map", "split_digits", task_settings=FEW, out=out)
    provenance = done.record.provenance.model_copy(update={"commit": "0" * 40, "dirty": False})
    records.write_record(done.directory, done.record.model_copy(update={"provenance": provenance}))
    return done.directory


@pytest.fixture
def run(good, tmp_path, monkeypatch):
    """A copy of it that may be changed, in a working directory that holds `payload.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_own", {})
    (tmp_path / "payload.py").write_text(PAYLOAD)
    yield Path(shutil.copytree(good, tmp_path / "run"))
    sys.modules.pop("payload", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def change(run, **parts):
    record = json.loads((run / "record.json").read_text())
    for name, value in parts.items():
        record[name] = record[name] | value if isinstance(value, dict) else value
    (run / "record.json").write_text(json.dumps(record))


COMMANDS = {
    "show": ["show", "run"],
    "figures": ["figures", "run"],
    "figures together": ["figures", "run", "--to", "together"],
    "record add": ["record", "add", "run", "--to", "records"],
    "reference add": ["reference", "add", "run", "--to", "references"],
}


@pytest.fixture
def call(capsys):
    def call(command, *more):
        capsys.readouterr()
        return cli.main([*command, *more]), *capsys.readouterr()

    return call


# ---- code


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("part", ["method", "task"])
def test_no_command_imports_what_a_record_names(run, call, command, part):
    change(run, **{part: {"name": "payload:Evil"}})
    code, _, err = call(command)
    assert not Path("executed").exists()
    if command == COMMANDS["show"]:  # numbers need no class; of an unknown task they have no unit
        assert code == 0
    elif part == "task" or command != COMMANDS["figures"]:  # which need no method
        assert code == 2
        assert "--import payload:Evil" in err
        assert len(err.splitlines()) == 1


def test_load_imports_nothing_that_a_record_names(run):
    change(run, method={"name": "payload:Evil"})
    with pytest.raises(UsageError, match="'payload:Evil' is not part of this suite: --import payload:Evil"):
        bench.load(run)
    change(run, method={"name": "map"}, task={"name": "payload:EvilTask"})
    with pytest.raises(UsageError, match="'payload:EvilTask' is not part of this suite"):
        bench.load(run)
    assert not Path("executed").exists()


def test_sweep_reads_back_without_importing(run):
    """A cell whose directory holds a run of another's method."""
    change(run, method={"name": "payload:Evil"}, task={"name": "payload:EvilTask"})
    cell = build(Plan, {"method": "map", "task": "split_digits", "task_settings": FEW, "out": "out"})
    place = Path("out") / resolve(cell).directory(0)
    shutil.copytree(run, place)
    assert sweep.run_cell(cell).status == "completed"
    assert not Path("executed").exists()


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_own_code_runs_where_the_user_names_it(run, call, command):
    """The control of the laws above: what leaves no trace there leaves one here."""
    untuned = asdict(build(MAP.settings_class, {}, "method"))  # what was searched for map is not this class's
    change(run, method={"name": "payload:Evil", "identity": "payload.Evil", "settings": untuned})
    code, _, err = call(command, "--import", "payload:Evil")
    assert Path("executed").exists()
    assert code == (2 if command[0] == "reference" else 0), err
    assert ("invariant" in err) == (command[0] == "reference")


def test_own_method_is_loaded_where_the_user_names_it(run):
    change(run, method={"name": "payload:Evil", "identity": "payload.Evil"})
    assert type(bench.load(run, imports=("payload:Evil",))).__name__ == "Evil"
    assert Path("executed").exists()


def test_pickles_are_not_read(run):
    """A checkpoint that would run code when it is unpickled."""

    class Payload:
        def __reduce__(self):
            return (Path("executed").write_text, ("",))

    for path in (run / "checkpoints").glob("*.ckpt"):
        torch.save({"state_dict": Payload()}, path)
    with suppress(Exception):  # how it is told is not this law's
        bench.load(run)
    assert not Path("executed").exists()


# ---- deceit


HOSTILE = {
    "escape sequence": "\x1b[2J\x1b]0;title\x07",
    "line break": "completed\nbench: all is well",
    "NUL": "\0",
    "right to left": "\u202edetelpmoc",
    "no character": "\uffff",
}
PLACES = {
    "reason": lambda text: {"reason": text},
    "identity of the method": lambda text: {"method": {"identity": f"map+{text}"}},
    "name of the task": lambda text: {"task": {"name": text}},
    "setting": lambda text: {"method": {"settings": {"optimizer": text}}},
    "name of a setting": lambda text: {"method": {"settings": {text: 1}}},
    "name of a metric": lambda text: {"metrics": {text: 0.5}},
    "unknown field": lambda text: {text: 1},
    "command": lambda text: {"command": text},
    "device": lambda text: {"environment": {"device": text}},
    "trainer": lambda text: {"trainer": {"precision": text}},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hidden_characters_in_a_record_are_refused_escaped(run, call, text, place):
    change(run, **place(text))
    with pytest.raises(UsageError, match=r"run/record\.json ") as caught:
        records.read_record(run)
    assert str(caught.value).isprintable()
    code, out, err = call(["show", "run"])
    assert (code, out) == (2, "")
    assert err[:-1].isprintable()


def test_surrogate_in_a_record_is_refused(run, call):
    text = (run / "record.json").read_text().replace('"bench run', '"\\ud800bench run')
    (run / "record.json").write_text(text)
    assert call(["show", "run"])[0] == 2


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hidden_characters_in_arrays_and_curves_are_refused(run, text):
    arrays = records.read_arrays(run) | {text: np.zeros(1)}
    with pytest.raises(ValueError, match="an array is named"):
        records.write_arrays(run, arrays)
    (run / "arrays.safetensors").write_bytes(safetensors.numpy.save(arrays))
    change(run, provenance={"arrays_digest": array_digest(arrays)})
    with pytest.raises(UsageError, match="holds characters that are never printed") as caught:
        records.read_arrays(run)
    assert str(caught.value).isprintable()
    (run / "curves.csv").write_text(f'curve,series,x,value\n"{text}",a,1,1\n')
    with pytest.raises(UsageError, match=r"curves\.csv (holds characters|is damaged)"):
        records.read_curves(run)


def test_arrays_of_types_that_numpy_lacks_are_refused(run):
    content = safetensors.torch.save({"labels": torch.zeros(2, dtype=torch.bfloat16)})
    (run / "arrays.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="is damaged"):
        records.read_arrays(run)


@pytest.mark.parametrize(
    "arrays",
    [{}, {"labels": np.zeros(3)}, {"labels": np.zeros((2, 0, 1), np.uint8)}],
    ids=["missing", "other shapes", "empty"],
)
@pytest.mark.parametrize("command", [COMMANDS["figures"], COMMANDS["record add"]], ids=["figures", "record"])
def test_arrays_that_the_task_cannot_read_are_one_line(run, call, command, arrays):
    kept = {name: array for name, array in records.read_arrays(run).items() if name != "labels"}
    records.write_arrays(run, kept | arrays)
    (run / "files.json").unlink(missing_ok=True)  # whoever forges a run leaves out what would betray it
    change(run, provenance={"arrays_digest": array_digest(kept | arrays)})
    code, _, err = call(command)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "Error: " in err


def test_unknown_metric_is_shown_as_such(run, call):
    record = json.loads((run / "record.json").read_text())
    change(run, metrics=record["metrics"] | {"luck": 0.5})
    code, _, err = call(["show", "run"])
    assert (code, err) == (0, "")


# ---- what the own code of a user says


SHOUTS = """\
'''A method that fails loudly.'''
from bench.methods.map import MAP


class Shouts(MAP):
    '''MAP.'''

    def loss_terms(self, batch, noise):
        raise RuntimeError("\\x1b[31mred\\x00 \\u202e\\nsecond line")
"""


def test_what_an_own_method_says_is_escaped_before_it_is_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "shouts.py").write_text(SHOUTS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BenchError, match="failed: RuntimeError"):
        bench.run("shouts:Shouts", "split_digits", task_settings=FEW, out=tmp_path / "runs")
    (path,) = (tmp_path / "runs").rglob("record.json")
    assert r"\x1b[31mred\x00 \u202e" in records.read_record(path.parent).reason
    capsys.readouterr()
    arguments = ["run", "shouts:Shouts", "split_digits", "--preset", "smoke", "--out", str(tmp_path / "more")]
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).splitlines())
    assert r"\x1b[31mred" in err


def test_hidden_characters_in_a_figure_do_not_end_the_process(tmp_path):
    """What XML does not know aborts the library that draws."""
    import altair as alt

    from bench import figures

    values = alt.Data(values=[{"x": 1, "name": "\0\x1b\uffff"}])
    chart = alt.Chart(values, title="\x01").mark_point().encode(x="x:Q", color="name:N")
    assert len(figures.save({"a": chart}, tmp_path, "a\0run")) == 2
    assert r"\x01" in (tmp_path / "a.svg").read_text()


def test_a_record_of_a_contestant_is_read_without_trust_and_opens_no_other_door():
    """bench.peers is the suite's own code; a record that names another module of it is refused like any."""
    code = """
from bench.runs import registry
from bench.errors import UsageError
print(registry.method("bench.peers:PosteriorsVI").name)
for name in ("peers:likelihood", "peers:Batch", "peers:os", "files:Path", "peersx:A"):
    try:
        registry.method(f"bench.{name}")
    except UsageError as error:
        print("refused")
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bench.peers:PosteriorsVI", *["refused"] * 5]
