"""The command line: `bench COMMAND ...`.

Exit codes: 0 done, 1 the run failed, 2 usage, 3 data, 4 the run diverged, 5 the output cannot be written,
130 stopped by the user. Standard output carries results only; of `bench run` its last line is the directory.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NoReturn

import jsonargparse
import yaml
from rich.console import Console
from rich.table import Table

import bench
from bench import data, registry
from bench.contract import CAPABILITIES
from bench.errors import BenchError, UsageError

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
    parser.add_argument(
        "--threads", type=int | None, default=None, help="CPU threads; default is torch's choice"
    )
    parser.add_argument("--out", type=str, default="runs", help="folder for runs")
    parser.add_argument(
        "--data-dir", type=str | None, default=None, help="folder of data files; also $BENCH_DATA"
    )
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
    if done.record is not None:
        _print_record(done.directory, errors)
        output.print(str(done.directory), soft_wrap=True)


# ------------------------------------------------------------------------------------------ other commands


def _print_record(directory: Path, console: Console) -> None:
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
    for path in sorted((directory / "figures").glob("*.svg")):
        console.print(f"figure: {path}", soft_wrap=True)


def _list(arguments: list[str]) -> None:
    parser = _Parser("bench list", description="Show the methods and tasks there are.")
    parser.add_argument("kind", nargs="?", type=Literal["methods", "tasks"], default=None)
    kind = parser.parse_args(arguments).kind
    if kind != "tasks":
        table = Table(title="Methods", title_justify="left")
        for column in ("name", "what it is", "capabilities"):
            table.add_column(column)
        for name, entry in registry.methods().items():
            able = [capability for capability in CAPABILITIES if capability in entry.provides]
            table.add_row(name, entry.summary, ", ".join(able))
        output.print(table)
    if kind != "methods":
        table = Table(title="Tasks", title_justify="left")
        for column in ("name", "what it asks", "main metric", "needs", "ranked"):
            table.add_column(column)
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

    parser = _Parser("bench figures", description="Draw the figures of runs anew, from their arrays.")
    parser.add_argument("RUN", nargs="+", type=str, help="directory of a run")
    for name in parser.parse_args(arguments).RUN:
        task, arrays = load_scores(Path(name))
        for path in figures.save(task.figures(arrays), Path(name) / "figures"):
            output.print(str(path), soft_wrap=True)


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
        for name, source in data.SOURCES.items():
            found = data.find(name, chosen.data_dir)
            table.add_row(
                name,
                source.title,
                f"{source.train} + {source.test}",
                source.licence,
                str(found or "not here"),
            )
        output.print(table)
    elif chosen.action == "get":
        if chosen.NAME is None:
            raise UsageError(f"bench data get needs a name: {', '.join(data.SOURCES)}")
        output.print(str(data.get(chosen.NAME, chosen.data_dir)), soft_wrap=True)
    else:
        for name in [chosen.NAME] if chosen.NAME else data.SOURCES:
            output.print(data.check(name, chosen.data_dir), soft_wrap=True)


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


COMMANDS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "run": (_run, "fit a method on a task, score it, write the record"),
    "list": (_list, "show the methods and tasks there are"),
    "show": (_show, "show the record of a run"),
    "figures": (_figures, "draw the figures of runs anew"),
    "data": (_data, "show, fetch or check data sets"),
    "record": (_record, "keep runs as evidence"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(f"usage: bench COMMAND ...\n\n{bench.__doc__}\n\ncommands (each with --help):")
            print("\n".join(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items()))
            return 0 if arguments else UsageError.exit_code
        if arguments[0] == "--version":
            print(f"posterior-bench {bench.__version__}")
            return 0
        if arguments[0] not in COMMANDS:
            raise UsageError(
                f"unknown command '{arguments[0]}': {registry.nearest(arguments[0], list(COMMANDS))}"
            )
        COMMANDS[arguments[0]][0](arguments[1:])
    except BenchError as error:
        errors.print(f"bench: {error}", soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        errors.print("bench: stopped; the same command goes on from here")
        return 130
    except BrokenPipeError:
        return 1
    return 0
