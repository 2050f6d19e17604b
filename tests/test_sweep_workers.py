"""Sweeps on workers: the rules of retries and of what is told, and real processes that are killed.

The rules are held with workers that run in this process or end as a script says. Processes are started where
only a process can show it; each imports torch, which takes seconds, so that they are few.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from bench import cli
from bench.commands import searching
from bench.commands.sweep_view import watched
from bench.errors import BenchError, OutputError, UsageError
from bench.runs import resolution
from bench.runs.plan import Plan
from bench.runs.records import read_record
from bench.settings import build
from bench.sweep import cells, dispatch, tune, worker, workers
from bench.sweep.dispatch import Board, run_all
from bench.sweep.sweep import directory_of, run_cell
from bench.sweep.worker import End
from bench.system.files import is_locked, locked

METHOD, TASK = "tunables:Obedient", "tunables:Distance"
DIED = End("died", "its worker was killed by signal 9 (SIGKILL)")


def cell(out, method=METHOD, task=TASK, **values):
    """A cell on one thread."""
    return build(Plan, {"method": method, "task": task, "out": out, "threads": 1, **values})


def digest(directory):
    """Of the arrays of a run."""
    return read_record(directory).provenance.arrays_digest


class Scripted:
    """Workers that run cells in this process, unless a script says how they end.

    Args:
        ends: By the number of a cell, how it ends the first times.
    """

    def __init__(self, **ends):
        self.ends = {name.removeprefix("cell"): list(several) for name, several in ends.items()}
        self.waiting, self.submitted, self.lines = [], [], []

    def submit(self, lines):
        """Takes cells."""
        for name, line in lines.items():
            self.waiting.append((name, line))
            self.lines.append(line)
            self.submitted.append((name, json.loads(line)["cell"]))

    def ended(self, seconds):
        """Runs the first of them."""
        if not self.waiting:
            time.sleep(0.01)
            return []
        name, line = self.waiting.pop(0)
        if self.ends.get(name):
            return [(name, self.ends[name].pop(0))]
        return [(name, worker.run(build(Plan, json.loads(line)["cell"])))]

    def close(self):
        """Nothing is left."""


# ---- flags


def planned(monkeypatch, tmp_path, *arguments):
    """The cells that a command would run, and nothing runs."""
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(searching, "_one_after_another", lambda cells: found.extend(cells) or [])
    assert cli.main(["sweep", *arguments]) == 0
    return found


@pytest.mark.parametrize(
    ("flags", "grid"),
    [
        ("--methods a,b --tasks t", {"methods": ["a", "b"], "tasks": "t"}),
        (
            "--methods a b --tasks=t,u --seeds 0-2,5",
            {"methods": ["a", "b"], "tasks": ["t", "u"], "seeds": [0, 1, 2, 5]},
        ),
        (
            "--methods a --tasks t --preset smoke paper --members null,2",
            {"methods": "a", "tasks": "t", "preset": ["smoke", "paper"], "members": [None, 2]},
        ),
        (
            "--method.x 1,1e-3 --method.y=true,word,null --task.z -1 --methods a --tasks t",
            {
                **{"methods": "a", "tasks": "t", "task": {"z": -1}},
                "method": {"x": [1, 1e-3], "y": [True, "word", None]},
            },
        ),
    ],
)  # fmt: skip
def test_flags_plan_what_a_file_plans(monkeypatch, tmp_path, flags, grid):
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    by_flags = planned(monkeypatch, tmp_path, *flags.split())
    assert by_flags == planned(monkeypatch, tmp_path, "--grid", "grid.yaml")
    assert by_flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--methods a", "--grid, or --methods and --tasks, is required"),
        ("--grid g --methods a --tasks t", "--grid and --methods: give a file or flags, not both"),
        ("--grid g --method.x 1", "--grid and --method: give a file or flags, not both"),
        ("--methods a --tasks t --seeds 2-x", "--seeds: 2-x: must be 0 or more"),
        ("--methods a --tasks t --seeds 2-1", "--seeds: the list is empty"),
        ("--methods a --tasks t --preset big", "--preset: big: must be one of smoke"),
        ("--methods a --tasks t --members 0", "--members: 0: must be 1 or more, or null"),
        ("--methods a --tasks t --method.x", "--method.x: the list is empty"),
        ("--methods a --tasks t --retries -1", "--retries -1: must be 0 or more"),
        ("--methods a --tasks t --workers 0", "--workers 0: must be a number, 1 or more, ray"),
        ("--methods a --tasks t --workers dask", "--workers dask: must be a number"),
        ("--methods a --tasks t --workers 1 --threads 0", "--threads 0: must be 1 or more"),
        ("--methods a --tasks t --workers 1 --cluster.gpus -1", "--cluster.gpus"),
        ("status nowhere", "nowhere is the folder of no sweep"),
    ],
)
def test_mistakes_are_one_line(capsys, monkeypatch, tmp_path, flags, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1), err
    assert message in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "package"), [("ray", "ray"), ("ray://h:1", "ray"), ("slurm", "submitit")])
def test_extra_that_is_not_installed_is_one_line(monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    held = f"bench.sweep.workers_{kind[:3] if package == 'ray' else kind}"
    monkeypatch.delitem(sys.modules, held, raising=False)  # else the package is not asked for again
    with pytest.raises(UsageError, match=f"needs {package}: pip install 'posterior-bench"):
        dispatch.chosen_workers(kind, 1, workers.Cluster(), Path())


def test_machine_without_slurm_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="--workers slurm: Could not detect"):
        dispatch.chosen_workers("slurm", 1, workers.Cluster(), tmp_path)


# ---- the rules


def test_outcomes_are_those_of_the_sequential_sweep(tmp_path):
    troubles = ("none", "fails", "diverges", "refuses")
    plans = [cell(tmp_path, method_settings={"trouble": trouble}, seed=2) for trouble in troubles]
    plans += [cell(tmp_path, "no_such"), cell(tmp_path, seed=3)]
    alone = [
        cell(tmp_path / "alone", p.method, method_settings=p.method_settings, seed=p.seed) for p in plans
    ]
    scripted = Scripted()
    outcomes = run_all(plans, scripted)
    expected = [run_cell(plan) for plan in alone]
    assert [o.status for o in outcomes] == [
        "completed",
        "failed",
        "diverged",
        "refused",
        "refused",
        "completed",
    ]
    for found, other in zip(outcomes, expected, strict=True):
        assert (found.status, found.began, str(found.refusal)) == (
            other.status,
            other.began,
            str(other.refusal),
        )
        if other.record is not None:
            assert found.record.provenance.arrays_digest == other.record.provenance.arrays_digest
    again = Scripted()
    assert [o.status for o in run_all(plans, again)] == [o.status for o in outcomes]
    assert [name for name, _ in again.submitted] == ["3"]  # what was refused has no record


def test_cell_whose_worker_dies_is_tried_again_and_then_failed_with_a_log(tmp_path):
    plans = [cell(tmp_path, seed=seed, force=True) for seed in range(3)]
    scripted = Scripted(cell0=[DIED], cell1=[DIED, DIED])
    outcomes = run_all(plans, scripted)
    assert [o.status for o in outcomes] == ["completed", "failed", "completed"]
    assert sorted(name for name, _ in scripted.submitted) == ["0", "0", "1", "1", "2"]
    forced = [plan["force"] for name, plan in scripted.submitted if name == "0"]
    assert forced == [True, False]  # to force again would empty the directory of the run that goes on
    told = "failed: its worker was killed by signal 9 (SIGKILL), 2 times; what it printed is in "
    assert str(outcomes[1].refusal) == f"{told}{cells.Note.of(plans[1]).log}"
    assert outcomes[1].record is None
    assert not (outcomes[1].directory / "record.json").exists()  # the same command goes on with it
    cells.write_plan(tmp_path, plans)
    states = [(each.state, each.reason.startswith(told)) for each in cells.standings(tmp_path)]
    assert states == [("completed", False), ("failed", True), ("completed", False)]
    assert [o.status for o in run_all([cell(tmp_path, seed=1)], Scripted())] == ["completed"]
    assert cells.standings(tmp_path)[1].state == "completed"


def test_without_retries_the_first_death_is_the_end(tmp_path):
    scripted = Scripted(cell0=[DIED])
    (outcome,) = run_all([cell(tmp_path)], scripted, retries=0)
    assert (outcome.status, len(scripted.submitted)) == ("failed", 1)


def test_run_of_another_process_is_waited_for(tmp_path):
    """A sweep that is started while workers of an earlier one are still at it, or a faster one is."""
    plans = [cell(tmp_path, seed=seed) for seed in range(2)]
    directory = directory_of(plans[0])
    scripted = Scripted(cell1=[End("busy")])
    looks = []

    def watch(board):
        looks.append(len(board.outcomes))
        if len(looks) == 5:
            release.set()
            thread.join()

    release, held = threading.Event(), threading.Event()

    def hold():
        with locked(directory):
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    outcomes = run_all(plans, scripted, watch=watch)
    assert [o.status for o in outcomes] == ["completed"] * 2
    assert [name for name, _ in scripted.submitted] == ["1", "1", "0"]


def test_process_that_finds_the_run_taken_says_so(tmp_path):
    plan = cell(tmp_path)
    with locked(directory_of(plan)):
        assert worker.run(plan) == End("busy")


def test_results_that_cannot_be_written_end_the_sweep(tmp_path):
    scripted = Scripted(cell0=[End("unwritable", "cannot write x: disk full")])
    with pytest.raises(OutputError, match="disk full"):
        run_all([cell(tmp_path), cell(tmp_path, seed=1)], scripted)
    assert worker.run(cell("/proc/runs")).state == "unwritable"


def test_accelerators_are_dealt_out_in_turn(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    local = workers.Local(3, 2, workers.devices())
    given = [process.variables for process in local._processes]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in given] == ["4", "6", "4"]
    assert {each["OMP_NUM_THREADS"] for each in given} == {"2"}
    local.close()


def test_search_on_workers_finds_what_it_finds_in_one_process(tmp_path, monkeypatch):
    """Settings that were tuned already are not read there either."""
    monkeypatch.setattr(resolution, "TUNED", tmp_path / "tuned")
    plan = cell(tmp_path / "alone")
    alone = tune.tune(plan, 4, resolution.TUNED)
    scripted = Scripted(cell2=[DIED, DIED])
    found = tune.tune(cell(tmp_path), 4, tmp_path / "else", run=lambda cells: run_all(cells, scripted))
    assert [c.settings for c in found.configurations] == [c.settings for c in alone.configurations]
    values = [c.value for c in alone.configurations]
    assert [c.value for c in found.configurations] == [*values[:2], None, values[3]]
    assert [c.status for c in found.configurations] == ["completed", "completed", "failed", "completed"]
    assert found.sampler == tune.Sampler()
    assert {json.loads(line)["untuned"] for line in scripted.lines} == {True}


# ---- what is told


def test_status_tells_every_state(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli.output, "_width", 250)
    plans = [cell(tmp_path, seed=seed) for seed in range(6)]
    cells.write_plan(tmp_path, [*plans, cell(tmp_path, "no_such")])
    run_cell(plans[0])
    notes = [cells.Note.of(plan) for plan in plans]
    for number in (1, 2):
        notes[number].observe("stage", {"name": "fit", "number": 2, "of": 4})
    notes[3].write_state("refused", "why")
    directory_of(plans[2]).mkdir(parents=True)
    (directory_of(plans[2]) / "unfinished.json").write_text("{}")
    run_cell(cell(tmp_path, seed=4))
    (directory_of(plans[4]) / "record.json").write_text("{}")
    with locked(directory_of(plans[1])):
        code = cli.main(["sweep", "status", str(tmp_path), "--format", "json"])
        rows = json.loads(capsys.readouterr().out)
        assert cli.main(["sweep", "status", str(tmp_path)]) == 1
    states = ["completed", "running", "unfinished", "refused", "damaged", "planned", "refused"]
    assert (code, [row["state"] for row in rows]) == (1, states)
    assert [row["progress"] for row in rows[:4]] == [1.0, 0.25, 0.25, None]
    assert (rows[0]["main metric"], rows[0]["value"]) == ("closeness", pytest.approx(10 - 1.6990, abs=1e-3))
    assert rows[1]["note"] == "fit (2 of 4)"
    assert "unknown method 'no_such'" in rows[-1]["note"]
    table = capsys.readouterr().out
    assert "7 cells: 1 completed, 2 refused, 1 damaged, 1 running, 1 unfinished, 1 planned; 64 %" in table
    assert "25 %" in table


def test_damaged_plan_is_one_line(tmp_path):
    cells.write_plan(tmp_path, [cell(tmp_path)])
    (tmp_path / "sweep" / "plan.json").write_text("{")
    with pytest.raises(UsageError, match="is damaged: start the sweep again"):
        cells.standings(tmp_path)


def test_sequential_sweep_tells_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    seen = []

    def value(self, learning_rate):
        seen.extend(each.state for each in cells.standings(Path("runs")))
        return 1.0

    monkeypatch.setattr("tunables.Distance.value", value)
    assert cli.main(["sweep", "--methods", METHOD, "--tasks", TASK, "--seeds", "0-1"]) == 0
    assert seen == ["running", "planned", "completed", "running"]


@pytest.fixture
def board(tmp_path):
    """Of three cells: one runs, one failed, one has not begun."""
    plans = [cell(tmp_path, seed=seed) for seed in range(3)]
    board = Board(plans)
    board.note(0).observe("stage", {"name": "fit", "number": 4, "of": 4})
    board.outcomes[1] = run_cell(cell(tmp_path, method_settings={"trouble": "fails"}))
    return board


def test_lines_tell_what_changes(board):
    stream, clock = io.StringIO(), iter(range(0, 1000, 40))
    with watched(Console(file=stream), lambda: next(clock)) as view:
        view.look(board)
        board.outcomes[2] = run_cell(board.cells[2])
        board.deaths[0].append("its worker was killed")
        view.look(board)
    lines = [line.split("  ", 1)[1].strip() for line in stream.getvalue().splitlines()]
    assert lines[0] == "58 %  ETA -:--:--  3 cells: 1 failed, 1 running, 1 planned"
    assert lines[1] == f"{METHOD} {TASK} seed 0: its worker was killed; it is tried again"
    assert lines[2] == f"{METHOD} {TASK} seed 2: completed, closeness 8.301"
    assert "\x1b" not in stream.getvalue()


def test_live_table_has_what_runs_first_and_fits_the_terminal(board):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=5, _environ={"TERM": "xterm"})
    with watched(console) as view:
        view.look(board)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "58 %  ETA" in text
    row = next(line for line in text.splitlines() if " running " in line)
    assert "75 %" in row
    assert "fit (4 of 4)" in row
    assert "and 1 more: bench sweep status shows all" in text
    assert max(map(len, text.splitlines())) <= 100


# ---- processes


def test_unwilling_worker_is_a_death(tmp_path, monkeypatch):
    """It cannot be started, or ends before its first answer."""
    line = worker.message(cell(tmp_path), tmp_path / "x.log")
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert workers.Process({}, str(tmp_path)).run(line).reason.startswith("no worker can be started")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    process = workers.Process({}, str(tmp_path))
    assert process.run(line) == End("died", "its worker ended with exit code 1")
    process.stop()
    assert process.run(line) == End("died", "stopped")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, and processes that find the toys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return tmp_path


def until(condition, seconds=300):
    """Waits for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_killed_workers_cost_no_cell_and_no_digit(here, monkeypatch, capsys):
    for variable in ("KILLS", "KILLS_ALWAYS"):
        monkeypatch.setenv(variable, str(here / variable))
        (here / variable).touch()
    names = ["toys:KilledOnce", "toys:KilledAlways", "toys:HasBug", "map"]
    flags = ["sweep", "--methods", *names, "--tasks", "toys:OwnTask", "--workers", "2"]
    assert cli.main(flags) == 1
    cli.main(["sweep", "status", "--format", "json"])
    rows = json.loads(capsys.readouterr().out.partition("[")[2].join(["[", ""]))
    assert [row["state"] for row in rows] == ["completed", "failed", "failed", "completed"]
    assert "killed by signal 9 (SIGKILL), 2 times" in rows[1]["note"]
    assert "has a bug" in Path(rows[2]["log"]).read_text()
    log = (Path(rows[0]["directory"]) / "log.txt").read_text()
    assert "was_there=True" in log  # the first fit, by the second process
    for variable in ("KILLS", "KILLS_ALWAYS"):
        monkeypatch.delenv(variable)
    for row, name in ((rows[0], names[0]), (rows[3], "map")):
        alone = run_cell(cell(here / "alone", name, "toys:OwnTask"))
        assert digest(Path(row["directory"])) == alone.record.provenance.arrays_digest


