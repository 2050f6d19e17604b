"""`bench data`: which data sets there are, where they lie, whether they are whole, and their preparation."""

from __future__ import annotations

import difflib
from types import ModuleType
from typing import Literal

from jsonargparse import Namespace

from bench.commands.formats import Row, add_format, drawn, write
from bench.commands.making import make_data
from bench.commands.parser import Parser, errors, output
from bench.errors import DataError, UsageError
from bench.progress import shown


def show_data(arguments: list[str]) -> int:
    """Shows, fetches, makes, prepares or checks data sets; a DataError's code if a check finds damage."""
    if arguments[:1] == ["make"]:
        make_data(arguments[1:])
        return 0
    parser = Parser("bench data", description="Show, fetch, make, prepare or check data sets.")
    actions = Literal["list", "get", "check", "make", "prepare"]
    parser.add_argument("action", type=actions, help="what to do")
    parser.add_argument(
        "NAME", nargs="?", type=str | None, default=None, help="a data set; check without it checks all"
    )
    parser.add_argument(
        "--data-dir", type=str | None, default=None, help="folder of data files; also $BENCH_DATA"
    )
    add_format(parser)
    of_prepare = parser.add_argument_group("of prepare, for photographs")
    of_prepare.add_argument(
        "--source",
        type=str | None,
        default=None,
        help="folder as downloaded (`bench data get NAME` says how)",
    )
    of_prepare.add_argument(
        "--size", type=int | None, default=None, help="side in pixels; default is the source's own"
    )
    of_prepare.add_argument(
        "--preprocess", type=Literal["resize", "contrast"] | None, default=None, help="default is resize"
    )
    of_prepare.add_argument(
        "--workers", type=int | None, default=None, help="threads; default is one per core"
    )
    chosen = parser.parse_args(arguments)
    if chosen.action == "make":
        raise UsageError("bench data make NAME ...: make comes first, its flags follow")
    known = _known()
    if chosen.NAME is not None and chosen.NAME not in known:
        near = difflib.get_close_matches(chosen.NAME.lower(), known, cutoff=0.4) or list(known)
        raise UsageError(f"unknown data set {chosen.NAME!r}; the nearest names are {', '.join(near)}")
    given = [f"--{flag}" for flag in _OF_PREPARE if chosen[flag] is not None]
    if given and chosen.action != "prepare":
        raise UsageError(f"{', '.join(given)}: for bench data prepare alone")
    if chosen.action == "list":
        rows = _listed(chosen.data_dir)
        output.print(drawn(rows, output.width)) if chosen.format == "table" else write(rows, chosen.format)
        return 0
    if chosen.format != "table":
        raise UsageError(f"--format {chosen.format}: bench data {chosen.action} prints no table")
    if chosen.action == "prepare":
        return _prepare(chosen)
    if chosen.action == "get":
        if chosen.NAME is None:
            raise UsageError(f"bench data get needs a name: {', '.join(known)}")
        output.print(str(known[chosen.NAME].get(chosen.NAME, chosen.data_dir)), soft_wrap=True)
        return 0
    if chosen.NAME is not None:
        output.print(known[chosen.NAME].check(chosen.NAME, chosen.data_dir), soft_wrap=True)
        return 0
    return _check_all(chosen.data_dir)


_OF_PREPARE = ("source", "size", "preprocess", "workers")


def _prepare(chosen: Namespace) -> int:
    """Prepares photographs, with progress on standard error; prints their folder."""
    from bench import photographs, preparing

    if chosen.NAME not in photographs.SOURCES:
        names = ", ".join(photographs.SOURCES)
        raise UsageError(f"bench data prepare needs a source of photographs: {names}")
    if chosen.source is None:
        raise UsageError(f"--source is required; `bench data get {chosen.NAME}` says how to have it")
    with shown(errors, f"prepare {chosen.NAME}") as observer:
        before: int | None = None

        def tell(done: int, of: int) -> None:
            nonlocal before
            if before is None:
                before = done
                observer("stage", {"name": f"{of} photographs, {done} done before", "number": 1, "of": 1})
            if done:
                observer("fit", {"fit": done, "fits": of, "was_there": done == before})

        made = preparing.prepare(
            chosen.NAME,
            chosen.source,
            chosen.data_dir,
            chosen.size,
            chosen.preprocess or "resize",
            chosen.workers,
            tell,
            wait=False,
        )
    errors.print(f"{chosen.NAME}: {photographs.described(made)}", soft_wrap=True)
    output.print(str(made.folder), soft_wrap=True)
    return 0


def _known() -> dict[str, ModuleType]:
    """Data set -> the file that finds, gets and checks it."""
    from bench import data, photographs, tables  # here, since data and tables need torch

    return {name: module for module in (data, tables, photographs) for name in module.SOURCES}


def _listed(data_dir: str | None) -> list[Row]:
    from bench import data, tables

    rows: list[Row] = []
    for name, module in _known().items():
        try:
            found = str(module.find(name, data_dir) or "not here")
        except DataError as error:
            found = f"damaged: {error}"
        source = module.SOURCES[name]
        if module is data:
            size = f"{source.train} + {source.test}"
        else:
            size = f"{source.rows} x {source.columns}" if module is tables else source.examples
        rows.append(
            {
                "name": name,
                "title": source.title,
                "examples": size,
                "licence": source.licence,
                "found in": found,
            }
        )
    return rows


def _check_all(data_dir: str | None) -> int:
    """Looks at every data set: a line for each; the exit code of a DataError if one is damaged."""
    from bench import places

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
