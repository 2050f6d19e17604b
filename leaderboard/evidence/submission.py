"""What a submission is: a directory with `submission.json` and runs, in one layout for ours and everybody's.

    <slug>/submission.json
    <slug>/<task identity>/<method identity>/seed<k>/record.json
    <slug>/<task identity>/<method identity>/seed<k>/arrays.safetensors

It holds nothing else. Curves and figures are made from the arrays. One submission may hold several methods
and tasks; its seeds of a method on a task are contiguous from 0. This file says what `submission.json` may
hold and where things lie; it needs no torch. `submitting.py` makes submissions, `verify.py` checks them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

import pydantic

from bench.errors import UsageError
from bench.runs.records import Environment
from bench.text import one_line

SUBMISSIONS = Path(__file__).parent.parent / "submissions"
"""The submissions on the board."""
RECORDS = Path(__file__).parent.parent / "records"
"""Runs that the project keeps as evidence of its pages; the board shows and does not rank them."""
OURS: Final = "reference"
"""Slug of the project's own submission."""
STATUS = Path(__file__).parent.parent / "status.toml"
"""The maintainers' words on submissions."""
OWNERS = STATUS.with_name("owners.toml")
"""Slug -> account of the forge, a line for each submission when it is adopted, in this order."""

SCHEMA_VERSION: Final = 1
NAME = re.compile(r"[A-Za-z0-9_+=,-][A-Za-z0-9_+=,.-]{0,119}")
"""Every directory of a submission is named so."""
SLUG = re.compile(r"[a-z0-9-]{1,64}")
_SEED = re.compile(r"seed(0|[1-9][0-9]{0,5})")
RUN_FILES = ("arrays.safetensors", "record.json")
MANIFEST = "submission.json"

_Text = Annotated[str, pydantic.StringConstraints(min_length=1, max_length=200, strip_whitespace=False)]
# No user before an `@`, which would pass another host off as the first.
_Link = Annotated[
    str,
    pydantic.StringConstraints(
        max_length=500, pattern=r"^https://[A-Za-z0-9.-]+(:[0-9]{1,5})?([/?#][^\s<>\"'`\\]*)?$"
    ),
]
_Reason = Annotated[str, pydantic.StringConstraints(min_length=1, max_length=300)]
_Licence = Annotated[str, pydantic.StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9.+-]+$")]
_Path = Annotated[str, pydantic.StringConstraints(max_length=400)]
_Digest = Annotated[str, pydantic.StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Submission(pydantic.BaseModel):
    """`submission.json`: whose runs these are, and the digest of every file.

    Attributes:
        schema_version: Version of this schema.
        slug: Name of the directory.
        authors: Who submits.
        licence: SPDX identifier of the licence of the runs, such as CC-BY-4.0.
        paper: https URL; None if there is none.
        code: https URL of the methods' source; None if it is this project's.
        tuning_budget: Configurations that were tried for each method on a task, where its records say
            `tuned`; 0 if nothing was tuned.
        trained_on: Data beside the task's own that anything was trained or chosen on.
        environments: On what the runs were computed, each once.
        hours: Wall-clock time of the runs, summed.
        files: Path inside the directory -> SHA-256, of every file but this one.
    """

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1]
    slug: Annotated[str, pydantic.StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")]
    authors: Annotated[list[_Text], pydantic.Field(min_length=1, max_length=100)]
    licence: _Licence
    paper: _Link | None
    code: _Link | None
    tuning_budget: Annotated[int, pydantic.Field(ge=0, le=10**6)]
    trained_on: Annotated[list[_Text], pydantic.Field(max_length=100)]
    environments: Annotated[list[Environment], pydantic.Field(min_length=1, max_length=100)]
    hours: Annotated[float, pydantic.Field(ge=0, le=10**7)]
    files: Annotated[dict[_Path, _Digest], pydantic.Field(min_length=1, max_length=100_000)]


def run_name(task_identity: str, method_identity: str, seed: int) -> str:
    """Where a run lies inside a submission; `~`, of the identity of one's own class, is in no directory."""
    return f"{task_identity}/{method_identity.replace('~', '-')}/seed{seed}"


def entry_name(method: str, slug: str) -> str:
    """How verdicts and the board call a method of a submission; ours go without the slug."""
    return method if slug == OURS else f"{method} ({slug})"


def runs_in(submission: Path) -> Iterator[Path]:
    """Directories of a submission's runs, in order of task, method and seed."""
    found = [path.parent for path in submission.glob("*/*/seed*/record.json")]
    yield from sorted(found, key=lambda run: (*run.parts[-3:-1], seed_of(run)))


def seed_of(run: Path) -> int:
    """The seed that a run's directory names; -1 if it names none."""
    found = _SEED.fullmatch(run.name)
    return int(found[1]) if found else -1


def read(directory: Path) -> Submission:
    """The manifest of a submission that is trusted; `verify.py` reads those of strangers.

    Raises:
        UsageError: If there is none or it does not follow the schema.
    """
    path = directory / MANIFEST
    try:
        return Submission.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        why = one_line(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        raise UsageError(f"{path} is no submission of schema {SCHEMA_VERSION}: {why}") from None


class Word(pydantic.BaseModel):
    """What maintainers say of a submission, in `STATUS` under its slug.

    Attributes:
        tier: "re-run" where they ran it again themselves and found the same (`bench verify --rerun one`).
        drawn: Which run that was, and by which randomness it was drawn.
        withdrawn: Why it was withdrawn; its entries stay, struck out.
        superseded_by: Slug of the submission that takes its place.
        cleared: `task/method` -> screen -> why the entry passes in spite of that screen's flag.
    """

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)

    tier: str | None = pydantic.Field(default=None, pattern="^re-run$")
    drawn: str | None = pydantic.Field(default=None, min_length=1, max_length=600)
    withdrawn: _Reason | None = None
    superseded_by: str | None = pydantic.Field(default=None, pattern=r"^[a-z0-9-]{1,64}$")
    cleared: dict[str, dict[str, _Reason]] = pydantic.Field(default_factory=dict)

    @property
    def struck(self) -> str:
        """Why entries are out of the ranking; empty if they are in it."""
        if self.withdrawn:
            return f"withdrawn: {self.withdrawn}"
        return f"superseded: by {self.superseded_by}" if self.superseded_by else ""


def words(status: Path = STATUS) -> dict[str, Word]:
    """What maintainers say of submissions, by slug.

    Raises:
        UsageError: If the file cannot be read or says what it must not; in one line.
    """
    try:
        content = tomllib.loads(status.read_text())
        return {slug: Word.model_validate(word) for slug, word in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{status}: {one_line(error)}") from None


def owners(file: Path = OWNERS) -> dict[str, str]:
    """Whose submissions are, by slug in the order in which they were adopted.

    Raises:
        UsageError: If the file cannot be read; in one line.
    """
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {one_line(error)}") from None
