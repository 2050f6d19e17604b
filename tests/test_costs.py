"""The cost of a grid, told beforehand: what is rehearsed, what is counted, and what is not known."""

import json
from pathlib import Path

import pytest

from bench import cli
from bench.runs.forecast import Forecast, forecast
from bench.runs.plan import Plan
from bench.settings import build
from bench.sweep import costs
from bench.sweep.costs import alike, finish
from bench.sweep.sweep import cells, run_cell

METHOD, TASK = "tunables:Obedient", "tunables:Distance"
HOUR = Forecast(
    weights=10, parameters=20, fits=1, steps=30, may_stop=False,
    seconds=3600.0, training=3000.0, prediction=600.0, memory=2**30,
)  # fmt: skip


@pytest.fixture
def told(capsys, monkeypatch, tmp_path):
    """Calls `bench sweep --dry-run`, where every rehearsal says what the test says, an hour unless given."""
    monkeypatch.chdir(tmp_path)

    def told(*arguments, says=lambda cell: {"forecast": HOUR}):
        rehearsed = []
        monkeypatch.setattr(costs, "_rehearsed", lambda cell: rehearsed.append(cell) or says(cell))
        code = cli.main(["sweep", *arguments, "--dry-run", "--format", "json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err, rehearsed

    return told


GRID = ("--methods", METHOD, "--tasks", TASK, "--method.size", "1,2", "--seeds", "0-4")


def test_cells_that_differ_only_in_their_seed_are_rehearsed_once(told):
    code, rows, _, rehearsed = told(*GRID)
    assert code == 0
    assert [cell.method_settings["size"] for cell in rehearsed] == [1, 2]
    assert [row["runs"] for row in rows] == [5, 5, 10]
    assert rows[0]["cell"] == f"{METHOD} {TASK} size=1"
    assert {rows[0][name] for name in ("weights", "parameters", "steps", "MiB")} == {10, 20, 30, 1024}
    assert rows[-1]["seconds left"] == 10 * HOUR.seconds


def test_whatever_else_differs_is_another_kind(tmp_path):
    grid = {"methods": ["a", "b"], "tasks": ["t", "u"], "preset": ["smoke", "paper"], "members": [None, 2]}
    grid |= {"method": {"x": [1, 2]}, "task": {"y": [1, 2]}, "seeds": [3, 1, 2]}
    groups = alike(cells(grid))
    assert len(groups) == 2**6
    assert all([cell.seed for cell in group] == [3, 1, 2] for group in groups)


def test_finished_cells_are_done_and_cost_nothing(told, tmp_path):
    for seed in (0, 3):
        run_cell(build(Plan, {"method": METHOD, "task": TASK, "method_settings": {"size": 1}, "seed": seed}))
    run_cell(build(Plan, {"method": METHOD, "task": TASK, "method_settings": {"size": 2}}))
    _, rows, _, rehearsed = told(*GRID[:-1], "0,3")
    assert [row["done"] for row in rows] == [2, 1, 3]
    assert [row["seconds left"] for row in rows] == [0, HOUR.seconds, HOUR.seconds]
    assert [cell.seed for cell in rehearsed] == [3]


def test_several_workers_share_the_time(told):
    _, rows, err, _ = told(*GRID, "--workers", "1000")
    assert [row["seconds left"] for row in rows[-2:]] == [10 * HOUR.seconds, HOUR.seconds]
    assert "1000 threads on" in err


def test_how_many_cells_a_cluster_runs_is_not_known(told):
    _, rows, err, _ = told(*GRID, "--workers", "slurm")
    assert "how many cells it runs at a time is not known" in err
    assert [row["cell"] for row in rows].count("all") == 1


def test_what_cannot_be_told_is_said(told):
    def says(cell):
        if cell.method_settings["size"] == 1:
            return {"reason": "the rehearsal ended with signal 9"}
        return {"forecast": Forecast(**{**vars(HOUR), "unknown": "no further", "may_stop": True})}

    code, rows, _, _ = told(*GRID, says=says)
    assert code == 0
    assert rows[0]["seconds left"] is None
    assert rows[0]["note"] == "cannot be told: the rehearsal ended with signal 9"
    assert rows[1]["note"] == "cannot be told whole: no further; less if fits stop early"
    assert rows[2]["note"] == "at least: 2 of 2 rows cannot be told whole; less if fits stop early"
    assert rows[2]["seconds left"] == 5 * HOUR.seconds


def test_a_refused_cell_is_a_row_and_the_others_are_told(told):
    code, rows, _, rehearsed = told("--methods", f"{METHOD},nosuch", "--tasks", TASK)
    assert code == 1
    assert len(rehearsed) == 1
    assert rows[1]["note"].startswith("refused: unknown method 'nosuch'")
    assert rows[-1]["seconds left"] == HOUR.seconds


def test_a_grid_file_is_told_as_flags_are_and_a_table_fits_a_terminal(told, tmp_path, capsys, monkeypatch):
    Path("grid.yaml").write_text(
        json.dumps({"methods": METHOD, "tasks": TASK, "method": {"size": [1, 2]}, "seeds": [0, 1, 2, 3, 4]})
    )
    assert told("--grid", "grid.yaml")[1] == told(*GRID)[1]
    assert cli.main(["sweep", "--grid", "grid.yaml", "--dry-run"]) == 0
    table = capsys.readouterr().out
    assert "10:00:00" in table
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("seconds", "workers", "ends"),
    [
        ([], 3, 0),
        ([5], 3, 5),
        ([2] * 10, 4, 6),  # ten runs in three rounds
        ([1, 1, 1, 9], 2, 10),  # the long one begins second on its worker: order counts
        ([9, 1, 1, 1], 2, 9),
        ([3, 2, 1], 1, 6),
    ],
)
def test_runs_begin_in_order_on_the_worker_that_is_free_first(seconds, workers, ends):
    assert finish(seconds, workers) == ends


@pytest.mark.slow
def test_a_rehearsal_in_a_process_of_its_own_tells_what_one_in_this_process_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    own = {"method": METHOD, "task": TASK, "out": tmp_path, "threads": 1}
    cell, refuses = (build(Plan, own | {"method_settings": {"trouble": t}}) for t in ("none", "refuses"))
    (cost,) = costs.costs([cell])
    here = forecast(cell)
    for name in ("weights", "parameters", "fits", "steps", "unknown"):
        assert getattr(cost.forecast, name) == getattr(here, name)
    (cost,) = costs.costs([refuses])
    assert cost.refused
    assert "obedient refuses this problem" in cost.note
    assert not list(tmp_path.iterdir())
