"""Ctrl-C, SIGTERM and SIGHUP end every command in one line, with the exit code that shells expect."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import toys
import yaml

import bench
from bench import cli
from bench.methods.map import MAP
from bench.system import signals
from bench.system.signals import stoppable

LINE = "bench: stopped; the same command goes on from here\n"
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
FIT = ["run", "toys:Signals", "toys:OwnTask"]


@pytest.fixture(autouse=True)
def heard():
    """The handlers of a terminal, should the tests themselves run under nohup."""
    handlers = dict.fromkeys((number for number, _ in SIGNALS), signal.SIG_DFL)
    handlers[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Calls `bench ARGUMENTS` in an empty folder; returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(number) for number, _ in SIGNALS]

    def call(*arguments):
        capsys.readouterr()
        code = cli.main([str(a) for a in arguments])
        assert [signal.getsignal(number) for number, _ in SIGNALS] == before
        out, err = capsys.readouterr()
        return code, out, toys.told(err)

    return call


# ---- the block


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_signal_ends_the_block_in_one_line(capsys, number, code):
    cleaned = []
    with stoppable() as stop:
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        finally:
            cleaned.append(number)
    assert (stop.exit_code, cleaned, capsys.readouterr()) == (code, [number], ("", LINE))


def test_second_signal_does_not_disturb_the_end(capsys):
    """`timeout` sends SIGTERM twice; what cleans up is not cut short."""
    cleaned = []
    with stoppable() as stop:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            cleaned.append(True)
    assert (stop.exit_code is not None, cleaned, capsys.readouterr().err) == (True, [True], LINE)


def test_interrupt_that_a_library_turned_into_an_error_is_the_interrupt(capsys):
    """As C extensions do while they are imported; an error without a signal stays what it is."""
    with stoppable() as stop:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None
    assert (stop.exit_code, capsys.readouterr().err) == (143, LINE)
    with pytest.raises(ImportError), stoppable():
        raise ImportError


def test_block_that_comes_to_its_end_was_not_stopped():
    with stoppable() as stop, contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.exit_code is None


def test_ignored_signal_stays_ignored_and_other_threads_go_without(capsys):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stop.exit_code is None

    def elsewhere():
        with stoppable():
            pass

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert capsys.readouterr().err == ""


# ---- the commands


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_run_that_is_stopped_inside_a_fit_goes_on(call, monkeypatch, tmp_path, number, code):
    monkeypatch.setattr(toys.Signals, "number", number)
    assert call(*FIT) == (code, "", LINE)
    (marker,) = tmp_path.rglob("unfinished.json")
    assert sorted(path.name for path in marker.parent.iterdir()) == ["log.txt", "unfinished.json"]
    monkeypatch.setattr(toys.Signals, "number", None)
    assert call(*FIT)[0] == 0
    assert (marker.parent / "record.json").exists()


def test_run_whose_interrupt_became_an_error_goes_on(call, monkeypatch, tmp_path):
    """It was stopped and has not failed: no record, and what it needs to go on is there."""
    monkeypatch.setattr(toys.Signals, "number", signal.SIGINT)
    command = ["toys:TurnsInterrupts" if part == FIT[1] else part for part in FIT]
    assert command != FIT
    assert call(*command) == (130, "", LINE)
    (marker,) = tmp_path.rglob("unfinished.json")
    assert not (marker.parent / "record.json").exists()
    monkeypatch.setattr(toys.Signals, "number", None)
    assert call(*command)[0] == 0
    assert (marker.parent / "record.json").exists()


def test_error_raised_while_an_interrupt_is_handled_is_the_interrupt():
    """Also where Python's own handler raised it, and no block knows of a signal."""

    def imports():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("initialization failed")  # noqa: B904

    with pytest.raises(KeyboardInterrupt), signals.unturned():
        imports()

    def explains():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from ValueError("of something else")

    with pytest.raises(KeyboardInterrupt), signals.unturned():
        explains()
    with pytest.raises(ImportError, match="by itself"), signals.unturned():
        raise ImportError("by itself")


