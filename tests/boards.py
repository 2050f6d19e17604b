"""Made-up submissions with consistent arrays, for the board's tests and its benchmark.

`SimulatedNN` are tasks whose test set is drawn, and a method is a number: how well its predictions know the
labels. Nothing is trained. `make` writes submissions of such methods.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from bench.contract import Arrays, Metric, Metrics, Spec, Task
from bench.data import array_digest
from bench.leaderboard.evidence.submission import run_name
from bench.metrics import restore
from bench.settings import Count, settings

NUM_TASKS = 20
BASELINE, REFERENCE = "method000", "method001"


@settings
class Settings:
    """Settings of a simulated task."""

    examples: Count = 40
    """Test examples."""


class Simulated(Task):
    """Classes drawn at random, and predictions that know them more or less.

    Question: does the board show what is known?

    What would mislead: taking simulated <methods> & their ranks for real ones.
    """

    settings_class = Settings
    number = 0
    has_losses = True

    @property
    def spec(self) -> Spec:
        """What is measured; baseline and reference are two of the methods."""
        return Spec(
            question=f"How well is drawn data {self.number} predicted?",
            source="nobody, nowhere",
            version=1,
            metrics={
                "nll": Metric("negative log likelihood of the test labels", "nats", 0.0, np.inf),
                "accuracy": Metric("share of test examples that are right", "fraction", 1.0, 0.0),
            },
            main_metric="nll",
            baseline=BASELINE,
            reference=REFERENCE,
        )

    @property
    def num_classes(self) -> int:
        """2 to 10."""
        return 2 + self.number % 9

    def data_digest(self) -> str:
        """Digest of the labels."""
        return array_digest(self.targets())

    def problem(self) -> Any:
        """None: nothing is inferred."""
        raise NotImplementedError

    def run(self, engine: Any) -> Arrays:
        """None: nothing is run."""
        raise NotImplementedError

    def targets(self) -> Arrays:
        """Labels `[N]`."""
        generator = np.random.default_rng([16, self.number])
        return {"labels": generator.integers(self.num_classes, size=self.settings.examples).astype(np.uint8)}

    def predictions(self, skill: float, method: int, seed: int) -> np.ndarray:
        """Log-probabilities `[N, C]`, float16; examples are hard alike for all methods."""
        labels = self.targets()["labels"]
        size = len(labels), self.num_classes
        ease = np.random.default_rng([17, self.number]).standard_normal((len(labels), 1))
        own = np.random.default_rng([18, self.number, method]).standard_normal(size)
        noise = np.random.default_rng([19, self.number, method, seed]).standard_normal(size)
        logits = 0.6 * own + 0.2 * noise + (np.arange(size[1]) == labels[:, None]) * (skill + ease)
        return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float16)

    def score(self, arrays: Arrays) -> Metrics:
        """NLL and accuracy."""
        right = restore(arrays["log_probs"]).argmax(1) == arrays["labels"]
        return {"nll": float(self._nll(arrays).mean()), "accuracy": float(right.mean())}

    def losses(self, arrays: Arrays) -> np.ndarray | None:
        """NLL of each example."""
        return self._nll(arrays) if self.has_losses else None

    @staticmethod
    def _nll(arrays: Arrays) -> np.ndarray:
        labels = arrays["labels"]
        return -restore(arrays["log_probs"])[np.arange(len(labels)), labels]


def _numbered(number: int) -> type[Simulated]:
    name = f"Simulated{number:02}"
    return type(name, (Simulated,), {"number": number, "__module__": __name__, "__doc__": Simulated.__doc__})


globals().update({(cls := _numbered(number)).__name__: cls for number in range(NUM_TASKS)})


def task_name(number: int) -> str:
    """What is imported: `boards:Simulated03`."""
    return f"boards:Simulated{number:02}"


def task_names(number: int) -> list[str]:
    """Of the first tasks."""
    return [task_name(t) for t in range(number)]


def identity(number: int) -> str:
    """Identity of a task, which is that of its folder too."""
    return task_name(number).replace(":", ".")


class Maker:
    """Writes runs of simulated methods as submissions below a folder."""

    def __init__(self, folder: Path, examples: int = 40) -> None:
        self.folder = folder
        self._settings = Settings(examples=examples)
        self._tasks: dict[int, Simulated] = {}

    def task(self, number: int) -> Simulated:
        """The simulated task of this number."""
        if number not in self._tasks:
            self._tasks[number] = _numbered(number)(self._settings)
        return self._tasks[number]

    def run(
        self,
        slug: str,
        task: int,
        method: str,
        seed: int,
        skill: float = 1.0,
        record: Mapping[str, Any] | None = None,
        method_number: int = 0,
    ) -> Path:
        """Writes a run; returns its directory.

        Args:
            slug: Of the submission.
            task: Number of the task.
            method: Identity of the method.
            seed: Of the run.
            skill: How much predictions know of the labels.
            record: Top keys of the record that are to be others.
            method_number: Other numbers give other predictions of the same skill.
        """
        protocol = self.task(task)
        predicted = protocol.predictions(skill, method_number, seed)
        arrays = {"log_probs": predicted, **protocol.targets()}
        directory = self.folder / slug / run_name(identity(task), method, seed)
        directory.mkdir(parents=True, exist_ok=True)
        content = _record(task, protocol, method, seed) | {
            "metrics": protocol.score(arrays),
            "seconds": 10.0 + skill + seed,
            "fits": [{"stage": "all", "epochs": 1, "steps": 8, "seconds": 9.0 + skill + seed}],
        }
        content["provenance"] = content["provenance"] | {"arrays_digest": array_digest(arrays)}
        if (record or {}).get("status", "completed") == "completed":
            (directory / "arrays.safetensors").write_bytes(safetensors.numpy.save(arrays))
        else:
            content["metrics"] = dict.fromkeys(content["metrics"])
            content["undefined"] = dict.fromkeys(content["metrics"], "diverged")
            content["provenance"] = content["provenance"] | {"arrays_digest": None}
        (directory / "record.json").write_text(json.dumps(content | dict(record or {})))
        return directory

    def seal(self, slug: str, **changed: Any) -> Path:
        """Writes `submission.json` with the digests of all files; returns the submission."""
        submission = self.folder / slug
        paths = sorted(p for p in submission.rglob("*") if p.is_file() and p.name != "submission.json")
        digests = {
            p.relative_to(submission).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths
        }
        content = {
            "schema_version": 1,
            "slug": slug,
            "authors": ["Ada Example"],
            "licence": "CC-BY-4.0",
            "paper": None,
            "code": None,
            "tuning_budget": 0,
            "trained_on": [],
            "environments": [_ENVIRONMENT],
            "hours": 0.5,
            "files": digests,
        }
        (submission / "submission.json").write_text(json.dumps(content | changed))
        return submission


def make(
    folder: Path,
    slugs: Iterable[str] = ("reference", "theirs"),
    methods: int = 3,
    tasks: int = 2,
    seeds: int = 3,
    examples: int = 40,
) -> Path:
    """Writes submissions of so many methods each on so many tasks; returns their folder.

    A method is the better, the higher its number, which goes on from one submission to the next. Of many the
    best gain ever less: predictions that are all sure are equal in half precision, as no two methods are.
    """
    maker = Maker(folder, examples)
    for s, slug in enumerate(slugs):
        for m in range(s * methods, (s + 1) * methods):
            for task in range(tasks):
                for seed in range(seeds):
                    steps = m * 0.35 / (1 + 0.1 * methods)
                    skill = 0.5 + min(steps, 2) + np.log1p(max(steps - 2, 0))
                    maker.run(slug, task, f"method{m:03}", seed, skill, method_number=m)
        maker.seal(slug)
    return folder


_ENVIRONMENT = {
    "python": "3.11.7",
    "torch": "2.11.0",
    "pytorch_lightning": "2.6.6",
    "system": "linux x86_64",
    "device": "a simulated processor",
    "threads": 1,
}


def _record(number: int, task: Simulated, method: str, seed: int) -> dict[str, Any]:
    name = method.partition("+")[0]
    return {
        "schema_version": 1,
        "status": "completed",
        "reason": None,
        "task": {
            "name": task_name(number),
            "identity": identity(number),
            "version": 1,
            "data_digest": task.data_digest(),
            "settings": {"examples": task.settings.examples},
            "main_metric": "nll",
        },
        "method": {
            "name": name,
            "identity": method,
            "members": 1,
            "settings": {"learning_rate": 0.001},
            "tuning": "untuned",
            "capabilities": ["weight_samples"],
            "seed_matters": True,
        },
        "preset": "standard",
        "seed": seed,
        "command": f"bench run {name} {task_name(number)} --seed {seed}",
        "created": f"2026-11-{1 + number:02}T12:00:00+00:00",
        "metrics": {},
        "undefined": {},
        "validation": {},
        "fits": [],
        "diagnostics": {},
        "seconds": 1.0,
        "environment": _ENVIRONMENT,
        "trainer": {"precision": "32-true"},
        "provenance": {
            "version": "0.1.0",
            "source_hash": "0" * 64,
            "method_file_hash": "1" * 64,
            "task_file_hash": "2" * 64,
            "commit": "3" * 40,
            "dirty": False,
            "arrays_digest": None,
        },
    }


# --------------------------------------------------------------------------------------------- one example

HOSTILE = "</title><script>alert(1)</script>\"'><img src=x onerror=alert(1)> =1+1"
"""What a stranger may call himself."""
STATUS = """
[gone]
withdrawn = "its authors <b>ask</b> for it"

