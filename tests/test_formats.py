"""The writer of tables: digits that tell something, nothing cut at any width, every form reads back."""

import ast
import csv
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench import cli
from bench.commands import formats
from bench.intervals import Interval

NO_LIMITS = Interval(0.5, math.nan, math.nan, "n = 2")
ROWS = [
    {"metric": "accuracy_after_task_1", "value": 0.25, "mean": Interval(0.94312, 0.94018, 0.94606, "n = 3")},
    {"metric": "accuracy_after_task_2", "value": 1 / 3, "mean": NO_LIMITS},
    {"metric": "accuracy_after_task_2_and_3", "value": None, "mean": Interval(2e-6, 1e-6, 3e-6, "n = 3")},
]


def printed(rows, width, **options):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(formats.drawn(rows, width, **options))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 140, 200])
def test_as_many_columns_of_a_choice_are_taken_as_have_room_with_every_number_whole(width):
    """The first of them, and one where none has room."""
    cell = Interval(-0.01, -0.0151, -0.0049, "n = 3")
    choice = [f"method_{k} minus it" for k in range(25)]
    rows = [{"method": "an_entry_of_a_long_name", "mean": Interval(0.5, 0.49, 0.51, "n = 3")}]
    rows[0] |= dict.fromkeys(choice, cell)
    fit = formats.that_fit(rows, width, choice)
    assert fit == choice[: len(fit)]

    def whole(number):
        return printed(rows, width, without=choice[number:]).count("-0.0100 (-0.0151 to -0.0049)")

    assert len(fit) == {40: 1, 80: 1, 140: 3, 200: 5}[width]
    assert whole(len(fit)) == len(fit) or width == 40
    assert whole(len(fit) + 1) < len(fit) + 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.9, "0.9000"),
        (0.94312, "0.9431"),
        (-0.24041, "-0.2404"),
        (0.00001234, "1.234e-05"),
        (4e-300, "4.000e-300"),
        (98.256, "98.26"),
        (999.96, "1000"),
        (123456.7, "123457"),
        (7, "7"),
        (0.0, "0"),
        (1e300, "1.000e+300"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_four_significant_digits(value, text):
    assert formats.number(value) == text


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ((0.94312, 0.94018, 0.94606), "0.9431 (0.9402 to 0.9461)"),
        ((0.5, 0.4004, 0.5996), "0.50 (0.40 to 0.60)"),
        ((1234.5, 1111.1, 1357.9), "1230 (1110 to 1360)"),
        ((-0.3, -0.7, 0.1), "-0.30 (-0.70 to 0.10)"),
        ((2e-6, 1e-6, 3e-6), "2.0e-06 (1.0e-06 to 3.0e-06)"),
        ((0.5, 0.5 - 1e-17, 0.5), "0.5000 (0.5000 to 0.5000)"),
        ((0.0, 0.0, 0.0), "0 (0 to 0)"),
        ((0.5, math.nan, math.nan), "0.5000 (n = 1: no interval)"),
    ],
)
def test_intervals_say_how_many_digits_tell_something(limits, text):
    assert formats.interval(Interval(*limits, "n = 1")) == text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
