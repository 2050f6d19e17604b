"""`bench run`: two passes over the arguments, since METHOD and TASK decide which flags there are."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

from bench.commands.costing import print_cost
from bench.commands.formats import add_format, write
from bench.commands.parser import (
    Parser,
    add_method_and_task,
    add_option,
    add_run_arguments,
    errors,
    output,
)
from bench.commands.results import ASIDE, metric_rows, print_record
from bench.errors import UsageError
from bench.runs import registry, resolution
from bench.runs.index import kept
from bench.runs.plan import Logger, Plan, options
from bench.settings import build, read_yaml

_TABLES = ("method", "task", "trainer")
_MUST_BE = {
    "METHOD": "a name",
    "TASK": "a name",
    "preset": f"one of {', '.join(resolution.PRESETS)}",
    "config": "left out, a file names no further file",
}
_LOGGERS = get_args(Logger)


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
        elif argument not in ("--energy", "--force", "--dry-run", "--all", "--help", "-h", "--print_config"):
            flags[argument] = next(rest, "")
    return words, flags


def _configs(arguments: list[str]) -> dict[str, Any]:
    """What the files after `--config` say together, later ones first."""
    found: dict[str, Any] = {}
    for flag, following in pairwise([*arguments, ""]):
        if flag == "--config" or flag.startswith("--config="):
            found |= _config(following if flag == "--config" else flag.partition("=")[2])
    return found


def _config(path: str) -> dict[str, Any]:
    content = read_yaml(Path(path), "--config")
    tables = [content] + [content.get(name, {}) for name in _TABLES if isinstance(content, dict)]
    if not all(isinstance(table, dict) and all(isinstance(key, str) for key in table) for table in tables):
        raise UsageError(f"--config {path}: must hold settings by name, as --print_config prints them")
    for name in ("METHOD", "TASK", "preset", "config"):
        if not isinstance(value := content.get(name, ""), str) or (name == "config" and value):
            raise UsageError(f"--config {path}: {name}: {value}: must be {_MUST_BE[name]}")
    return content


def _loggers(given: list[str]) -> tuple[Logger, ...]:
    """Names out of the flags `--logger`, each of which may hold several, with commas between them."""
    names = tuple(name.strip() for flag in given for name in flag.split(","))
    if unknown := [name for name in names if name not in _LOGGERS]:
        raise UsageError(f"--logger {unknown[0]}: must be one of {', '.join(_LOGGERS)}")
    return cast("tuple[Logger, ...]", names)


def _run_parser(method: str | None, task: str | None, preset: str) -> Parser:
    parser = Parser("bench run", description="Fit METHOD on TASK, score it, write the record.")
    parser.add_argument(
        "--config", action="config", help="settings from a file, as --print_config prints them"
    )
    add_method_and_task(parser)
    add_option(parser, "preset", default=preset)
    add_option(parser, "seed")
    add_option(parser, "members")
    add_run_arguments(parser)
    parser.add_argument("--logger", action="append", type=str, metavar="NAME", help=options()["loggers"].help)
    add_option(parser, "energy")
    add_option(parser, "force")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="tell what the run will cost, from a few of its steps; write nothing",
    )
    parser.add_argument(
        "--all", action="store_true", help="end with every metric, not with the main one and five more"
    )
    add_format(parser)
    if method is not None and task is not None:
        from bench.engine.engine import TrainerOptions

        registry.import_own(method, task)
        m, t = registry.method(method), registry.task(task)
        preset_m, preset_t, _ = resolution.preset_values(m, t, preset)
        for entry, flag, values in ((m, "method", preset_m), (t, "task", preset_t)):
            parser.add_settings(entry.cls.settings_class, flag, entry.fixed)
            parser.set_defaults({f"{flag}.{k}": v for k, v in values.items() if k not in entry.fixed})
        parser.add_settings(TrainerOptions, "trainer")
    return parser


def _known_parser(words: list[str]) -> Parser:
    """A parser with the flags of METHOD and TASK by name, as far as the index has them; needs no torch."""
    parser = _run_parser(None, None, "standard")
    settings = (kept() or {}).get("settings", {})
    for name in ["trainer", *words[:2]]:
        for setting in settings.get(name, []):
            parser.add_argument(f"--{setting}")
    return parser


def _refuse_unknown_flags(words: list[str], flags: Iterable[str]) -> None:
    """Refuses misspelled flags before torch is imported, where the index has all that there are."""
    settings = (kept() or {}).get("settings", {})
    if all(name in settings for name in words[:2]):
        parser = _known_parser(words)
        for flag in flags:
            if flag.startswith("--") and flag not in parser.flags():
                raise UsageError(parser.unknown(flag))


def run(arguments: list[str]) -> None:
    """Fits a method on a task; prints the record as words and as the result its directory, or its metrics."""
    words, flags = _words(arguments)
    if "_ARGCOMPLETE" in os.environ:
        _known_parser(words).parse_args([])  # answers the shell and ends the process
    config = _configs(arguments)
    if not words and "METHOD" in config and "TASK" in config:
        words = [config.pop("METHOD"), config.pop("TASK")]
        arguments = [*words, *arguments]
    preset = flags.get("--preset", config.get("preset", "standard"))
    if len(words) < 2:
        if {"-h", "--help"} & set(arguments):
            _run_parser(None, None, preset).parse_args(["--help"])
        raise UsageError("bench run needs METHOD and TASK; see bench list")
    method, task = words[:2]
    registry.refuse_unknown(method, task)
    _refuse_unknown_flags(words, flags)
    parser = _run_parser(method, task, preset)
    parser.files = config
    chosen = parser.parse_args(arguments)

    from bench.runs import runner
    from bench.runs.progress import shown

    plan = build(Plan, {"method": method, "task": task, **_typed(parser, chosen)})
    if chosen.dry_run:
        print_cost(plan, chosen.format)
        return
    with shown(errors, f"{method} {task}, seed {plan.seed}") as observer:
        done = runner.execute(plan, (observer,))
    if done.is_first_process:
        with suppress(OSError):  # nobody reads it any more; the run stands
            print_record(done.directory, errors, chosen.all)
        if chosen.format == "table":
            output.print(str(done.directory), soft_wrap=True)
        else:
            write(metric_rows(done.directory, done.record), chosen.format, aside=ASIDE)


def _typed(parser: Parser, chosen: Any) -> dict[str, Any]:
    """The options of a plan that were typed: of the settings, those that are not the preset's."""
    usual = parser.get_defaults()
    settings = {
        flag: {name: v for name, v in vars(chosen[flag]).items() if v != usual[flag][name]}
        for flag in ("method", "task")
        if flag in chosen
    }
    return {
        **{name: chosen[name] for name in options() if name in chosen},
        "method_settings": settings.get("method", {}),
        "task_settings": settings.get("task", {}),
        "trainer": vars(chosen.trainer) if "trainer" in chosen else {},
        "loggers": _loggers(chosen.logger or []),
    }
