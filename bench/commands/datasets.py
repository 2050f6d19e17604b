"""`bench data`: which data sets there are, where they lie, and whether they are whole."""

from __future__ import annotations

import difflib
from typing import Literal

from rich.table import Table

from bench.commands.parser import Parser, output
from bench.errors import UsageError


def show_data(arguments: list[str]) -> None:
    """Shows, fetches or checks data sets."""
    parser = Parser("bench data", description="Show, fetch or check data sets.")
    parser.add_argument("action", type=Literal["list", "get", "check"], help="what to do")
    parser.add_argument(
        "NAME", nargs="?", type=str | None, default=None, help="a data set; check without it checks all"
    )
    parser.add_argument(
        "--data-dir", type=str | None, default=None, help="folder of data files; also $BENCH_DATA"
    )
    chosen = parser.parse_args(arguments)

    from bench import data, tables  # here, since both need torch

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
