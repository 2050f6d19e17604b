"""The command line: `bench COMMAND ...`.

Exit codes: 0 done, 1 the run failed, 2 usage, 3 data, 4 the run diverged, 5 the output cannot be written,
130 stopped by the user. Standard output carries results only; of `bench run` its last line is the directory.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import jsonargparse
import yaml
from rich.console import Console
from rich.table import Table

import bench
from bench import data, registry, tables
from bench.contract import CAPABILITIES
from bench.errors import BenchError, Diverged, UsageError

if TYPE_CHECKING:
    from bench.contract import Arrays
    from bench.records import Record

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)

errors = Console(stderr=True, highlight=False, markup=False)
output = Console(highlight=False, markup=False)


class _Parser(jsonargparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest flags."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(_one_line(message, [o for a in self._actions for o in a.option_strings]))


def _one_line(message: str, flags: list[str]) -> str:
    unknown = re.search(r"[Uu]nrecognized arguments: (\S+)", message)
    if unknown and unknown[1].startswith("-"):
        flag = unknown[1].split("=")[0]
        return f"unknown flag {flag}: {registry.nearest(flag, [f for f in flags if f.startswith('--')])}"
    key = re.search(r'[Kk]ey "([^"]+)"', message)
    given = re.search(r"(?:Given|Got) value: (.*)", message)
    expected = re.findall(r"Expected a (?:typing\.)?(.*?)(?:\. Got|$)", message, re.MULTILINE)
    if key and given and expected:
        kinds = [re.sub(r"<class '(\w+)'>", r"\1", kind).replace("NoneType", "null") for kind in expected]
        kinds = [re.sub(r"Literal\[(.*)\]", r"one of \1", kind).replace("'", "") for kind in kinds]
        flag = f"--{key[1]} " if f"--{key[1]}" in flags else ""
        return f"{flag}{given[1]}: must be {' or '.join(dict.fromkeys(kinds))}"
    required = re.search(r"arguments are required: (\w+)$", message)
    if required and f"--{required[1]}" in flags:
        return f"--{required[1]} is required"
    return " ".join(message.split())


# --------------------------------------------------------------------------------------------- bench run


def _words(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Positional words and valued flags, before it is known which flags there are."""
    words: list[str] = []
    flags: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            words.append(argument)
        elif "=" in argument:
            flag, _, value = argument.partition("=")
            flags[flag] = value
        elif argument not in ("--force", "--help", "-h", "--print_config"):
            flags[argument] = next(rest, "")
    return words, flags