def test_signal_that_was_ignored_at_the_start_is_ignored_in_a_fit(call, monkeypatch):
    """Lightning's own handler would end the run."""
    monkeypatch.setattr(toys.Signals, "number", signal.SIGTERM)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert cli.main(FIT) == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sweep_ends_as_a_whole(call, monkeypatch, tmp_path):
    monkeypatch.setattr(toys.Signals, "number", signal.SIGTERM)
    grid = {"methods": "toys:Signals", "tasks": "toys:OwnTask", "seeds": [0, 1]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    code, out, err = call("sweep", "--grid", "grid.yaml")
    assert (code, out, err.splitlines()[-1] + "\n") == (143, "", LINE)
    assert len(list(tmp_path.rglob("unfinished.json"))) == 1


def test_tune_ends_as_a_whole(call, monkeypatch, tmp_path):
    monkeypatch.setattr(MAP, "loss_terms", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    code, out, err = call("tune", "tunables:Obedient", "tunables:Distance", "--budget", "3", "--to", "tuned")
    assert (code, out, err.splitlines()[-1] + "\n") == (143, "", LINE)
    assert len(list(tmp_path.rglob("unfinished.json"))) == 1
    assert not (tmp_path / "tuned").exists()


def test_own_module_that_is_stopped_while_it_is_imported(call, tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nopen()\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert call("run", "slow:Method", "toys:OwnTask") == (143, "", LINE)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["slow.py"]


def test_run_from_python_leaves_the_handlers_alone(tmp_path, monkeypatch):
    """After Ctrl-C in a fit Lightning would ignore every later one."""
    before = [signal.getsignal(number) for number, _ in SIGNALS]
    monkeypatch.setattr(toys.Signals, "number", signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        bench.run("toys:Signals", "toys:OwnTask", out=tmp_path)
    assert [signal.getsignal(number) for number, _ in SIGNALS] == before


# ---- processes

WHILE_TORCH = """
import os, signal, sys
class Finder:
    def find_spec(name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.{number.name})
sys.meta_path.insert(0, Finder)
from bench.cli import main
sys.exit(main(["run", "map", "toy_regression"]))
"""


@pytest.mark.parametrize(("number", "code"), SIGNALS[:2])
def test_signal_while_torch_is_imported(tmp_path, number, code):
    program = [sys.executable, "-c", WHILE_TORCH.format(number=number)]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", LINE)


@pytest.mark.slow
def test_process_that_is_terminated_twice(tmp_path):
    """In a fit, and once more when the line is out: no traceback, 143."""
    environment = toys.environment(SIGNALS=str(int(signal.SIGTERM)))
    process = toys.start([*FIT, "--threads", "1"], tmp_path, env=environment)
    assert next(line for line in process.stderr if toys.told(line)) == LINE
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert (*process.communicate(timeout=300), process.returncode) == ("", "", 143)
    assert len(list(tmp_path.rglob("unfinished.json"))) == 1
    assert not list(tmp_path.rglob(".lock"))


SLOW = """
import sys, time

class Slow:
    def find_spec(self, name, path, target=None):
        if name == "bench.cli":
            print("importing", flush=True)
            time.sleep(30)

sys.meta_path.insert(0, Slow())
"""
ENTRY = "from bench.__main__ import main\nsys.exit(main())"
BARE = "from bench import cli\nsys.exit(cli.main())"


@pytest.mark.parametrize(("entry", "silent"), [(ENTRY, True), (BARE, False)], ids=["bench", "control"])
def test_ctrl_c_in_the_first_seconds_is_silent(entry, silent):
    """While the command line is imported; without the entry's own handler Python prints a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW + entry], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    if silent:
        assert (process.returncode, out, err) == (130, "", "")
    else:
        assert "KeyboardInterrupt" in err
