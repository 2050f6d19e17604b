"""Strings from outside: which characters are never printed or kept as they are, and how they are shown.

A control character, an escape sequence or a change of writing direction can make a terminal lie, and a
character that XML does not know ends the program that draws the figures. Records, curves and names of arrays
hold none; what a user's own code says is escaped before it is kept or shown.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode's control and format characters, surrogates, separators of lines and paragraphs."""


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _CATEGORIES or ord(character) & 0xFFFE == 0xFFFE


def escaped(text: str, keep: str = "") -> str:
    r"""The text with every hidden character as Python writes it, such as `\x1b`; `keep` stay as they are."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if c not in keep and _is_hidden(c) else c for c in text
    )


def one_line(text: object, longest: int = 300) -> str:
    """What something says as one line without hidden characters, cut to so many characters."""
    line = escaped(re.sub(r"\s+", " ", str(text)).strip())
    return line if len(line) <= longest else f"{line[:longest]}..."


def all_escaped(value: Any) -> Any:
    """A value of dictionaries, lists and tuples with every string in it, keys too, `escaped`."""
    match value:
        case str():
            return escaped(value)
        case dict():
            return {all_escaped(key): all_escaped(inner) for key, inner in value.items()}
        case list() | tuple():
            return type(value)(map(all_escaped, value))
    return value


def is_plain(content: bytes) -> bool:
    """Whether JSON is of printed ASCII without a backslash: no string in it can hold a hidden character.

    A string of JSON has control characters as escapes alone, except for the one that deletes.
    """
    return content.isascii() and not (b"\\" in content or b"\x7f" in content)


def hidden(value: Any) -> Iterator[str]:
    """The strings inside a value that hold hidden characters, escaped."""
    match value:
        case str():
            if (shown := escaped(value)) != value:
                yield shown
        case dict():
            yield from hidden([*value.keys(), *value.values()])
        case list() | tuple():
            for inner in value:
                yield from hidden(inner)