@pytest.mark.slow
def test_ctrl_c_stops_all_and_the_same_command_goes_on(here, monkeypatch, capsys):
    """The cell is in its third fit and never ends it; the first two are not made again."""
    monkeypatch.setenv("WAITS_IN_FIT", "3")
    plan = cell(Path("runs"), "toys:Waits", "toys:OwnTask")
    started, popen = [], subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(workers.subprocess, "Popen", start)
    note = cells.Note.of(plan)

    def interrupt():
        until(lambda: note.read().get("share") == 0.4)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    code = cli.main(
        ["sweep", "--methods", "toys:Waits", "--tasks", "toys:OwnTask", "--seeds", "0-1", "--workers", "1"]
    )
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert code == 130
    assert [child.returncode for child in started] == [143]
    assert [each.state for each in cells.standings(Path("runs"))] == ["unfinished", "planned"]
    monkeypatch.delenv("WAITS_IN_FIT")
    events = []
    outcome = run_cell(plan, (lambda event, values: events.append((event, values)),))
    assert [values["was_there"] for event, values in events if event == "fit"] == [True] * 2 + [False] * 3
    assert (
        outcome.record.provenance.arrays_digest
        == run_cell(cell(here / "alone", "toys:Waits", "toys:OwnTask")).record.provenance.arrays_digest
    )


PARENT = """
import os, subprocess, sys
from bench.sweep import workers
popen = subprocess.Popen
def start(*arguments, **options):
    child = popen(*arguments, **options)
    print(child.pid, flush=True)
    return child
workers.subprocess.Popen = start
workers.Process(workers.environment(1), os.getcwd()).run(sys.argv[1])
"""


@pytest.mark.slow
def test_worker_does_not_outlive_who_started_it(here, monkeypatch):
    monkeypatch.setenv("WAITS_IN_FIT", "1")
    plan = cell(here / "runs", "toys:Waits", "toys:OwnTask")
    note = cells.Note.of(plan)
    line = worker.message(plan, note.log)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, line], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    until(lambda: note.read().get("state") == "running")
    assert is_locked(note.directory)
    parent.kill()
    parent.communicate()
    until(lambda: not Path(f"/proc/{child}").exists() or is_zombie(child), 20)
    assert not is_locked(note.directory)
    assert cells.standing("", "", note).state == "unfinished"


def is_zombie(pid):
    """Whether a process is there for its parent's sake alone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
