"""What must not wait for torch: help, misspelled names and flags, the second `bench list`, completion.

How long each takes `benchmarks/start.py` measures.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import cli
from bench.commands import running
from bench.engine.engine import TrainerOptions
from bench.leaderboard.evidence.submission import OURS, RECORDS, SUBMISSIONS
from bench.runs import index, measures, registry
from bench.runs.records import read_record
from bench.runs.runner import task_of
from bench.system import places

HEAVY = ("torch", "pytorch_lightning", "torchvision", "torchmetrics", "scipy", "sklearn", "altair", "wandb")
QUICK = [
    (0, ["--version"]),
    (0, ["--help"]),
    *((0, [command, "--help"]) for command in cli.COMMANDS),
    (2, ["rnu"]),
    (2, ["run", "redial", "split_digits"]),
    (2, ["run", "map", "split_digit"]),
    (2, ["run", "nf_gama_10_1_100_True", "singular_evidence"]),
    (2, ["run", "map", "split_digits", "--sed", "3"]),
    (2, ["run", "map", "split_digits", "--method.learnin_rate=3"]),
    (2, ["tune", "redial", "split_digits", "--budget", "3"]),
    (2, ["tune", "map", "split_digit", "--budget", "3"]),
    (2, ["sweep", "--gird", "x"]),
    (2, ["show", "--x"]),
    (2, ["data", "fetch"]),
    (0, ["list"]),
    (0, ["list", "tasks", "--ranked"]),
    (0, ["completion", "bash"]),
]
WITHOUT = """
import contextlib, io, json, sys

class Refused(BaseException):
    pass

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in {heavy}:
            raise Refused(name)

sys.meta_path.insert(0, Finder())
import bench.runs.records
from bench import cli

def called(arguments):
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return cli.main(arguments)
    except SystemExit as exit:
        return exit.code
    except Refused as name:
        return str(name)

print(json.dumps([called(arguments) for arguments in {calls}]))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own; the user's home in other processes is `tmp_path`."""
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / ".cache" / "posterior-bench")
    monkeypatch.setenv("HOME", str(tmp_path))
    return places.CACHE_ROOT


def outcomes(calls, cwd, heavy=HEAVY):
    """Exit codes of commands where `heavy` cannot be imported; of one that tries, the first such module."""
    code = WITHOUT.format(heavy=heavy, calls=calls)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_help_mistakes_and_the_second_list_need_no_torch(cache, tmp_path):
    control = ["run", "map", "split_digits", "--help"]
    assert outcomes([["list"], control], tmp_path, ("torch",)) == ["torch", "torch"]
    index.index()
    calls = [arguments for _, arguments in QUICK]
    expected = [code for code, _ in QUICK]
    found = outcomes([*calls, control], tmp_path)
    slow = [(a, f) for a, f, e in zip(calls, found, expected, strict=False) if f != e]
    assert not slow
    assert found[-1] == "torch"


# ---- the index


@pytest.fixture
def makings(monkeypatch):
    """Grows by one whenever an index is made."""
    made = []
    make = index._made
    monkeypatch.setattr(index, "_made", lambda: made.append(1) or make())
    return made


def test_the_index_is_made_once_for_each_source(cache, makings, monkeypatch):
    first = index.index()
    assert index.index() == index.kept() == first
    assert len(makings) == 1
    monkeypatch.setattr(index, "source_hash", lambda: "another")
    assert index.kept() is None
    assert index.index() == first
    assert len(makings) == 2
    assert [path.name for path in cache.iterdir()] == [index.path().name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-9],
        lambda content: b"[]",
        lambda content: b"\xff" + content,
        lambda content: b"[" * 100_000,
        lambda content: content.replace(b"split_digits", b"split_digit5", 1),
        lambda content: b'{"seal": "", "index": {}}',
    ],
    ids=["empty", "cut off", "no index", "no text", "deep", "one byte", "made up"],
)
def test_a_damaged_index_is_made_again(cache, makings, damage):
    first = index.index()
    index.path().write_bytes(damage(index.path().read_bytes()))
    assert index.kept() is None
    assert index.index() == first == index.kept()
    assert len(makings) == 2


def test_a_cache_that_cannot_be_written_or_read_is_no_failure(cache, makings):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    assert index.index()["methods"]
    cache.unlink()
    index.path().mkdir(parents=True)
    assert index.index()["methods"]
    assert len(makings) == 2


