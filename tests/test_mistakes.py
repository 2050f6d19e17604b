"""The table of mistakes: whatever is typed or lies there, one line says what is wrong, and no run is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import cli
from bench.runs import registry

RUN = "run map split_digits --preset smoke"
OWN = "from bench.methods.map import MAP\nfrom toys import OwnTask\n"
CLASS = OWN + "class M(MAP):\n    '''M.'''\nclass T(OwnTask):\n    '''T.'''\n"
OWN_RUN = "run own:M split_digits --preset smoke"
OWN_TASK = "run map own:T --preset smoke"
LONG = "x" * 5000

MISTAKES = {
    # name: (files, command line, exit code, what the line says)
    # ---- own classes
    "syntax": (
        {"own.py": "class M(:\n"},
        OWN_RUN,
        2,
        "cannot import 'own:M': SyntaxError: invalid syntax (own.py, line 1)",
    ),
    "import": (
        {"own.py": "import nowhere_at_all\n"},
        OWN_RUN,
        2,
        "No module named 'nowhere_at_all' (own.py, line 1)",
    ),
    "error": (
        {"own.py": "x = 1\n1 / 0\n"},
        OWN_RUN,
        2,
        "ZeroDivisionError: division by zero (own.py, line 2)",
    ),
    "exit": (
        {"own.py": "raise SystemExit(0)\n"},
        OWN_RUN,
        2,
        "cannot import 'own:M': SystemExit: 0 (own.py, line 1)",
    ),
    "lines": ({"own.py": "raise ValueError('a\\nb')\n"}, OWN_RUN, 2, "ValueError: a b (own.py"),
    "recursion": ({"own.py": "def f(): f()\nf()\n"}, OWN_RUN, 2, "RecursionError"),
    "no text": ({"own.py": b"\xff\xfe\x00"}, OWN_RUN, 2, "cannot import 'own:M': "),
    "zero": ({"own.py": b"\x00"}, OWN_RUN, 2, "cannot import 'own:M': "),
    "a folder": ({"own.py/x": ""}, OWN_RUN, 2, "cannot import 'own:M': ModuleNotFoundError"),
    "no class": (
        {"own.py": CLASS},
        "run own:None split_digits",
        2,
        "cannot import 'own:None': AttributeError",
    ),
    "no such": ({"own.py": "M = 3\n"}, OWN_RUN, 2, "'own:M' is no Method and no Task of bench.contract, and"),
    "a path": ({}, "run ../x:Y split_digits", 2, "cannot import '../x:Y': must be package.module:Class"),
    "a file": ({"own.py": CLASS}, "run own.py:M split_digits", 2, "cannot import 'own.py:M': "),
    "relative": ({}, "run .x:Y split_digits", 2, "cannot import '.x:Y': must be package.module:Class"),
    "two colons": ({}, "run a:b:C split_digits", 2, "cannot import 'a:b:C': must be package.module:Class"),
    "empty module": ({}, "run :C split_digits", 2, "cannot import ':C': must be package.module:Class"),
    "empty class": ({}, "run own: split_digits", 2, "cannot import 'own:': must be package.module:Class"),
    "task as method": (
        {"own.py": CLASS},
        "run own:T split_digits",
        2,
        "'own:T' is no Method of bench.contract",
    ),
    "method as task": ({"own.py": CLASS}, "run map own:M", 2, "'own:M' is no Task of bench.contract"),
    "no settings": (
        {"own.py": CLASS + "M.settings_class = None\n"},
        OWN_RUN,
        2,
        "'own:M': its settings_class must be",
    ),
    "plain settings": (
        {"own.py": CLASS + "M.settings_class = dict\n"},
        OWN_RUN,
        2,
        "'own:M': its settings_class must be",
    ),
    "settings of a task": (
        {"own.py": CLASS + "T.settings_class = int\n"},
        OWN_TASK,
        2,
        "'own:T': its settings_class must be",
    ),
    "presets": (
        {"own.py": CLASS + "PRESETS = 3\n"},
        OWN_RUN,
        2,
        "'own:M': PRESETS must hold settings by preset",
    ),
    "preset": (
        {"own.py": CLASS + "PRESETS = {'smoke': 3}\n"},
        OWN_RUN,
        2,
        "'own:M': PRESETS must hold settings by preset",
    ),
    "preset of no setting": ({"own.py": CLASS + "PRESETS = {'smoke': {'speed': 3}}\n"}, OWN_RUN, 2, "speed"),
    "provides": (
        {"own.py": CLASS + "M.provides = 3\n"},
        OWN_RUN,
        2,
        "'own:M': provides must be a frozenset of capabilities",
    ),
    "spec raises": (
        {"own.py": CLASS + "def spec(self): raise KeyError('x')\nT.spec = property(spec)\n"},
        OWN_TASK,
        2,
        "the spec of own:T: KeyError: 'x' (own.py, line 7)",
    ),
    "no spec": ({"own.py": CLASS + "T.spec = None\n"}, OWN_TASK, 2, "the spec of own:T: AttributeError"),
    "task raises": (
        {"own.py": CLASS + "def make(self, *a): raise KeyError('x')\nT.__init__ = make\n"},
        OWN_TASK,
        2,
        "the spec of own:T: KeyError: 'x' (own.py, line 7)",
    ),
    "smiley": (
        {},
        "run own:smile: split_digits",
        2,
        "cannot import 'own:smile:': must be package.module:Class",
    ),
    # ---- names and values
    "empty name": ({}, ["run", "", "split_digits"], 2, "unknown method ''"),
    "escape": ({}, ["run", "\x1b[31mmap", "split_digits"], 2, r"unknown method '\x1b[31mmap'"),
    "two lines": ({}, ["run", "map\nall is well", "split_digits"], 2, r"unknown method 'map\nall is well'"),
    "no UTF-8": ({}, ["run", "map\udcff", "split_digits"], 2, r"unknown method 'map\udcff'"),
    "markup": ({}, ["run", "[/red]", "split_digits"], 2, "unknown method '[/red]'"),
    "endless name": ({}, ["run", LONG, "split_digits"], 2, "unknown method"),
    "endless number": (
        {},
        ["run", "nf_gaussian_0_" + "9" * 5000, "singular_evidence"],
        2,
        "holds a number that cannot be read",
    ),
    "threads": (
        {},
        f"{RUN} --threads 100000",
        2,
        f"must be {os.cpu_count()} or less, the number of processors",
    ),
    "seed": ({}, f"{RUN} --seed {10**30}", 2, "should be less than 9223372036854775808"),
    "no out": ({}, [*RUN.split(), "--out", ""], 2, "--out : must name a folder"),
    "zero in out": ({}, [*RUN.split(), "--out", "a\0b"], 2, r"--out a\x00b: must name a folder"),
    "endless out": ({}, f"{RUN} --out {LONG}", 5, "File name too long"),
    "out is a file": ({"out": ""}, f"{RUN} --out out", 5, "cannot write out"),
    # ---- files of settings
    "list for a name": (
        {"c": "METHOD: [1]\nTASK: x\n"},
        "run --config c",
        2,
        "--config c: METHOD: [1]: must be a name",
    ),
    "number for a preset": (
        {"c": "preset: 5\n"},
        "run map split_digits --config c",
        2,
        "--config c: preset: 5: must be one of smoke",
    ),
    "null for a seed": (
        {"c": "seed: null\n"},
        f"{RUN} --config c",
        2,
        "--seed None: should be a valid integer",
    ),
    "null for out": ({"c": "out: null\n"}, f"{RUN} --config c", 2, "--out None: must name a folder"),
    "key twice": (
        {"c": "threads: 1\nseed: 1\nseed: 2\n"},
        f"{RUN} --config c",
        2,
        "the key seed stands in line 2 and again in line 3",
    ),
    "key twice inside": (
        {"c": "task:\n  epochs: 1\n  epochs: 2\n"},
        f"{RUN} --config c",
        2,
        "the key epochs stands in line 2 and again in line 3",
    ),
    "key twice in the first file": (
        {"c": "seed: 1\nseed: 2\n", "d": "seed: 1\n"},
        f"{RUN} --config c --config d",
        2,
        "the key seed stands in line 1",
    ),
    "number for settings": (
        {"c": "method: 3\n"},
        f"{RUN} --config c",
        2,
        "--config c: must hold settings by name",
    ),
    "number for a key": ({"c": "1: 3\n"}, f"{RUN} --config c", 2, "--config c: must hold settings by name"),
    "no such date": ({"c": "2001-99-99: 3\n"}, f"{RUN} --config c", 2, "--config c: month must be in 1..12"),
    "deep": ({"c": "[" * 3000}, f"{RUN} --config c", 2, "--config c: maximum recursion depth"),
    "itself": ({"c": "method: &a {x: *a}\n"}, f"{RUN} --config c", 2, "--config c: Circular reference"),
    "binary": ({"c": bytes(range(256))}, f"{RUN} --config c", 2, "--config c: "),
    "empty": ({"c": ""}, f"{RUN} --config c", 2, "--config c: must hold settings by name"),
    "a further file": ({"c": "config: d\n", "d": ""}, f"{RUN} --config c", 2, "a file names no further file"),
    "grid: key twice": (
        {"g": "methods: map\nmethods: mfvi\ntasks: t\n"},
        "sweep --grid g",
        2,
        "--grid g: the key methods stands in line 1 and again in line 2",
    ),
    "grid: a folder": ({"g/x": ""}, "sweep --grid g", 2, "--grid g: "),
    "grid: binary": ({"g": bytes(range(256))}, "sweep --grid g", 2, "--grid g: "),
    "grid: empty": ({"g": ""}, "sweep --grid g", 2, "--grid g: must hold the keys methods"),
    "grid: seed": (
        {"g": f"methods: map\ntasks: t\nseeds: {2**63}\n"},
        "sweep --grid g",
        2,
        "seeds: 9223372036854775808: must be 0 or more, below 2^63",
    ),
    "grid: itself": ({"g": "&a [*a]\n"}, "sweep --grid g", 2, "--grid g: Circular reference"),
    # ---- files of runs
    "show: a file": ({"r": ""}, "show r", 2, "r holds no run"),
    "show: empty": ({"r/record.json": ""}, "show r", 2, "is no record of schema 1"),
    "show: a folder": ({"r/record.json/x": ""}, "show r", 2, "cannot read r/record.json: Is a directory"),
    "show: binary": ({"r/record.json": bytes(range(256))}, "show r", 2, "is no record of schema 1"),
    "show: deep": ({"r/record.json": "[" * 100_000}, "show r", 2, "is no record of schema 1"),
    "show: zero": ({}, ["show", "a\0b"], 2, r"a\x00b"),
    "show: not UTF-8": ({}, ["show", "a\udcff"], 2, r"a\udcff holds no run"),
    "show: endless": ({}, ["show", LONG], 2, "File name too long"),
    "show: import": ({}, "show r --import map", 2, "--import map: must be package.module:Class"),
    "show: import fails": (
        {"own.py": "1 / 0\n"},
        "show r --import own:M",
        2,
        "cannot import 'own:M': ZeroDivisionError",
    ),
    "figures: to nothing": ({}, ["figures", "r", "--to", ""], 2, "--to: must name a folder"),
    "record: to nothing": ({}, ["record", "add", "r", "--to", ""], 2, "--to: must name a folder"),
    "reference: to nothing": ({}, ["reference", "add", "r", "--to", ""], 2, "--to: must name a folder"),
    # ---- searches
    "tune: own": ({"own.py": "1 / 0\n"}, "tune own:M split_digits --budget 2", 2, "cannot import 'own:M'"),
    "tune: search": ({"own.py": CLASS + "SEARCH = 3\n"}, "tune own:M split_digits --budget 2", 2, "SEARCH"),
    "tune: seed": ({}, f"tune map split_digits --budget 2 --seed {10**30}", 2, "should be less than"),
    "tune: to nothing": (
        {},
        ["tune", "map", "split_digits", "--budget", "2", "--to", ""],
        2,
        "--to: must name a folder",
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory; own modules are imported anew in every test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_own", {})
    yield tmp_path
    sys.modules.pop("own", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]
    for console in (cli.errors, cli.output):
        console._buffer.clear()  # what a full device did not take


def put(files):
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


def call(command):
    """The exit code of a command line."""
    return cli.main(command.split() if isinstance(command, str) else command)


@pytest.mark.parametrize(("files", "command", "code", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_one_line_and_leaves_nothing(capsys, files, command, code, words):
    put(files)
    before = {path for path in Path().rglob("*") if "__pycache__" not in path.parts}
    assert call(command) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bench: ")
    assert err.count("\n") == 1, err
    assert err[:-1].isprintable()
    assert words in err
    assert before == {path for path in Path().rglob("*") if "__pycache__" not in path.parts}


def test_control_of_the_table(capsys):
    """Own classes without a mistake run, and files of settings are taken."""
    put(
        {"own.py": CLASS + "PRESETS = {'smoke': {'optimizer': 'sgd'}}\n", "c": "seed: 3\ntask: {epochs: 1}\n"}
    )
    assert call(f"{OWN_RUN} --config c") == 0
    assert "own.M" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["--version", "--help", "data list", "list methods --help"])
def test_output_that_takes_nothing_is_one_line(monkeypatch, capsys, command):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert call(command) == 5
    assert capsys.readouterr().err == "bench: cannot write the output: No space left on device\n"


def test_process_whose_output_takes_nothing_ends_quietly():
    """Python itself writes what is left at the end of the process, and would complain."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bench", "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (5, "bench: cannot write the output: No space left on device\n")


def test_errors_that_cannot_be_told_keep_their_code(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert call("run nothing split_digits") == 2


def test_output_without_unicode_shows_what_it_can(monkeypatch, capfd):
    """A terminal of ASCII alone."""
    with open(os.dup(1), "w", encoding="ascii") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        assert call("list methods") == 0
