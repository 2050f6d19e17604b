"""Typed settings of methods and tasks: checked wherever they come from, and turned into flags and help.

A `Settings` class is written

    @settings
    class Settings:
        learning_rate: Positive = 1e-3
        \"\"\"Step size of the optimiser.\"\"\"

and every field has a default and one line of documentation with its unit.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import pydantic
import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from bench.errors import UsageError
from bench.text import one_line

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Factor = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def _of_this_machine(threads: int) -> int:
    if threads > (most := os.cpu_count() or 1):
        raise ValueError(f"must be {most} or less, the number of processors of this machine")
    return threads


def named(path: Any) -> Any:
    """What names a folder; raises ValueError for what cannot."""
    if not isinstance(path, str | Path) or path == "" or "\0" in str(path):
        raise ValueError("must name a folder; . is the present one")
    return path


CODE = re.compile(r"[\w-]+(\.[\w-]+)*:\w+")
"""`package.module:name`, what code of a user's own is called."""


def _code(name: str) -> str:
    if not CODE.fullmatch(name):
        raise ValueError("must be package.module:name")
    return name


Code = Annotated[str, AfterValidator(_code)]
"""A name in a user's own code, which `bench.runs.resolution.resolve` has imported where the user typed it."""
Threads = Annotated[Count, AfterValidator(_of_this_machine)]
Folder = Annotated[Path, BeforeValidator(named)]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def settings(cls: type) -> type:
    """Makes a frozen, keyword-only data class whose values are checked against their types and ranges."""
    config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
    return pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=True, config=config)


class Schema(pydantic.BaseModel):
    """What a part of a file holds that the suite writes and reads: strict types, no unknown field, frozen."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def code_in(values: Any) -> list[str]:
    """The names in a user's own code that an instance of a settings class holds."""
    hints = get_type_hints(type(values), include_extras=True)
    found = [
        getattr(values, f.name) for f in fields(values) if Code in (hints[f.name], *get_args(hints[f.name]))
    ]
    return [name for name in found if name is not None]


def build(cls: type, values: dict[str, Any], flag: str = "") -> Any:
    """An instance of a settings class.

    Args:
        cls: The settings class.
        values: Field name -> value.
        flag: What stands before the field names on the command line: `method`, `task` or `trainer`; nothing
            before the flags of the run itself.

    Raises:
        UsageError: One line that names the first wrong field, its value and what it must be.
    """
    try:
        return cls(**values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][:1])
        given = first["input"] if first["type"] != "unexpected_keyword_argument" else values.get(name)
        message = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        if first["type"] == "greater_than_equal":
            message = f"must be {first['ctx']['ge']} or more"
        shown = f"{flag}.{name}" if flag else name.replace("_", "-")
        raise UsageError(f"--{shown} {given}: {message}") from None


def misfit(kind: Any, value: Any) -> str:
    """What values of a type must be, where a typed one is none; empty where it is one.

    Args:
        kind: A type, with or without bounds.
        value: A text as it was typed, or a value out of a file.

    >>> misfit(Count, "x"), misfit(Count, "0"), misfit(Positive | None, "nan"), misfit(bool, "true")
    ('must be int', 'must be 1 or more', 'must be a finite number', '')
    """
    adapter = pydantic.TypeAdapter(kind, config=pydantic.ConfigDict(allow_inf_nan=False))
    error = None
    for meant in [_meant(value), value] if isinstance(value, str) else [value]:
        try:
            adapter.validate_python(meant, strict=True)
            return ""
        except pydantic.ValidationError as refusal:
            error = error or refusal
    assert error is not None
    for problem in error.errors():
        if problem["type"] == "greater_than_equal":
            return f"must be {problem['ctx']['ge']} or more"
        if problem["type"] in ("greater_than", "less_than", "less_than_equal", "finite_number"):
            return problem["msg"].replace("Input should be", "must be")
        if problem["type"] == "value_error":
            return problem["msg"].removeprefix("Value error, ")
    return f"must be {in_words(kind)}"


def _meant(text: str) -> Any:
    """The number, truth value or null that a text stands for; else the text."""
    if text in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[text]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def in_words(kind: Any) -> str:
    """A type as a user reads it.

    >>> in_words(int | None), in_words(Literal["a", "b"]), in_words(Positive)
    ('int or null', 'one of a, b', 'float')
    """
    if get_origin(kind) is Annotated:
        return in_words(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(in_words, get_args(kind)))
    plain: dict[Any, str] = {NoneType: "null", bool: "true or false", Path: "str"}
    return plain.get(kind, getattr(kind, "__name__", str(kind)))


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key, line = key_node.value, key_node.start_mark.line + 1
            if isinstance(key_node, yaml.ScalarNode) and key in lines:
                raise ValueError(f"the key {key} stands in line {lines[key]} and again in line {line}")
            lines[str(key)] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, flag: str) -> Any:
    """The content of a YAML file.

    Raises:
        UsageError: If it cannot be read, is not YAML, contains itself, or gives a key twice; one line that
            begins with the flag and the path.
    """
    try:
        content = _Loader(path.read_text()).get_single_data()
        json.dumps(content, default=str)  # refuses what contains itself
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{flag} {path}: {one_line(error)}") from None
    return content