def test_the_index_has_every_flag_of_a_run(cache):
    """A flag that the index lacks would be refused as misspelled."""
    index.index()
    for method, task in (("map", "split_digits"), ("swag", "active_mnist"), ("linear", "uci_yacht")):
        whole = running._run_parser(method, task, "standard").flags()
        assert {*running._known_parser([method, task]).flags()} == {*whole}
    settings = index.kept()["settings"]
    assert settings.keys() == {"trainer", registry.NONE, *registry.methods(), *registry.tasks()}
    assert len(settings["trainer"]) == len(TrainerOptions.__dataclass_fields__) + 1


# ---- completion


LINES = {
    "bench r": {"run", "runs", "record", "reference", "report", "round"},
    "bench run ma": {"map", "masksembles", "matrix_normal_vi"},
    "bench tune --budget 3 map split_digits_m": {"split_digits_multi_head"},
    "bench run map split_digits --preset s": {"smoke", "standard"},
    "bench run --preset smoke map split_digits --method.": {"--method.learning_rate", "--method.optimizer"},
    "bench run map split_digits --trainer.d": {"--trainer.devices"},
    "bench list m": {"methods"},
    "bench completion b": {"bash"},
    "bench rnu x": set(),
}
ANSWERED = """
import os
for number, line in enumerate({lines}):
    told = dict(COMP_LINE=line, COMP_POINT=str(len(line)), _ARGCOMPLETE="1")
    if os.fork() == 0:
        os.environ.update(told, _ARGCOMPLETE_STDOUT_FILENAME=f"answer{{number}}")
        open(f"answer{{number}}", "w").close()
        called([])
        os._exit(0)
    os.wait()
"""


def test_the_shell_completes_commands_names_flags_and_settings(cache, tmp_path):
    """A process for each line: an answer ends it."""
    index.index()
    code = WITHOUT.format(heavy=HEAVY, calls=[]) + ANSWERED.format(lines=[*LINES])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [(tmp_path / f"answer{number}").read_text() for number in range(len(LINES))]
    found = {
        line: {*answer.replace("\013", " ").split()} for line, answer in zip(LINES, answers, strict=True)
    }
    assert found == LINES


def test_bash_completes_by_the_script(cache, tmp_path):
    """The whole way, in a real shell."""
    (tmp_path / "bench").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bench "$@"\n')
    (tmp_path / "bench").chmod(0o755)
    script = (
        'PATH="$PWD:$PATH"; eval "$(bench completion bash)"; complete -p bench; COMP_LINE="bench run ma"\n'
        'COMP_POINT=12; _python_argcomplete bench; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0].endswith("-F _python_argcomplete bench"), done.stderr
    assert lines[1].split() == ["map", "masksembles", "matrix_normal_vi"]


# ---- what reading finished runs does not need


@pytest.fixture(scope="module")
def committed():
    """The committed runs of a method, of which every metric is written down."""
    return str(SUBMISSIONS / OURS / "split_digits" / "mfvi")


def test_runs_show_and_compare_need_no_torch(committed, tmp_path):
    """That losses are computed with torch is the control; the second compare reads those that are kept."""
    own = [str(path) for path in sorted(Path(committed).iterdir())]
    calls = [["runs", committed], ["show", *own], ["runs", committed, "--format", "csv"]]
    compared = ["compare", committed]
    code = WITHOUT.format(heavy=[name for name in HEAVY if name != "scipy"], calls=[*calls, compared])
    home = os.environ | {"HOME": str(tmp_path)}

    def called():
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=home
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    *codes, refused = called()
    assert codes == [0, 0, 0]
    assert refused in HEAVY
    command = [sys.executable, "-m", "bench", *compared, "--format", "json"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=home)
    assert first.returncode == 0, first.stderr
    assert called() == [0, 0, 0, 0]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=home)
    assert again.stdout == first.stdout != ""
    for path in (tmp_path / ".cache" / "posterior-bench" / "losses").rglob("*.npy"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    damaged = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=home)
    assert damaged.stdout == first.stdout


