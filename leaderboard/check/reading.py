"""Reading what strangers wrote: JSON and safetensors, with every limit applied before anything is believed.

Both are data here and nothing else: nothing is unpickled, imported or evaluated. The readers are pure and
need no torch; a run takes them well below a millisecond, so that whoever reads many runs reads them this
way.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from math import isfinite, prod
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import numpy as np
import pydantic

from bench.leaderboard.check.codes import Rejected
from bench.leaderboard.check.facts import deceiving
from bench.runs.records import Record
from bench.spec import Arrays

LONGEST_STRING: Final = 10_000
MOST_ITEMS: Final = 100_000
DEEPEST: Final = 16
LONGEST_HEADER: Final = 64 * 1024
MOST_ARRAYS: Final = 64
LARGEST_SIDE: Final = 2**31
DTYPES: Final = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "U8": "|u1", "I32": "<i4", "I64": "<i8"}
"""Types that tasks store, by their names in safetensors."""
_Model = TypeVar("_Model", bound=pydantic.BaseModel)
_ARRAY_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


# ---------------------------------------------------------------------------------------------------- JSON


def read_json(content: bytes, where: str) -> Any:
    """A JSON document as Python's own values.

    Args:
        content: The bytes, already bounded in number.
        where: What the message names.

    Raises:
        Rejected: If it is not strict UTF-8 or not JSON, gives a key twice, holds a number that is not finite
            or an integer beyond 64 bits, nests deeper than 16, or holds a long or deceiving string.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            twice = Counter(key for key, _ in items).most_common(1)[0][0]
            raise Rejected("json-duplicate-key", f"{where}: the key '{twice[:100]}' stands twice")
        return found

    def number(text: str) -> float:
        value = float(text)
        if not isfinite(value):
            raise Rejected("json-number", f"{where}: the number {text[:40]} is not finite")
        return value

    def whole(text: str) -> int:
        if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
            raise Rejected("json-number", f"{where}: the integer {text[:40]} is beyond 64 bits")
        return int(text)

    def constant(text: str) -> NoReturn:
        raise Rejected("json-number", f"{where}: {text} is no number of JSON")

    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Rejected("json-encoding", f"{where} is not UTF-8 at byte {error.start}") from None
    if text.startswith("\ufeff"):
        raise Rejected("json-encoding", f"{where} begins with a byte order mark")
    try:
        value = json.loads(
            text, object_pairs_hook=pairs, parse_float=number, parse_int=whole, parse_constant=constant
        )
    except RecursionError:
        raise Rejected("json-depth", f"{where} is nested deeper than {DEEPEST}") from None
    except json.JSONDecodeError as error:
        raise Rejected("json-syntax", f"{where} is no JSON: {error}") from None
    _bounded([value], where, 0)
    return value


def _bounded(items: dict[str, Any] | list[Any], where: str, depth: int) -> None:
    """Refuses what is too deep, too long or deceiving, anywhere inside an object or list."""
    if depth > DEEPEST:
        raise Rejected("json-depth", f"{where} is nested deeper than {DEEPEST}")
    if len(items) > MOST_ITEMS:
        raise Rejected("json-length", f"{where} holds a list or object of {len(items)} items")
    for item in (*items, *items.values()) if isinstance(items, dict) else items:
        kind = type(item)
        if kind is str:
            if len(item) > LONGEST_STRING:
                raise Rejected("json-length", f"{where} holds a string of {len(item)} characters")
            if (why := deceiving(item)) is not None:
                raise Rejected("text-hidden", f"{where} holds {why}: {ascii(item)[:80]}")
        elif kind is dict or kind is list:
            _bounded(item, where, depth + 1)


def parsed(model: type[_Model], content: bytes, where: str) -> _Model:
    """A strict model from JSON.

    Raises:
        Rejected: As `read_json`, or if the version of the schema or anything else is not the model's.
    """
    value = read_json(content, where)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if type(version) is not int:  # of which pydantic takes true and 1.0 for 1
        raise Rejected("schema", f"{where}: schema_version must be 1")
    if version != 1:
        raise Rejected("schema-version", f"{where} is of schema {version}; known is 1")
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Rejected(
            "schema", f"{where}: {place}: {first['msg']}".replace(": :", ":").replace("Value error, ", "")
        ) from None


def read_record(content: bytes, where: str) -> Record:
    """Reads a `record.json`.

    Raises:
        Rejected: As `parsed`.
    """
    return parsed(Record, content, where)


# --------------------------------------------------------------------------------------------- safetensors


class Stored(NamedTuple):
    """An array in a file: type (numpy's name), shape, and where its bytes begin and end in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(content: bytes, where: str) -> dict[str, Stored]:
    """The arrays of a safetensors file, whose header is read here and by no library.

    The reader of safetensors refuses overlaps and holes, but accepts keys that stand twice, any name, and
    shapes such as [0, 2^40].

    Args:
        content: The whole file.
        where: What the message names.

    Raises:
        Rejected: If the header is too long or of another form, or an array has a name, type, shape or place
            that no task's arrays have. Arrays must cover the rest of the file exactly, without overlap.
    """
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(LONGEST_HEADER, len(content) - 8):
        raise Rejected(
            "header-length",
            f"{where}: a header of {length} bytes in a file of {len(content)}; at most {LONGEST_HEADER}",
        )
    header = read_json(content[8 : 8 + length], where)
    if not isinstance(header, dict) or not header:
        raise Rejected("header-form", f"{where}: the header names no arrays")
    if len(header) > MOST_ARRAYS:
        raise Rejected("arrays-name", f"{where}: {len(header)} arrays; at most {MOST_ARRAYS}")
    found = {name: _stored(name, entry, 8 + length, where) for name, entry in header.items()}
    position = 8 + length
    for name, array in sorted(found.items(), key=lambda item: item[1][2:]):
        if array.begin != position:
            raise Rejected("arrays-layout", f"{where}: '{name}' begins at byte {array.begin}, not {position}")
        position = array.end
    if position != len(content):
        raise Rejected("arrays-layout", f"{where}: arrays end at byte {position} of {len(content)}")
    return found


def _stored(name: str, entry: Any, start: int, where: str) -> Stored:
    """One entry of a header, checked."""
    if not _ARRAY_NAME.fullmatch(name):
        raise Rejected("arrays-name", f"{where}: '{name}' is no name of an array")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Rejected("header-form", f"{where}: '{name}' needs dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not (isinstance(dtype, str) and lists and all(type(n) is int for n in (*shape, *offsets))):
        raise Rejected("header-form", f"{where}: '{name}' has a dtype, shape or data_offsets of another type")
    if dtype not in DTYPES:
        raise Rejected("arrays-dtype", f"{where}: '{name}' is of type {dtype}, none of {', '.join(DTYPES)}")
    begin, end = offsets
    size = prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if len(shape) > 8 or not all(0 < side <= LARGEST_SIDE for side in shape) or size != end - begin:
        raise Rejected(
            "arrays-shape", f"{where}: '{name}' of shape {shape[:9]} does not fit {end - begin} bytes"
        )
    return Stored(DTYPES[dtype], tuple(shape), start + begin, start + end)


def arrays_of(content: bytes, header: dict[str, Stored]) -> Arrays:
    """The arrays of a file whose header was read; they share the file's memory and cannot be written."""
    return {
        name: np.frombuffer(content, array.dtype, prod(array.shape), array.begin).reshape(array.shape)
        for name, array in header.items()
    }