[older]
superseded_by = "theirs"

[theirs]
tier = "re-run"
"""


class Example(NamedTuple):
    """Submissions with something of everything, the board that they give, and its pages."""

    submissions: Path
    cache: Path
    board: Any
    site: Path

    def build(self, **options: Any) -> Any:
        """Builds the board again."""
        from bench.leaderboard.rank.board import build

        given = {"cache": self.cache, "imports": task_names(2)}
        return build(self.submissions, **given | options)


_FOLDER = tempfile.TemporaryDirectory(prefix="boards-")  # removed when the process ends


@cache
def example() -> Example:
    """The example, made once a process."""
    from bench.leaderboard.rank.board import build
    from bench.leaderboard.site import pages

    top = Path(_FOLDER.name)
    folder = top / "submissions"
    maker = Maker(folder, examples=800)
    for method in range(4):
        for task in range(2):
            for seed in range(3):
                maker.run(
                    "reference", task, f"method{method:03}", seed, 0.4 + 0.7 * method, method_number=method
                )
    maker.seal("reference")
    for seed in range(3):
        maker.run("theirs", 0, "method+rate=0.1", seed, 2.0, method_number=7)
        failed = {"status": "diverged", "reason": f"a loss was NaN {HOSTILE}"} if seed == 1 else {}
        maker.run("theirs", 0, "unstable", seed, 3.0, failed, method_number=8)
        maker.run("gone", 0, "better-than-all", seed, 9.0, method_number=9)
        maker.run("older", 0, "method+rate=0.2", seed, 1.0, method_number=10)
        maker.run("hostile", 0, "cmd", seed, 1.0, {"command": f"bench run {HOSTILE}"}, method_number=11)
    maker.run("hostile", 0, "few", 0, 1.0, method_number=12)
    (folder / "hostile" / identity(0) / "cmd").rename(folder / "hostile" / identity(0) / "=cmd")
    (folder / "hostile" / identity(0) / "=cmd" / "seed2" / "record.json").write_text("{}")
    maker.seal("theirs", paper="https://example.org/?a=1&b=2", code="https://example.org/code")
    maker.seal("gone")
    maker.seal("older")
    maker.seal("hostile", authors=[HOSTILE], trained_on=[HOSTILE, "=HYPERLINK(1)"])
    (folder / "broken").mkdir()
    (folder / "broken" / "submission.json").write_text("{")
    (top / "status.toml").write_text(STATUS)
    board = build(folder, top / "cache", imports=task_names(2))
    pages.write(board, top / "site")
    return Example(folder, top / "cache", board, top / "site")
