"""`bench data`: which data sets there are, where they lie, and whether they are whole."""

from __future__ import annotations

import difflib
from types import ModuleType
from typing import Literal

from bench.commands.formats import Row, add_format, drawn, write
from bench.commands.making import make_data
from bench.commands.parser import Parser, output
from bench.commands.preparing import prepare_data
from bench.errors import DataError, UsageError


def show_data(arguments: list[str]) -> int:
    """Shows, fetches or checks data sets; the exit code of a DataError if a check of all finds damage."""
    if arguments[0:1] in (["make"], ["prepare"]):
        {"make": make_data, "prepare": prepare_data}[arguments[0]](arguments[1:])
        return 0
    parser = Parser("bench data", description="Show, fetch, check, make or prepare data sets.")
    actions = Literal["list", "get", "check", "make", "prepare"]
    parser.add_argument("action", type=actions, help="what to do")
    parser.add_argument(
        "NAME", nargs="?", type=str | None, default=None, help="a data set; check without it checks all"
    )
    parser.add_argument(
        "--data-dir", type=str | None, default=None, help="folder of data files; also $BENCH_DATA"
    )
    add_format(parser)
    chosen = parser.parse_args(arguments)
    if chosen.action in ("make", "prepare"):
        raise UsageError(
            f"bench data {chosen.action} NAME ...: {chosen.action} comes first, its flags follow"
        )
    known = _known()
    if chosen.NAME is not None and chosen.NAME not in known:
        near = difflib.get_close_matches(chosen.NAME.lower(), known, cutoff=0.4) or list(known)
        raise UsageError(f"unknown data set {chosen.NAME!r}; the nearest names are {', '.join(near)}")
    if chosen.action == "list":
        rows = _listed(chosen.data_dir)
        output.print(drawn(rows, output.width)) if chosen.format == "table" else write(rows, chosen.format)
        return 0
    if chosen.format != "table":
        raise UsageError(f"--format {chosen.format}: bench data {chosen.action} prints no table")
    if chosen.action == "get":
        if chosen.NAME is None:
            raise UsageError(f"bench data get needs a name: {', '.join(known)}")
        output.print(str(known[chosen.NAME].get(chosen.NAME, chosen.data_dir)), soft_wrap=True)
        return 0
    if chosen.NAME is not None:
        output.print(known[chosen.NAME].check(chosen.NAME, chosen.data_dir), soft_wrap=True)
        return 0
    return _check_all(chosen.data_dir)


def _known() -> dict[str, ModuleType]:
    """Data set -> the file that finds, gets and checks it."""
    from bench import cifar, data, tables  # here, since some need torch
    from bench.photographs import photographs
    from bench.studies import hmc_predictions, topics

    modules = (data, cifar, tables, photographs, hmc_predictions, topics)
    return {name: module for module in modules for name in module.SOURCES}


def _listed(data_dir: str | None) -> list[Row]:
    rows: list[Row] = []
    for name, module in _known().items():
        try:
            found = str(module.find(name, data_dir) or "not here")
        except DataError as error:
            found = f"damaged: {error}"
        source = module.SOURCES[name]
        rows.append(
            {
                "name": name,
                "title": source.title,
                "examples": source.examples,
                "licence": source.licence,
                "found in": found,
            }
        )
    return rows


def _check_all(data_dir: str | None) -> int:
    """Looks at every data set: a line for each; the exit code of a DataError if one is damaged."""
    from bench.system import places

    code = 0
    for name, module in _known().items():
        try:
            line = f"whole: {module.check(name, data_dir)}"
        except places.NotFound:
            line = f"not here: {name}"  # few users have or need them all
        except DataError as error:
            line, code = f"damaged: {name}: {error}", DataError.exit_code
        output.print(line, soft_wrap=True)
    return code
