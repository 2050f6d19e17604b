"""Hidden characters: which they are, and that nothing that is printed or kept holds one."""

import io
import json

import pydantic_core
import pytest
from rich.table import Table
from rich.text import Text

from bench.commands.parser import SafeConsole
from bench.text import all_escaped, escaped, hidden, is_plain, one_line

HIDDEN = {
    "NUL": "\0",
    "escape sequence": "\x1b[31m",
    "title of the terminal": "\x1b]0;x\x07",
    "line break": "\n",
    "carriage return": "\r",
    "tab": "\t",
    "delete": "\x7f",
    "C1 control": "\x9b",
    "right to left": "\u202e",
    "isolate": "\u2066",
    "no width": "\u200b",
    "byte order mark": "\ufeff",
    "line separator": "\u2028",
    "lone surrogate": "\udcff",
    "no character": "\uffff",
    "no character of a higher plane": "\U0001fffe",
}
PLAIN = ["", "map", "Größe", "π ≈ 3.14", "日本語\u3000名", "a\u00a0b", "🎲", r"\x1b", "<b>&amp;[red]"]


@pytest.mark.parametrize("text", HIDDEN.values(), ids=HIDDEN)
def test_hidden_characters_are_shown_as_python_writes_them(text):
    shown = escaped(f"a{text}b")
    assert shown == "a" + text.encode("unicode_escape").decode() + "b"
    shown.encode("utf-8")
    assert escaped(shown) == shown
    assert list(hidden({"x": [1, None, ({text: 0.5},)]})) == [escaped(text)]
    assert all_escaped({"x": [1, {text: (text,)}]}) == {"x": [1, {escaped(text): (escaped(text),)}]}


@pytest.mark.parametrize("text", PLAIN)
def test_what_can_be_seen_stays(text):
    assert escaped(text) == text
    assert not list(hidden([text]))


@pytest.mark.parametrize("text", [*HIDDEN.values(), *map(chr, range(128))])
def test_plain_json_holds_nothing_hidden(text):
    """As one writes it, as another does, and raw, which the parser of records then refuses."""
    for shown in (json.dumps([text]), json.dumps([text], ensure_ascii=False), f'["{text}"]'):
        if not is_plain(content := shown.encode("utf-8", "surrogatepass")):
            continue
        try:
            value = pydantic_core.from_json(content)
        except ValueError:
            continue
        assert not list(hidden(value))
    assert is_plain(json.dumps({"name": "map", "value": [0.5, None]}, indent=2).encode())


def test_one_line_is_one_and_has_an_end():
    assert one_line("a\n  b\t\x1b") == r"a b \x1b"
    assert one_line("x" * 400) == "x" * 300 + "..."


@pytest.mark.parametrize("text", [t for t in HIDDEN.values() if t not in "\n\r\t"])
def test_console_prints_none(text):
    """Be it in a string, a text of rich's own or a cell; the console's own colours stay."""
    file = io.StringIO()
    console = SafeConsole(file=file, width=100, markup=False, highlight=False)
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    for printed in (text, Text(text), table):
        console.print(printed)
    assert not list(hidden(file.getvalue().splitlines()))
    coloured = SafeConsole(file=io.StringIO(), force_terminal=True, color_system="standard")
    coloured.print("a", style="red")
    assert "\x1b[31m" in coloured.file.getvalue()
