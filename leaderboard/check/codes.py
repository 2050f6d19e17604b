"""What `bench verify` may answer: a code for every reason, each with its meaning.

Codes are stable: programs and people look them up, so a code is never renamed and never gets another meaning.
"""

from __future__ import annotations

from typing import Final

from bench.errors import BenchError
from bench.text import one_line

ACCEPTED: Final = "accepted"

CODES: Final[dict[str, str]] = {
    ACCEPTED: "Every check passed.",
    # ---- files
    "no-submission": "There is no such directory, or it holds nothing.",
    "file-unreadable": "A file or directory cannot be opened.",
    "file-symlink": "A file or directory is a symbolic link.",
    "file-hardlink": "A file has a second name somewhere (a hard link).",
    "file-not-regular": "What should be a file is a pipe, socket or device, or a directory.",
    "file-changed": "A file was exchanged or rewritten while it was checked.",
    "file-unknown": "A file or directory lies where the layout has none.",
    "file-missing": "A file that the layout or submission.json asks for is not there.",
    "file-unlisted": "A file is not listed in submission.json.",
    "file-too-large": "A file has more bytes than its kind may have.",
    "submission-too-large": "All files together have too many bytes.",
    "too-many-files": "There are too many files or directories.",
    "name-hidden": "A name begins with a dot.",
    "name-invalid": "A name is not of the form [A-Za-z0-9_+=,.-]{1,120}.",
    "name-collision": "Two names differ in nothing but case.",
    # ---- JSON
    "json-encoding": "JSON is not strict UTF-8 without a byte order mark.",
    "json-syntax": "JSON cannot be parsed.",
    "json-duplicate-key": "A key stands twice in one object.",
    "json-number": "A number is not finite, as NaN or 1e999, or an integer beyond 64 bits.",
    "json-depth": "JSON is nested too deeply.",
    "json-length": "A string, list or object is too long.",
    "text-hidden": "A string shows other than it is: hidden characters, blanks, combining marks.",
    "schema-version": "The version of the schema is not known.",
    "schema": "JSON does not follow the schema.",
    # ---- submission.json and records
    "slug-differs": "The slug of submission.json is not the name of the directory.",
    "hours-differ": "The hours of submission.json are not those of the records.",
    "fact-impossible": "A record says what no run can be: a time, date, count, version, or two at odds.",
    "environments-differ": "The environments of submission.json are not those of the records.",
    "run-misplaced": "A record names another task or method than the directories that it lies in.",
    "seed-differs": "A record names another seed than its directory.",
    "seeds-not-contiguous": "The seeds of a method on a task are not 0, 1, 2 and so on.",
    "seeds-too-few": "A method has fewer seeds on a task than the task asks for.",
    "runs-mixed": "Seeds of one method on one task differ in settings, data or source.",
    "run-failed": "A run failed: a defect is no result.",
    "run-smoke": "A run is not of the preset standard or paper.",
    "run-dirty": "A run was made from source that no commit holds.",
    "run-without-source": "A run has no commit and is not of an installed release.",
    "task-unknown": "The suite has no task of this name.",
    "task-variant": "A run is of a variant of the task; ranked are its standard settings alone.",
    "task-settings": "The settings of a record are not the standard ones of its task.",
    "task-version": "The task is by now of another version.",
    "task-unranked": "The task is not ranked.",
    "data-differ": "A run was made on other data than the task's.",
    # ---- arrays
    "header-length": "The header of an arrays file is longer than 64 KB or than the file.",
    "header-form": "The header of an arrays file is not of the form of safetensors.",
    "arrays-name": "An array has a name that no task uses, or there are too many arrays.",
    "arrays-dtype": "An array has a type that no task uses.",
    "arrays-shape": "The shape of an array is empty, too large or not of its bytes.",
    "arrays-layout": "Arrays overlap, leave holes or do not end with the file.",
    "arrays-missing": "A completed run has no arrays, or a run that has none names some.",
    "arrays-unexpected": "Arrays are not those of the task in names, types or shapes.",
    "arrays-digest": "Arrays are not those that the record names by their digest.",
    "arrays-not-finite": "An array holds NaN or infinity.",
    "arrays-not-normalised": "Probabilities do not sum to 1 within 2e-3.",
    "targets-differ": "The targets, or another array that is no prediction, are not the task's own.",
    "file-hash": "A file has not the SHA-256 that submission.json gives, and nothing else is wrong.",
    # ---- metrics
    "metrics-unknown": "The metrics of a record are not those that the task declares.",
    "metric-impossible": "A metric lies outside its range.",
    "metric-differs": "A metric is not what the task computes from the arrays.",
    "metric-undefined": "A metric is null where it has a value, or demanded, or the reverse.",
    "score-failed": "The task cannot score the arrays.",
    "losses-differ": "The mean of the losses per example is not the main metric.",
    # ---- evidence
    "duplicate-seeds": "Two seeds of a method have the same arrays, though the seed matters.",
    "duplicate-runs": "Two methods of the submission have the same arrays.",
    "duplicate-entry": "Arrays are those of an entry that is on the board.",
    "rerun-differs": "A run that was made again is farther from what was handed in than rounding explains.",
    "rerun-failed": "A run cannot be made again by what its record says: it ends otherwise, or too late.",
    # ---- the check itself
    "reference-missing": "The task scores by data that are not here; the answer says how to have them.",
    "time-limit": "The check took longer than its limit.",
    "memory-limit": "The check needed more memory than its limit.",
    "checker-crashed": "The process of the check ended without an answer.",
    "checker-failed": "The check met what it does not foresee: a defect of the checker, worth an issue.",
}
"""Code -> what it means, in one line; in the order of the checks, roughly."""


class Rejected(BenchError):
    """A submission is refused: a code of `CODES`, and in one line what is wrong, where, and what to do."""

    def __init__(self, code: str, message: str) -> None:
        if code not in CODES:
            raise ValueError(f"no such code: {code}")
        super().__init__(one_line(message))
        self.code = code


def table() -> str:
    """The codes as a table in Markdown."""
    rows = [f"| `{code}` | {meaning} |" for code, meaning in CODES.items()]
    return "\n".join(["| code | meaning |", "| --- | --- |", *rows])