def test_no_two_rows_look_alike_at_any_width(width):
    rows = [
        {"metric": f"accuracy_after_task_{i}", "value": 0.5, "note": "mean of all " * 4} for i in range(12)
    ]
    text = printed(rows, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    first = [line[: line.index(" ")] if " " in line else line for line in text.splitlines()[2:]]
    whole = "".join(first)  # folded names, put together again
    assert re.findall(r"accuracy_after_task_\d+?(?=accuracy|$)", whole) == [row["metric"] for row in rows]


@pytest.mark.parametrize("width", [80, 100])
def test_numbers_and_intervals_stay_whole_where_text_can_give_way(width):
    rows = [{**row, "note": "some words that explain the row " * 3} for row in ROWS]
    text = printed(rows, width)
    for number in ("0.2500", "0.3333", "0.9431 (0.9402 to 0.9461)", "0.5000 (n = 2: no interval)"):
        assert number in text
    assert "mean (95% interval)" in text


def test_a_column_of_empty_texts_is_left_out_and_one_without_values_is_not():
    text = printed([{"a": "x", "note": "", "value": None}], 80)
    assert text.split() == ["a", "value", "─" * 8, "x", "-"]


def test_csv_and_json_hold_every_digit_and_a_column_per_number(capsys):
    formats.write(ROWS, "json")
    read = json.loads(capsys.readouterr().out)
    assert read[0] == {
        "metric": "accuracy_after_task_1",
        "value": 0.25,
        "mean": 0.94312,
        "mean_low": 0.94018,
        "mean_high": 0.94606,
    }
    assert read[1] == {"metric": "accuracy_after_task_2", "value": 1 / 3} | {
        "mean": 0.5,
        "mean_low": None,
        "mean_high": None,
    }
    formats.write(ROWS, "csv")
    header, *lines = csv.reader(io.StringIO(capsys.readouterr().out))
    assert header == ["metric", "value", "mean", "mean_low", "mean_high"]
    assert float(lines[1][1]) == 1 / 3
    assert lines[1][3:] == ["", ""]
    assert lines[2][1] == ""


def test_numbers_of_numpy_are_numbers_in_csv_as_in_json(capsys):
    """Limits of intervals are NumPy's; `np.float64(0.25)` is no number to who reads the file."""
    rows = [
        {
            "n": np.float64(0.25),
            "mean": Interval(np.float64(0.5), np.float64(0.25), np.float64(0.75), "n = 3"),
        }
    ]
    formats.write(rows, "csv")
    assert capsys.readouterr().out.splitlines() == ["n,mean,mean_low,mean_high", "0.25,0.5,0.25,0.75"]
    formats.write(rows, "json")
    assert json.loads(capsys.readouterr().out) == [
        {"n": 0.25, "mean": 0.5, "mean_low": 0.25, "mean_high": 0.75}
    ]


def test_rows_of_several_kinds_have_all_columns(capsys):
    formats.write([{"kind": "a", "needs": ["x", "y"]}, {"kind": "b", "fixed": {"members": 3}}], "csv")
    assert capsys.readouterr().out.splitlines() == ["kind,needs,fixed", 'a,"x, y",', "b,,members=3"]


SPECIAL = '\\&%$#_{}~^<>|"'


def test_latex_escapes_every_special_character(capsys):
    formats.write([{"a_b": SPECIAL, "n": -0.5, "e": 1e-9}], "latex")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [r"\begin{tabular}{lrr}", r"\toprule", r"a\_b & n & e \\"]
    cell, number, small = lines[4].removesuffix(r" \\").split(" & ")
    assert (number, small) == ("$-0.5000$", r"$1.000 \times 10^{-9}$")
    left = cell
    for name in ("textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater"):
        assert left.count(rf"\{name}{{}}") == 1
        left = left.replace(rf"\{name}{{}}", "")
    left = left.replace(r"\textbar{}", "").replace(r"\textquotedbl{}", "")
    assert left == "".join(f"\\{character}" for character in "&%$#_{}")


@pytest.mark.parametrize("character", SPECIAL)
def test_no_special_character_of_latex_is_left_alone(capsys, character):
    """Each by itself, as text and in a heading."""
    formats.write([{character: character}], "latex")
    _, _, heading, _, cell, *_ = capsys.readouterr().out.splitlines()
    for text in (heading, cell):
        text = text.removesuffix(r" \\")
        assert text != character
        assert re.fullmatch(r"\\(text[a-z]+\{\}|[&%$#_{}])", text)


def test_markdown_escapes_what_would_break_a_table(capsys):
    formats.write([{"a|b": "x | y_z _w_ *v* `u` <t> \\", "n": 2}], "markdown")
    heading, rule, line = capsys.readouterr().out.splitlines()
    assert heading == r"| a\|b | n |"
    assert rule == "| --- | ---: |"
    assert line == r"| x \| y_z \_w\_ \*v\* \`u\` \<t\> \\ | 2 |"
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", text)) == 3 for text in (heading, rule, line))


@pytest.mark.parametrize("form", ["csv", "json", "latex", "markdown"])
def test_no_control_character_and_no_line_break_is_printed(capsys, form):
    formats.write([{"name": "a\x1b[31mred\nb\x07"}], form)
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)
    assert not any(line.startswith("b") and "\\x07" in line for line in out.splitlines())
    assert "\x1b" not in printed([{"name": "\x1b[31m"}], 80, title="\x1b[31m")


@pytest.mark.parametrize("form", ["csv", "json", "latex", "markdown"])
def test_no_rows_are_an_empty_table(capsys, form):
    formats.write([], form)
    out = capsys.readouterr().out
    assert json.loads(out) == [] if form == "json" else "nan" not in out


# ---- every table of the command line


def reach(sources):
    """Function -> names of all that it uses, through functions of these files too."""
    used = {}
    for source in sources:
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef):
                names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
                names |= {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
                used[function.name] = used.get(function.name, set()) | names  # methods may share a name
    for _ in used:
        used = {name: names.union(*(used.get(other, ()) for other in names)) for name, names in used.items()}
    return used


def without_format(sources, commands):
    """Commands that print a table, and those of them that have no --format."""
    found = reach(sources)
    tables = {name for name, function in commands.items() if "drawn" in found[function]}
    return tables, {name for name in tables if not {"add_format", "write"} <= found[commands[name]]}


def test_every_command_that_prints_a_table_has_it_in_every_format():
    """And none prints one by other means than this writer."""
    sources = {path: path.read_text() for path in Path(cli.__file__).parent.glob("commands/*.py")}
    tables, missing = without_format(sources.values(), {n: f.__name__ for n, (f, _) in cli.COMMANDS.items()})
    assert {"run", "runs", "show", "compare", "figures", "data", "sweep", "tune"} <= tables
    assert missing == set()
    for path, source in sources.items():
        # sweep_view is redrawn on standard error while a sweep runs: there is nothing to take away.
        if path.name not in ("formats.py", "sweep_view.py"):
            assert not re.search(r"rich\.table|\b[lr]just\b|tabulate", source), path


def test_law_catches_a_table_without_format():
    """Negative control: a command that draws by way of another function, and has no --format."""
    source = "def cheat(arguments): show(1)\ndef show(rows): output.print(drawn(rows, 80))"
    assert without_format([source], {"cheat": "cheat"}) == ({"cheat"}, {"cheat"})
    whole = source + "\ndef whole(arguments): add_format(parser); show(1); write(1)"
    assert without_format([whole], {"whole": "whole"}) == ({"whole"}, set())