def _config(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: must hold settings by name, as --print_config prints them")
    return content


def _add_run_arguments(parser: _Parser) -> None:
    parser.add_argument(
        "--threads", type=int | None, default=None, help="CPU threads; default is torch's choice"
    )
    parser.add_argument("--out", type=str, default="runs", help="folder for runs")
    parser.add_argument(
        "--data-dir", type=str | None, default=None, help="folder of data files; also $BENCH_DATA"
    )


def _run_parser(method: str | None, task: str | None, preset: str) -> _Parser:
    parser = _Parser("bench run", description="Fit METHOD on TASK, score it, write the record.")
    parser.add_argument(
        "--config", action="config", help="settings from a file, as --print_config prints them"
    )
    parser.add_argument("METHOD", help="name of a method (bench list methods) or package.module:Class")
    parser.add_argument("TASK", help="name of a task (bench list tasks) or package.module:Class")
    parser.add_argument(
        "--preset",
        type=Literal["smoke", "standard", "paper"],
        default=preset,
        help="smoke proves the pipe, standard is ranked, paper is the document's own",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random in the run")
    parser.add_argument(
        "--members",
        type=int | None,
        default=None,
        help="fit so many independent copies and pool their draws; default is what the method's name says",
    )
    _add_run_arguments(parser)
    parser.add_argument(
        "--wandb",
        type=Literal["off", "offline", "online"],
        default="off",
        help="also log to Weights & Biases",
    )
    parser.add_argument("--force", action="store_true", help="replace what stands in the run's directory")
    if method is not None and task is not None:
        from bench.engine import TrainerOptions

        m, t = registry.method(method), registry.task(task)
        preset_m, preset_t, _ = registry.preset_values(m, t, preset)
        for entry, flag, values in ((m, "method", preset_m), (t, "task", preset_t)):
            parser.add_class_arguments(entry.cls.settings_class, flag, skip=set(entry.fixed))
            parser.set_defaults({f"{flag}.{k}": v for k, v in values.items() if k not in entry.fixed})
        parser.add_class_arguments(TrainerOptions, "trainer")
    return parser


def _run(arguments: list[str]) -> None:
    words, flags = _words(arguments)
    config = _config(flags.get("--config"))
    if not words and "METHOD" in config and "TASK" in config:
        words = [config.pop("METHOD"), config.pop("TASK")]
        arguments = [*words, *arguments]
    preset = flags.get("--preset", config.get("preset", "standard"))
    if len(words) < 2:
        if {"-h", "--help"} & set(arguments):
            _run_parser(None, None, preset).parse_args(["--help"])
        raise UsageError("bench run needs METHOD and TASK; see bench list")
    method, task = words[:2]
    chosen = _run_parser(method, task, preset).parse_args(arguments)

    from bench.progress import shown
    from bench.runner import run

    given = {}
    defaults_m, defaults_t, _ = registry.preset_values(registry.method(method), registry.task(task), preset)
    for flag, entry, defaults in (
        ("method", registry.method(method), defaults_m),
        ("task", registry.task(task), defaults_t),
    ):
        plain = {f.name: f.default for f in fields(entry.cls.settings_class)} | defaults
        values = vars(chosen[flag]) if flag in chosen else {}
        given[flag] = {k: v for k, v in values.items() if v != plain[k]}
    with shown(errors, f"{method} {task}") as observer:
        done = run(
            method,
            task,
            preset=preset,
            seed=chosen.seed,
            method_settings=given["method"],
            task_settings=given["task"],
            members=chosen.members,
            trainer=vars(chosen.trainer) if "trainer" in chosen else {},
            threads=chosen.threads,
            out=chosen.out,
            data_dir=chosen.data_dir,
            wandb=chosen.wandb,
            force=chosen.force,
            observers=(observer,),
        )
    if done.is_first_process:
        _print_record(done.directory, errors)
        output.print(str(done.directory), soft_wrap=True)


# ------------------------------------------------------------------------------------------ other commands


def _print_record(directory: Path, console: Console) -> None:
    from bench.diagnostics import mixed
    from bench.records import read_record
    from bench.runner import task_of

    record = read_record(directory)
    spec = task_of(record).spec
    title = f"{record.method.identity} on {record.task.identity}, {record.preset}, seed {record.seed}"
    table = Table(title=f"{title}: {record.status}", title_justify="left")
    for column in ("metric", "value", "unit", ""):
        table.add_column(column)
    for name, value in record.metrics.items():
        metric = spec.metrics[name]
        shown = f"{value:.4f}" if value is not None else "-"
        note = record.undefined.get(name, metric.description)
        main = " (main)" if name == record.task.main_metric else ""
        table.add_row(name + main, shown, metric.unit, note)
    console.print(table)
    steps = sum(fit.steps for fit in record.fits)
    console.print(
        f"{record.seconds:.1f} s, {steps} training steps, {record.environment.threads} threads, "
        f"settings {record.method.tuning}"
    )
    for fit in record.fits[-1:]:  # of a sequence, its end
        if fit.diagnostics:
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in fit.diagnostics.items())
            console.print(f"last fit: {numbers}")
    if (agree := mixed(record.diagnostics)) is not None:
        verdict = "the chains agree" if agree else "the chains do not agree: no reference, not to be compared"
        console.print(f"R-hat of predictions {record.diagnostics['prediction_rhat']:.3f}: {verdict}")
    for path in sorted((directory / "figures").glob("*.svg")):
        console.print(f"figure: {path}", soft_wrap=True)


def _list(arguments: list[str]) -> None:
    parser = _Parser("bench list", description="Show the methods and tasks there are.")
    parser.add_argument("kind", nargs="?", type=Literal["methods", "tasks"], default=None)
    kind = parser.parse_args(arguments).kind
    if kind != "tasks":
        table = Table(title="Methods", title_justify="left")
        for column in ("name", "what it is", "capabilities"):
            table.add_column(column, no_wrap=column == "name", overflow="fold")
        for name, entry in registry.methods().items():
            able = [capability for capability in CAPABILITIES if capability in entry.provides]
            table.add_row(name, entry.summary, ", ".join(able))
        output.print(table)
    if kind != "methods":
        table = Table(title="Tasks", title_justify="left")
        for column in ("name", "what it asks", "main metric", "needs", "ranked"):
            table.add_column(column, no_wrap=column == "name", overflow="fold")
        for name, entry in registry.tasks().items():
            spec = entry.cls(registry.build(entry.cls.settings_class, dict(entry.fixed), "task")).spec
            needs = ", ".join(sorted(spec.requires)) or "-"
            table.add_row(name, spec.question, spec.main_metric, needs, "yes" if spec.ranked else "no")
        output.print(table)


def _show(arguments: list[str]) -> None:
    parser = _Parser("bench show", description="Show the record of a run.")
    parser.add_argument("RUN", type=str, help="directory of a run")
    _print_record(Path(parser.parse_args(arguments).RUN), output)


def _figures(arguments: list[str]) -> None:
    from bench import figures
    from bench.runner import load_scores

    compare = {"continual": _compare_continual, "active": _compare_active, "singular": _compare_singular}
    if arguments[:1] and arguments[0] in compare:
        compare[arguments[0]](arguments[1:])
        return
    parser = _Parser(
        "bench figures",
        description="Draw the figures of runs anew, from their arrays. `bench figures continual` draws one "
        "figure of several runs of continual learning, `bench figures active` those of active learning, "
        "`bench figures singular` those of singular models, beside the published tables.",
    )
    parser.add_argument("RUN", nargs="+", type=str, help="directory of a run")
    for name in parser.parse_args(arguments).RUN:
        task, arrays = load_scores(Path(name))
        for path in figures.save(task.figures(arrays), Path(name) / "figures"):
            output.print(str(path), soft_wrap=True)


def _comparison_parser(what: str, description: str) -> _Parser:
    """The parser of `bench figures WHAT`, which draws several runs together."""
    parser = _Parser(f"bench figures {what}", description=description)
    parser.add_argument("RUN", nargs="+", type=str, help="directory of a run or committed record")
    parser.add_argument("--to", type=str, default="figures", help="folder of the figures")
    return parser


def _loaded(names: list[str]) -> Iterator[tuple[str, Record, Any, Arrays]]:
    """Runs, one after the other: directory, record, task and arrays."""
    from bench.records import read_record
    from bench.runner import load_scores

    for name in names:
        yield name, read_record(Path(name)), *load_scores(Path(name))


def _compare_continual(arguments: list[str]) -> None:
    from bench import figures
    from bench.records import read_curves
    from bench.studies import continual

    parser = _comparison_parser(
        "continual",
        "Accuracy on the steps seen so far against the step: a panel per task, a line per method "
        "and variant, a band of one standard deviation over its seeds. And the gradients of step 2, epoch by "
        "epoch, of runs that kept them.",
    )
    chosen = parser.parse_args(arguments)
    runs: list[Any] = []
    curves = []
    for name, record, task, arrays in _loaded(chosen.RUN):
        if not hasattr(task, "accuracy_matrix"):
            raise UsageError(f"{name} is a run of {record.task.name}, which is no task of continual learning")
        settings = record.task.identity.removeprefix(record.task.name).removeprefix("+")
        line = ", ".join([record.method.identity, *([settings] if settings else [])])
        runs.append((record.task.name, line, task, arrays))
        curves.append((record.task.name, line, read_curves(Path(name))))
    charts = {"accuracy": continual.comparison(runs), "gradients": continual.gradients(curves)}
    for path in figures.save({name: c for name, c in charts.items() if c is not None}, Path(chosen.to)):
        output.print(str(path), soft_wrap=True)


def _compare_active(arguments: list[str]) -> None:
    from bench import figures
    from bench.studies import active_comparison

    parser = _comparison_parser(
        "active",
        "Learning curves, errors of risk estimates and biases of several runs: a line per method "
        "and variant, a band over its seeds; then what can be said of the differences, with intervals.",
    )
    parser.add_argument(
        "--band",
        type=Literal["sd", "standard_error", "iqr"],
        default="standard_error",
        help="what is shaded over the trajectories of active learning",
    )
    chosen = parser.parse_args(arguments)
    runs: list[active_comparison.Run] = []
    charts: dict[str, Any] = {}
    for name, record, task, arrays in _loaded(chosen.RUN):
        if isinstance(task, active_comparison.Measured):
            runs.append(active_comparison.Run.of(record, task.measured(arrays)))
        elif record.task.name == "active_regression":  # one run has all trajectories, and compares by itself
            title = f"{record.task.identity}-{record.method.identity}-seed{record.seed}"
            charts |= {f"{title}-{key}": chart for key, chart in task.figures(arrays).items()}
        else:
            raise UsageError(f"{name} is a run of {record.task.name}, which is no task of active learning")
    found, sentences = active_comparison.comparison(runs, chosen.band)
    for path in figures.save(charts | found, Path(chosen.to)):
        output.print(str(path), soft_wrap=True)
    for sentence in sentences:
        output.print(sentence, soft_wrap=True)


def _compare_singular(arguments: list[str]) -> None:
    from bench import figures
    from bench.studies import singular
    from bench.tasks.singular_evidence import SingularEvidence

    parser = _comparison_parser(
        "singular",
        "Predictive bands and Psi against n of several runs of singular_evidence; then a row per "
        "run beside the published one, and what can be said of the differences, with intervals.",
    )
    chosen = parser.parse_args(arguments)
    runs: list[singular.Run] = []
    for name, record, task, arrays in _loaded(chosen.RUN):
        if not isinstance(task, SingularEvidence):
            raise UsageError(f"{name} is a run of {record.task.name}, which is not singular_evidence")
        runs.append(singular.Run.of(record, task, arrays))
    charts, rows, sentences = singular.comparison(runs)
    for path in figures.save(charts, Path(chosen.to)):
        output.print(str(path), soft_wrap=True)
    widths = [max(map(len, column)) for column in zip(singular.HEADER, *rows, strict=True)]
    for row in (singular.HEADER, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        output.print("  ".join(cells).rstrip(), soft_wrap=True)
    for sentence in sentences:
        output.print(sentence, soft_wrap=True)


def _data(arguments: list[str]) -> None:
    parser = _Parser("bench data", description="Show, fetch or check data sets.")
    parser.add_argument("action", type=Literal["list", "get", "check"], help="what to do")
    parser.add_argument(
        "NAME", nargs="?", type=str | None, default=None, help="a data set; check without it checks all"
    )
    parser.add_argument(
        "--data-dir", type=str | None, default=None, help="folder of data files; also $BENCH_DATA"
    )
    chosen = parser.parse_args(arguments)
    if chosen.action == "list":
        table = Table(title="Data sets", title_justify="left")
        for column in ("name", "title", "examples", "licence", "found in"):
            table.add_column(column, overflow="fold")
        for name, images in data.SOURCES.items():
            size = f"{images.train} + {images.test}"
            found = data.find(name, chosen.data_dir)
            table.add_row(name, images.title, size, images.licence, str(found or "not here"))
        for name, source in tables.SOURCES.items():
            size = f"{source.rows} x {source.columns}"
            found = tables.find(name, chosen.data_dir)
            table.add_row(name, source.title, size, source.licence, str(found or "not here"))
        output.print(table)
        return
    known = {name: data for name in data.SOURCES} | {name: tables for name in tables.SOURCES}
    if chosen.action == "get" and chosen.NAME is None:
        raise UsageError(f"bench data get needs a name: {', '.join(known)}")
    if chosen.NAME is not None and chosen.NAME not in known:
        near = difflib.get_close_matches(chosen.NAME.lower(), known, cutoff=0.4) or list(known)
        raise UsageError(f"unknown data set {chosen.NAME!r}; the nearest names are {', '.join(near)}")
    if chosen.action == "get":
        output.print(str(known[chosen.NAME].get(chosen.NAME, chosen.data_dir)), soft_wrap=True)
        return
    for name, module in known.items():
        if chosen.NAME is None and module is tables and tables.find(name, chosen.data_dir) is None:
            output.print(f"{name}: not here")  # few users have or need them all
        elif chosen.NAME in (None, name):
            output.print(module.check(name, chosen.data_dir), soft_wrap=True)


def _record(arguments: list[str]) -> None:
    from bench.leaderboard.entries import RECORDS, add

    parser = _Parser("bench record", description="Keep runs as evidence.")
    parser.add_argument("action", type=Literal["add"], help="add copies runs to the committed records")
    parser.add_argument(
        "RUN", nargs="+", type=str, help="directory of a run; neither smoke nor from changed source"
    )
    parser.add_argument("--to", type=str, default=str(RECORDS), help="folder of the committed records")
    parser.add_argument("--force", action="store_true", help="replace an older record of the same run")
    chosen = parser.parse_args(arguments)
    for name in chosen.RUN:
        output.print(str(add(Path(name), Path(chosen.to), chosen.force)), soft_wrap=True)


def _reference(arguments: list[str]) -> None:
    from bench.leaderboard.references import add
    from bench.studies.references import FOLDER

    parser = _Parser("bench reference", description="Make runs of a sampler the reference of their task.")
    parser.add_argument("action", type=Literal["add"], help="add copies predictions to the references")
    parser.add_argument(
        "RUN",
        nargs="+",
        type=str,
        help="directory of a run that mixed, fit to be a record; its method provides invariant",
    )
    parser.add_argument("--to", type=str, default=str(FOLDER), help="folder of the references")
    parser.add_argument("--force", action="store_true", help="replace an older reference of the same target")
    chosen = parser.parse_args(arguments)
    for name in chosen.RUN:
        output.print(str(add(Path(name), Path(chosen.to), chosen.force)), soft_wrap=True)


def _sweep(arguments: list[str]) -> int:
    from bench import sweep
    from bench.progress import shown

    parser = _Parser("bench sweep", description="Run every cell of a grid, and go on after one that fails.")
    parser.add_argument(
        "--grid",
        type=str,
        required=True,
        help="YAML: methods, tasks, seeds, preset, members, and settings under method and task; "
        "each a value or a list, of which the product is run; or a list of such blocks",
    )
    _add_run_arguments(parser)
    parser.add_argument(
        "--force",
        action="store_true",
        help="run failed cells again, and replace finished runs whose preset has changed since",
    )
    chosen = parser.parse_args(arguments)
    common = {name: chosen[name] for name in ("out", "data_dir", "threads", "force")}
    cells = sweep.read(Path(chosen.grid), **common)
    for cell in cells:  # what can be refused is told before hours are spent on the others
        try:
            cell.choice()
        except UsageError as error:
            errors.print(f"{cell}: refused: {error}", soft_wrap=True)
    outcomes = []
    for number, cell in enumerate(cells, 1):
        with shown(errors, f"{number} of {len(cells)}: {cell}") as observer:
            outcomes.append(sweep.run_cell(cell, (observer,)))
    table = Table(title=f"{len(cells)} cells", title_justify="left")
    for column in ("cell", "preset", "status", "main metric", "value"):
        table.add_column(column, overflow="fold")
    for outcome in outcomes:
        record, preset = outcome.record, outcome.cell.preset
        if record is None:
            table.add_row(str(outcome.cell), preset, f"refused: {outcome.refusal}", "-", "-")
            continue
        value = record.metrics[record.task.main_metric]
        shown_value = "-" if value is None else f"{value:.4f}"
        status = record.reason or record.status
        table.add_row(str(outcome.cell), preset, status, record.task.main_metric, shown_value)
    errors.print(table)
    for directory in dict.fromkeys(o.directory for o in outcomes if o.record is not None):
        output.print(str(directory), soft_wrap=True)
    statuses = {outcome.status for outcome in outcomes}
    if statuses & {"failed", "refused"}:
        return BenchError.exit_code
    return Diverged.exit_code if "diverged" in statuses else 0


def _tune(arguments: list[str]) -> None:
    from functools import partial

    from bench import tune
    from bench.plan import Plan
    from bench.progress import shown

    parser = _Parser(
        "bench tune", description="Choose settings for METHOD on TASK by validation data, within a budget."
    )
    parser.add_argument("METHOD", help="name of a method (bench list methods) or package.module:Class")
    parser.add_argument("TASK", help="name of a task (bench list tasks) or package.module:Class")
    parser.add_argument(
        "--budget",
        type=int,
        required=True,
        help="configurations to try, the untuned one among them; the same for every method of a task",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws and of every run")
    parser.add_argument(
        "--preset",
        type=Literal["smoke", "standard"],
        default="standard",
        help="smoke proves the pipe and writes no result",
    )
    _add_run_arguments(parser)
    parser.add_argument(
        "--to", type=str, default=str(registry.TUNED), help="folder of results; bench run reads the default"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="run failed configurations and those of another source again, replace any earlier result",
    )
    chosen = parser.parse_args(arguments)
    registry.method(chosen.METHOD), registry.task(chosen.TASK)  # before a warning that speaks of them
    options = {name: chosen[name] for name in ("seed", "preset", "out", "data_dir", "threads", "force")}
    plan = registry.build(Plan, {"method": chosen.METHOD, "task": chosen.TASK, **options})
    unequal = tune.unequal_budgets(chosen.METHOD, chosen.TASK, chosen.budget, Path(chosen.to))
    if unequal and chosen.preset != "smoke":
        errors.print(f"bench: warning: {unequal}", soft_wrap=True)
    result = tune.tune(plan, chosen.budget, Path(chosen.to), partial(shown, errors))
    criterion = result.criterion
    direction = "higher" if criterion.higher_is_better else "lower"
    title = f"{result.method} on {result.task}: {criterion.metric} on validation data, {direction} is better"
    table = Table(title=title, title_justify="left")
    for column in ("", "settings", "status", criterion.metric, "s", "training steps"):
        table.add_column(column, overflow="fold")
    for c in result.configurations:
        settings = ", ".join(f"{name}={value}" for name, value in c.settings.items())
        value = "-" if c.value is None else f"{c.value:.4f}"
        mark = f"{c.number} (chosen)" if c.number == result.chosen_number else str(c.number)
        table.add_row(mark, settings, c.reason or c.status, value, f"{c.seconds:.1f}", str(c.steps))
    errors.print(table)
    if chosen.preset == "smoke":
        errors.print("a smoke search proves the pipe and measures nothing: no result is written")
    else:
        output.print(str(registry.tuned_path(chosen.METHOD, chosen.TASK, Path(chosen.to))), soft_wrap=True)


COMMANDS: dict[str, tuple[Callable[[list[str]], int | None], str]] = {
    "run": (_run, "fit a method on a task, score it, write the record"),
    "list": (_list, "show the methods and tasks there are"),
    "show": (_show, "show the record of a run"),
    "figures": (_figures, "draw the figures of runs anew"),
    "data": (_data, "show, fetch or check data sets"),
    "record": (_record, "keep runs as evidence"),
    "reference": (_reference, "make runs of a sampler the reference of their task"),
    "sweep": (_sweep, "run every cell of a grid"),
    "tune": (_tune, "choose settings by validation data, within a budget"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(f"usage: bench COMMAND ...\n\n{bench.__doc__}\n\ncommands (each with --help):")
            print("\n".join(f"  {name:9} {text}" for name, (_, text) in COMMANDS.items()))
            return 0 if arguments else UsageError.exit_code
        if arguments[0] == "--version":
            print(f"posterior-bench {bench.__version__}")
            return 0
        if arguments[0] not in COMMANDS:
            raise UsageError(
                f"unknown command '{arguments[0]}': {registry.nearest(arguments[0], list(COMMANDS))}"
            )
        code = COMMANDS[arguments[0]][0](arguments[1:])
    except BenchError as error:
        errors.print(f"bench: {error}", soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        errors.print("bench: stopped; the same command goes on from here")
        return 130
    except BrokenPipeError:
        return 1
    return code or 0
