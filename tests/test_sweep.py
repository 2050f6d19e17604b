"""Sweeps: what a grid means, and that whatever happens to one cell the others go on."""

import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
import tunables
import yaml
from tunables import BEGUN

import bench
from bench import cli
from bench.commands.formats import number
from bench.engine.engine import TrainerOptions
from bench.errors import DataError, OutputError, UsageError
from bench.runs import records, resolution, runner
from bench.runs.plan import Plan
from bench.runs.resolution import resolve
from bench.settings import build
from bench.sweep import sweep
from bench.sweep.sweep import cells, run_cell

METHOD, TASK = "tunables:Obedient", "tunables:Distance"
GRID = {"methods": METHOD, "tasks": TASK}


def cell(method=METHOD, task=TASK, **values):
    """A cell of a grid."""
    return build(Plan, {"method": method, "task": task, **values})


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Calls `bench sweep` on a grid in an empty folder; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    for console in (cli.errors, cli.output):
        monkeypatch.setattr(console, "_width", 250)

    def call(grid, *arguments):
        (tmp_path / "grid.yaml").write_text(grid if isinstance(grid, str) else yaml.safe_dump(grid))
        BEGUN.clear()
        capsys.readouterr()
        code = cli.main(["sweep", "--grid", "grid.yaml", *arguments])
        return code, *capsys.readouterr()

    return call


def rows(table, status):
    """Rows of a printed table that have this status."""
    return len(re.findall(rf" {status}  +", table))


# ---- grids


def test_cells_are_the_product_of_all_lists_with_seeds_innermost():
    grid = {
        "methods": ["a", "b"],
        "tasks": ["t", "u"],
        "seeds": [3, 1],
        "preset": ["smoke", "paper"],
        "members": [None, 2],
        "method": {"x": [1, 2], "y": 3},
        "task": {"z": [4, 5]},
        "trainer": {"precision": ["32-true", "bf16-mixed"], "stacked": True},
    }
    assert [c.trainer for c in cells(grid)[:4:2]] == [
        {"precision": precision, "stacked": True} for precision in ("32-true", "bf16-mixed")
    ]
    del grid["trainer"]
    found = cells(grid)
    assert len(found) == 2**7
    assert len({repr(c) for c in found}) == 2**7
    assert found[:3] == [
        cell("a", "t", seed=3, preset="smoke", method_settings={"x": 1, "y": 3}, task_settings={"z": 4}),
        cell("a", "t", seed=1, preset="smoke", method_settings={"x": 1, "y": 3}, task_settings={"z": 4}),
        cell("a", "t", seed=3, preset="smoke", method_settings={"x": 1, "y": 3}, task_settings={"z": 5}),
    ]
    last = {"method_settings": {"x": 2, "y": 3}, "task_settings": {"z": 5}}
    assert found[-1] == cell("b", "u", seed=1, preset="paper", members=2, **last)


def test_single_values_stand_for_lists_and_the_rest_has_defaults():
    assert cells({"methods": "a", "tasks": "t"}) == [cell("a", "t")]


def test_values_of_a_grid_keep_their_kind():
    values = [1, 1.0, True, "1", "1e-3", None]
    found = cells({"methods": "a", "tasks": "t", "method": {"x": values}})
    assert [repr(c.method_settings["x"]) for c in found] == [repr(value) for value in values]


def test_what_all_cells_have_in_common_is_part_of_each(tmp_path):
    found = cells([GRID, GRID | {"seeds": 1}], out=tmp_path, threads=2, force=True)
    assert [(c.seed, c.out, c.threads, c.force) for c in found] == [(s, tmp_path, 2, True) for s in (0, 1)]


def test_blocks_are_joined():
    blocks = [{"methods": ["a", "b"], "tasks": "t"}, {"methods": "b", "tasks": "t", "method": {"x": 1}}]
    assert [(c.method, c.method_settings) for c in cells(blocks)] == [("a", {}), ("b", {}), ("b", {"x": 1})]


