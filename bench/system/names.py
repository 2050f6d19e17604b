"""The names that the files of a folder declare, read from their source.

Nothing is imported: methods and tasks need torch, which takes seconds. Misspelled names and completion in the
shell must not wait for it, and a run needs the files of its own method and task alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import UsageError


@dataclass(frozen=True)
class Declaration:
    """What a file says of one of its names.

    Attributes:
        file: The file's stem.
        fixed: Settings that the name fixes.
        has_pattern: Whether the file declares further names, which spell out settings, by its `PATTERN`.
    """

    file: str
    fixed: Mapping[str, Any]
    has_pattern: bool = False


def declared(folders: Iterable[str]) -> dict[str, Declaration]:
    """All names of the files of a package, in the order of the files.

    A file that Python cannot read is entered under its stem: the other names stay, and whoever asks for this
    one meets the mistake.

    Args:
        folders: The package's `__path__`.

    Raises:
        UsageError: If a file has no `NAMES` written out as a dictionary, or two files declare one name.
    """
    found: dict[str, Declaration] = {}
    for path in sorted((p for folder in folders for p in Path(folder).glob("*.py")), key=lambda p: p.stem):
        if path.stem == "__init__":
            continue
        for name, declaration in _read(path).items():
            if name in found:
                raise UsageError(f"the name '{name}' is declared in {found[name].file}.py and {path.stem}.py")
            found[name] = declaration
    return found


def _read(path: Path) -> dict[str, Declaration]:
    try:
        assigned = dict(_assignments(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return {path.stem: Declaration(path.stem, {})}
    try:
        names = {str(name): dict(fixed) for name, fixed in ast.literal_eval(assigned["NAMES"]).items()}
    except (KeyError, AttributeError, TypeError, ValueError):
        raise UsageError(
            f"{path} must declare NAMES, written out as a dictionary: name -> settings that the name fixes"
        ) from None
    return {name: Declaration(path.stem, fixed, "PATTERN" in assigned) for name, fixed in names.items()}


def _assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            yield from (
                (target.id, statement.value) for target in statement.targets if isinstance(target, ast.Name)
            )
        elif (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and statement.value
        ):
            yield statement.target.id, statement.value
