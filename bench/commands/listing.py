"""`bench list`: two short lines for every method, by what it provides, and every task, by its question."""

from __future__ import annotations

import textwrap
from typing import Any, Literal

from bench.commands.formats import add_format, write
from bench.commands.parser import Parser, output
from bench.errors import UsageError
from bench.runs.index import index

Entry = dict[str, Any]
"""What is declared of a name."""


def show_names(arguments: list[str]) -> None:
    """Prints methods by what they provide and tasks by their question, or both as a table for programs."""
    parser = Parser("bench list", description="Show the methods and tasks there are.")
    parser.add_argument(
        "kind", nargs="?", type=Literal["methods", "tasks"], default=None, help="one kind alone"
    )
    parser.add_argument("--ranked", action="store_true", help="only tasks by which methods are ranked")
    add_format(parser)
    chosen = parser.parse_args(arguments)
    if chosen.ranked and chosen.kind == "methods":
        raise UsageError("--ranked: tasks are ranked by, methods are not; give bench list tasks --ranked")
    known, found = index(), {}
    if chosen.kind != "tasks" and not chosen.ranked:
        found["methods"] = known["methods"]
    if chosen.kind != "methods":
        found["tasks"] = [task for task in known["tasks"] if task["ranked"] or not chosen.ranked]
    if chosen.format != "table":
        write([{"kind": kind[:-1]} | entry for kind in found for entry in found[kind]], chosen.format)
        return
    for kind, (group, entry) in {
        "methods": (_capabilities, _of_method),
        "tasks": (_question, _of_task),
    }.items():
        for heading in dict.fromkeys(map(group, found.get(kind, []))):
            _print(heading)
            for first, second in (entry(each) for each in found[kind] if group(each) == heading):
                _print(first, "  ")
                if second:
                    _print(second, "    ")
            output.print()


def _capabilities(method: Entry) -> str:
    return f"Methods that provide exactly {', '.join(method['capabilities']) or 'predictions'}"


def _of_method(method: Entry) -> tuple[str, str]:
    """The name with the method's title; what the method does, and whether it declares none."""
    title, _, how = method["summary"].partition(": ")
    fixed = ", ".join(f"{name} {value}" for name, value in method["fixed"].items() if name != "members")
    if method["declares"] == "none":
        how = f"{how.rstrip('.')}; declares none" if how else "declares none"
    return f"{method['name']}: {title}" + (f", {fixed}" if fixed else ""), how


def _question(task: Entry) -> str:
    return task["question"]


def _of_task(task: Entry) -> tuple[str, str]:
    """The name; its main metric and the capabilities that a method needs, or that METHOD is none."""
    needs = f"; needs {', '.join(task['needs'])}" if task["needs"] else ""
    if task["closed_form"]:
        needs = "; METHOD is none"
    ranked = "ranked by" if task["ranked"] else "not ranked; main metric"
    return task["name"], f"{ranked} {task['main_metric']}{needs}"


def _print(text: str, indent: str = "") -> None:
    """One line, and a further one only where the terminal is too narrow."""
    whole = textwrap.fill(text, output.width, initial_indent=indent, subsequent_indent=indent + "  ")
    output.print(whole, soft_wrap=True)