def test_cells_of_one_run_are_made_once_and_told(call):
    """The same cell in two blocks, and one that spells out the default; a cell that is refused counts too."""
    blocks = [
        GRID | {"methods": [METHOD, "no_such"]},
        GRID | {"methods": [METHOD, "no_such"], "method": {"size": [5, 6]}},
        GRID | {"methods": "no_such"},
    ]
    code, out, err = call(blocks)
    assert (code, len(out.splitlines()), len(BEGUN)) == (1, 2, 2)
    first = err.splitlines()[0]
    assert first.startswith("2 of 7 cells are the run of another cell, and made once: ")
    assert first.endswith(f"{METHOD} {TASK} size=5 seed 0 is that of {METHOD} {TASK} seed 0")
    assert "5 cells" in err
    assert sweep.distinct(cells(GRID | {"seeds": [0, 1]}))[1] is None


def test_examples_of_the_documentation_are_grids():
    text = (Path(__file__).parent.parent / "docs" / "tuning.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    found = cells(yaml.safe_load(example))
    assert len(found) == 12
    shown = textwrap.dedent(sweep.__doc__.split(":\n\n", 1)[1].split("\n\n")[0])
    found += cells(yaml.safe_load(shown))
    assert len(found) == 12 + 2 * 3 * 2 * 2
    for each in found[:12]:
        resolve(each)


MALFORMED = [
    ("{", "while parsing"),
    ("", "must hold the keys methods, tasks, seeds"),
    ("[]", "holds no block"),
    ("- 3", "must hold the keys methods, tasks, seeds"),
    ("methods: map", "tasks: must be given"),
    ("tasks: t", "methods: must be given"),
    ("methods: a\ntasks: t\nseed: 1", "unknown key seed: did you mean seeds?"),
    ("- {methods: a, tasks: t}\n- {methods: a, tasks: t, color: 1}", "block 2: unknown key color"),
    ("methods: []\ntasks: t", "methods: the list is empty"),
    ("methods: [a, 3]\ntasks: t", "methods: 3: must be a name, or a list"),
    ("methods: {a: 1}\ntasks: t", "methods: {'a': 1}: must be a name"),
    ("methods: a\ntasks: t\nseeds: [0, -1]", "seeds: -1: must be 0 or more, below 2^63"),
    ("methods: a\ntasks: t\nseeds: 0.5", "seeds: 0.5: must be 0 or more, below 2^63"),
    ("methods: a\ntasks: t\nseeds: true", "seeds: True: must be 0 or more, below 2^63"),
    ("methods: a\ntasks: t\nseeds:", "seeds: None: must be 0 or more, below 2^63"),
    ("methods: a\ntasks: t\npreset: tuned", "preset: tuned: must be one of smoke, standard, paper"),
    ("methods: a\ntasks: t\nmembers: 0", "members: 0: must be 1 or more, or null"),
    ("methods: a\ntasks: t\nmethod: [x]", "method: ['x']: must hold settings by name"),
    ("methods: a\ntasks: t\nmethod: {1: x}", "method: {1: 'x'}: must hold settings by name"),
    ("methods: a\ntasks: t\ntask: {x: []}", "task.x: the list is empty"),
    ("methods: a\ntasks: t\nmethod: {x: {y: 1}}", "method.x: {'y': 1}: must be a value, or a list"),
    ("methods: a\ntasks: t\nmethod: {x: [[1, 2]]}", "method.x: [1, 2]: must be a value"),
    ("methods: a\ntasks: t\ntrainer: stacked", "trainer: stacked: must hold settings by name"),
    (
        "methods: a\ntasks: t\ntrainer: {devices: 2}",
        "trainer.devices: each cell of a sweep runs in one process",
    ),
    (
        "- {methods: a, tasks: t}\n- {methods: a, tasks: t, trainer: {num_nodes: 2}}",
        "block 2: trainer.num_nodes: ",
    ),
]


@pytest.mark.parametrize(("grid", "message"), MALFORMED)
def test_malformed_grid_is_one_line_that_names_the_key(call, tmp_path, grid, message):
    code, out, err = call(grid)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert err.startswith("bench: --grid grid.yaml: ")
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["grid.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--grid, or --methods and --tasks, is required"),
        (["--grid", "none.yaml"], "--grid none.yaml: "),
        (["--grid", "."], "--grid .: "),
        (["--grid", "grid.yaml", "--threads", "0"], "--threads 0: must be 1 or more"),
        (["--grid", "grid.yaml", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_bad_arguments_are_one_line(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(GRID))
    assert cli.main(["sweep", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err


# ---- runs


def test_sweep_runs_each_cell_as_bench_run_would(call, tmp_path):
    grid = GRID | {"seeds": [0, 1], "method": {"learning_rate": ["1e-3", 0.01]}}
    code, out, err = call(grid)
    assert code == 0
    names = [f"tunables.Obedient+learning_rate={rate}" for rate in (0.001, 0.01)]
    assert out.splitlines() == [
        f"runs/tunables.Distance/{name}/standard-seed{seed}" for name in names for seed in (0, 1)
    ]
    assert "4 cells" in err
    assert rows(err, "completed") == 4
    for line, settings in zip(out.splitlines(), BEGUN, strict=True):
        record = records.read_record(tmp_path / line)
        assert record.method.settings["learning_rate"] == settings.learning_rate
        assert number(record.metrics["closeness"]) in err
    alone = bench.run(METHOD, TASK, seed=1, method_settings={"learning_rate": 0.01}, out=tmp_path / "alone")
    assert record.provenance.arrays_digest == alone.record.provenance.arrays_digest


def test_finished_cells_are_not_run_again(call):
    grid = GRID | {"seeds": [0, 1]}
    _, first, _ = call(grid)
    assert len(BEGUN) == 2
    code, out, err = call(grid | {"seeds": [0, 1, 2]})
    assert (code, len(BEGUN)) == (0, 1)
    assert out.splitlines()[:2] == first.splitlines()
    assert rows(err, "completed") == 3


def test_rows_for_programs_stand_alone_on_standard_output(call):
    grid = GRID | {"seeds": [0, 1]}
    _, directories, table = call(grid)
    code, out, err = call(grid, "--format", "json")
    assert (code, BEGUN, "2 cells" in err) == (0, [], False)
    found = json.loads(out)
    assert [row["directory"] for row in found] == directories.splitlines()
    assert [row["value"] for row in found] == [
        records.read_record(Path(row["directory"])).metrics[row["main metric"]] for row in found
    ]
    assert all(number(row["value"]) in table for row in found)


def test_whatever_happens_to_a_cell_is_a_row_and_the_others_go_on(call, tmp_path):
    troubles = ["diverges", "fails", "refuses", "none"]
    grid = [
        {"methods": ["no_such", METHOD], "tasks": TASK, "method": {"trouble": troubles}},
        {"methods": "toys:CannotGoOn", "tasks": "split_digits"},
        {"methods": METHOD, "tasks": TASK, "method": {"speed": 3}},
        {"methods": ["toys:TurnsNaN", "toys:HasBug"], "tasks": "toys:OwnTask"},
    ]
    code, out, err = call(grid)
    assert code == 1
    told, _, table = err.partition("12 cells")
    for message in (
        "refused: unknown method 'no_such': choose from",
        "refused: toys:CannotGoOn cannot run split_digits: it lacks the capability sequential",
        "refused: --method.speed: tunables:Obedient has no such setting",
    ):
        assert message in told  # before the first run
        assert message in table
    assert "refused: obedient refuses this problem: choose another" in table
    for message in (
        "diverged at stage 'fit', epoch 1, step 1: the loss is nan",
        "failed: RuntimeError: told to",
    ):
        assert message in table
    assert "diverged at stage 'step 1', epoch 1, step 3" in table
    assert "failed: RuntimeError: this method has a bug" in table
    assert rows(table, "completed") == 1
    statuses = [records.read_record(tmp_path / line).status for line in out.splitlines()]
    assert statuses == ["diverged", "failed", "completed", "diverged", "failed"]

    code, again, _ = call(grid)
    assert (code, again, BEGUN) == (1, out, [])  # no record is made a second time


def test_exit_code_of_divergences_alone(call):
    assert call(GRID | {"method": {"trouble": ["diverges", "none"]}})[0] == 4


def test_failed_cell_runs_again_by_force_and_others_stay(call, monkeypatch):
    grid = GRID | {"method": {"trouble": ["fails", "diverges", "none"]}}
    assert call(grid)[0] == 1
    monkeypatch.setattr(tunables.Obedient, "loss_terms", bench.methods.map.MAP.loss_terms)
    assert call(grid)[0] == 1
    assert BEGUN == []
    code, _, err = call(grid, "--force")
    assert (code, [s.trouble for s in BEGUN]) == (4, ["fails"])
    assert rows(err, "completed") == 2


def test_run_of_a_preset_that_has_changed_since_is_no_run_of_this_cell(tmp_path, monkeypatch):
    """A bare name stands for what `standard` is at the time."""
    run_cell(cell(out=tmp_path))
    monkeypatch.setattr(
        resolution,
        "preset_values",
        lambda m, t, preset: ({"size": 7}, {}, "tuned"),
    )
    outcome = run_cell(cell(out=tmp_path))
    assert outcome.status == "refused"
    assert "standard-seed0 holds a run with other settings; --force replaces it" in str(outcome.refusal)
    outcome = run_cell(cell(out=tmp_path, force=True))
    assert (outcome.status, outcome.record.method.settings["size"]) == ("completed", 7)


def test_ctrl_c_stops_and_the_same_command_goes_on(call, monkeypatch):
    grid = GRID | {"method": {"trouble": ["none", "stops"]}, "seeds": [0, 1]}
    code, out, err = call(grid)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "bench: stopped; the same command goes on from here"
    assert len(BEGUN) == 2
    monkeypatch.setattr(tunables.Obedient, "loss_terms", bench.methods.map.MAP.loss_terms)
    code, out, _ = call(grid)
    assert (code, len(out.splitlines())) == (0, 4)
    assert [s.trouble for s in BEGUN] == ["stops", "stops"]


def test_stopped_cell_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """The cell's own unfinished run: fits that are finished are found again."""
    few = cell("map", "toys:OwnTask", out=tmp_path)
    epochs = []

    def stop(event, values):
        if event == "log" and values["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cell(few, observers=(stop,))
    outcome = run_cell(few, observers=(lambda event, _: epochs.append(event),))
    assert outcome.status == "completed"
    assert epochs.count("epoch") == 2


def test_missing_data_is_a_row_and_a_full_disk_the_end(tmp_path, monkeypatch):
    def missing(self):
        raise DataError("the data are not here")

    monkeypatch.setattr(tunables.Distance, "data_digest", missing)
    assert str(run_cell(cell(out=tmp_path)).refusal) == "the data are not here"
    monkeypatch.undo()
    with pytest.raises(OutputError, match="cannot write /proc/runs"):
        run_cell(cell(out="/proc/runs"))


def test_damaged_record_is_a_row(tmp_path):
    outcome = run_cell(cell(out=tmp_path))
    (outcome.directory / "record.json").write_text("{}")
    again = run_cell(cell(out=tmp_path))
    assert "is no record of schema" in str(again.refusal)


@pytest.mark.parametrize(("gpus", "devices"), [(0, "auto"), (1, "auto"), (4, 1)])
def test_cell_takes_one_device(tmp_path, monkeypatch, gpus, devices):
    """Several processes would each be a whole sweep."""
    taken = []

    def execute(plan, observers):
        taken.append(TrainerOptions(**plan.trainer).devices)
        raise UsageError("enough")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(runner, "execute", execute)
    run_cell(cell(out=tmp_path))
    assert taken == [devices]