def test_what_is_written_down_is_what_the_tasks_say():
    assert measures.PATH.read_text() == measures.made()
    checked = 0
    for path in [*SUBMISSIONS.glob("*/*/*/seed0"), *RECORDS.glob("*/*/seed0")]:
        record = read_record(path)
        found, own = measures.spec_of(record), task_of(record).spec
        for name, metric in own.metrics.items():
            given = found.metrics[name]
            same = ("description", "unit", "best", "worst")
            assert [getattr(given, part) for part in same] == [getattr(metric, part) for part in same], path
        if measures.is_standard(record):
            assert found == own
            checked += 1
        method = registry.method(record.method.name).cls
        old = record.model_copy(update={"method": record.method.model_copy(update={"seed_matters": None})})
        assert measures.seed_matters(old) == method.seed_matters
    assert checked > 50


OPENED = """
import sys
from pathlib import Path
from bench.runs.folders import below

opened = []
sys.addaudithook(lambda event, args: opened.append(event) if event in ("open", "os.scandir") else None)
for folder in sys.argv[1:]:
    opened.clear()
    print(len(below(Path(folder))), len(opened))
"""


def test_listing_opens_as_many_files_of_each_run_however_many_there_are(committed, tmp_path):
    """The first listing is not counted: it imports what it needs."""
    for size in (1, 10, 100):
        for number in range(size):
            run = tmp_path / str(size) / f"seed{number}"
            run.mkdir(parents=True)
            # No link: `bench verify` refuses a record of several names, and that one is committed.
            shutil.copy(Path(committed) / "seed0" / "record.json", run)
    folders = [tmp_path / str(size) for size in (1, 10, 100)]
    done = subprocess.run([sys.executable, "-c", OPENED, *folders], capture_output=True, text=True)
    _, ten, hundred = ([int(number) for number in line.split()] for line in done.stdout.splitlines())
    assert (ten[0], hundred[0]) == (10, 100), done.stderr
    assert 0 < hundred[1] <= 10 * ten[1]


TORCHLESS = """
from bench.system import absent
absent.stand_in()
import bench.tasks.split_mnist, bench.methods.mfvi, torch, sys
from bench import data
assert isinstance(bench.methods.mfvi.MFVI, type)
try:
    data.load("digits")
except absent.Needed as needed:
    print(needed)
try:
    bench.tasks.split_mnist.data.torch.zeros(3)
except Exception:
    print("an error")
except BaseException as error:
    print(type(error).__name__)
"""


def test_a_stand_in_for_torch_imports_and_refuses_to_compute(tmp_path):
    done = subprocess.run([sys.executable, "-c", TORCHLESS], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch.from_numpy", "Needed"]


# ---- what training does not need


SHELLS = """
import sys
from bench.system import shells
shells.install()
import bench
import pytorch_lightning, torch
from pytorch_lightning.utilities.compile import OptimizedModule

def imported():
    names = ["torchvision", "scipy", "sympy", "torch._dynamo.utils", "torchmetrics.functional"]
    return [name for name in names if name in sys.modules]

network = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(network.parameters())
before = network(torch.ones(1, 2))
before.sum().backward()
optimizer.step()
optimizer.zero_grad()
print(imported(), isinstance(network, OptimizedModule))
import numpy, scipy.special
from torch.utils.flop_counter import FlopCounterMode
assert not {"numpy.f2py.crackfortran", "triton"} & sys.modules.keys()
assert callable(numpy.f2py.get_include) and "numpy.f2py.crackfortran" in sys.modules
with FlopCounterMode(display=False) as counter:
    network(torch.ones(1, 2))
assert counter.get_total_flops() == 4 and type(counter) is torch.utils.flop_counter.FlopCounterMode
import torch._dynamo.config, torchmetrics.classification
compiled = torch.compile(network, backend="eager")
assert torch.equal(compiled(torch.ones(1, 2)), network(torch.ones(1, 2)))
print(imported(), isinstance(network, OptimizedModule), isinstance(compiled, OptimizedModule))
assert torchmetrics.classification.Accuracy is torchmetrics.Accuracy
assert pytorch_lightning.core.module.Metric is torchmetrics.Metric is torchmetrics.metric.Metric
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
optimizer.step()
from bench.system.shells import Shell
assert not [module for module in list(sys.modules.values()) if isinstance(module, Shell)]
"""


def test_training_imports_neither_compiler_nor_metrics_until_they_are_asked_for(tmp_path):
    """The second line is the control: asked for, the packages are whole."""
    done = subprocess.run([sys.executable, "-c", SHELLS], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    few, all_of_them = done.stdout.splitlines()
    assert few == "[] False"
    names = ["torchvision", "scipy", "sympy", "torch._dynamo.utils", "torchmetrics.functional"]
    assert all_of_them == f"{names} False True"
