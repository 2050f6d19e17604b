"""Time and memory of a mean-field posterior here, against five libraries that have one.

    python benchmarks/peers.py [--rounds 30] [--cases LeNet] [--json FILE] [--check] [--cache DIR]

The first call makes an environment in DIR (the user's cache unless given): it sees the packages of this one,
torch among them, and has the peers from the registry on top. Later calls take what is there: delete the
folder for newer releases. A peer that cannot be installed or used is named with the reason. Everything is
then measured in one process of that environment, on one thread.

Steps:      zero grad, noise, forward, KL, backward and optimiser, S samples of the weights.
Prediction: 1,000 examples (64 of the VGG), S = 16; here as a run predicts, elsewhere a pass per sample.
Memory:     what tensors occupy at the peak of three steps, parameters and optimiser included.
A fit:      what the engine adds to 10 and 110 steps (benchmarks/small_fits.py).

A peer may be used in several ways: images in the usual order or channels last, and for prediction all inputs
at once or 250 at a time. Its fastest way is found by two calls each; then all contenders take turns of 30 ms,
so that another program's load falls on all. A time is the median over the rounds, a ratio the median of the
rounds' ratios, told with its quartiles. Times are the process's own, which on an idle machine is what passes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import OURS, PEERS, Contender, Floor, Work, products, why_not
from memory import peak
from timing import SECONDS_PER_TURN, interleaved, median, print_table, quartiles, ratio, seconds, write
from torch import nn

from bench import networks
from bench.engine import trainer
from bench.system.places import CACHE_ROOT
from bench.weights import channels_last

INSIDE = "BENCH_PEERS"
"""Variable of the inner process: why which peer was not installed, as JSON."""
SAMPLES, TRIAL = 16, 2
"""Of a prediction, and of one that tells the fastest way to predict."""
PIECE = 250
LONGEST = 30.0
"""Seconds of a comparison, about, from which it has fewer rounds, but five."""


Peers = Mapping[str, Callable[[Work], Contender]]


@dataclass(frozen=True)
class Case:
    """A network and the shapes of its work.

    Attributes:
        name: Of the network.
        network: Makes it.
        shape: Of an example.
        batch: B.
        samples: S of every step measured.
        outputs: Classes; 1 is a logit.
        step: Goals by S: largest ratio of a step to the fastest peer.
        radial: Goal of a step of radial with one sample, where it is another.
        floor: Goal: largest ratio of a step to the floor in channels-last order.
        prediction: Goal: largest ratio of a prediction to the fastest peer.
        points: Examples that are predicted.
    """

    name: str
    network: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    batch: int
    samples: tuple[int, ...]
    step: Mapping[int, float]
    outputs: int = 10
    radial: float | None = None
    floor: float | None = None
    prediction: float | None = None
    points: int = 1000

    def work(self, samples: int) -> Work:
        """Random examples."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.batch, *self.shape, generator=generator)
        targets = torch.randint(max(2, self.outputs), (self.batch,), generator=generator)
        return Work(self.network, inputs, targets.float() if self.outputs == 1 else targets, samples)


FLAT, GREY = (784,), (1, 28, 28)
CASES = (
    Case(
        *("MLP 784-100-100-10", partial(networks.mlp, 784, 10, (100, 100)), FLAT, 256, (1, 8)),
        step={1: 0.95},
    ),
    Case(
        *("MLP 784-256-256-10", partial(networks.mlp, 784, 10, (256, 256)), FLAT, 128, (1,)),
        step={},
    ),
    Case(
        *("MLP 784-400-400-10", partial(networks.mlp, 784, 10, (400, 400)), FLAT, 128, (1, 8)),
        step={1: 0.60, 8: 0.45},
        radial=0.65,
        prediction=0.80,
    ),
    Case(
        *("LeNet", networks.lenet, GREY, 64, (1, 8)),
        step={1: 0.75, 8: 0.65},
        floor=1.30,
        prediction=0.80,
    ),
    Case(
        *("small VGG", networks.small_vgg, (3, 64, 64), 16, (1, 4)),
        step={1: 0.80, 4: 0.70},
        outputs=1,
        prediction=0.80,
        points=64,
    ),
)


# --------------------------------------------------------------------------------------- an environment


def entered(cache: Path, packages: Mapping[str, Sequence[str]], wheels: Path | None = None) -> dict[str, str]:
    """Goes on in the environment of the packages, by the same command; there, why which was not installed."""
    if INSIDE in os.environ:
        return json.loads(os.environ[INSIDE])
    folder = cache / f"{sys.version_info.major}.{sys.version_info.minor}-{torch.__version__}"
    python, errors = environment(folder.resolve(), packages, wheels)
    variables = {**os.environ, INSIDE: json.dumps(errors), "OMP_NUM_THREADS": "1"}
    raise SystemExit(os.execve(python, [str(python), "-W", "ignore", *sys.argv], variables))


def environment(
    folder: Path, packages: Mapping[str, Sequence[str]], wheels: Path | None = None
) -> tuple[Path, dict[str, str]]:
    """A Python with all that this one has and, beside it, the packages, each with what else it needs.

    Args:
        folder: Of the environment, made if it is not there.
        packages: By name what else each needs.
        wheels: Folder that they are taken from; None asks the registry.

    Returns:
        The Python, and why which package could not be installed.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=False)
    where = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", where))
    seen = [path for path in map(Path, sys.path) if path.name in ("site-packages", "dist-packages")]
    lines = [
        f"import site; site.addsitedir({str(path)!r})" for path in seen or map(Path, site.getsitepackages())
    ]
    (own / "outer.pth").write_text("\n".join(lines) + "\n")
    held = folder / "held.txt"  # what is measured with: no peer may replace it
    names = ("torch", "torchvision", "pytorch-lightning", "numpy")
    held.write_text("".join(f"{name}=={importlib.metadata.version(name)}\n" for name in names))
    errors = {}
    there = {
        d.metadata["Name"].lower().replace("_", "-")
        for d in importlib.metadata.distributions(path=[str(own)])
    }
    for package, needs in packages.items():
        if package in there:
            continue
        print(f"installing {package}", file=sys.stderr, flush=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        whence = [] if wheels is None else ["--no-index", "--find-links", str(wheels)]
        done = subprocess.run(
            [*pip, "install", "-q", "-c", str(held), *whence, package, *needs], capture_output=True, text=True
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            errors[package] = " ".join(said[:2]) or f"pip ended with exit code {done.returncode}"
    return python, errors


# ---------------------------------------------------------------------------------------------- measuring


def orders(inputs: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Inputs as they are and, of images for convolutions, in channels-last order."""
    yield "", inputs
    if inputs.ndim == 4:
        yield ", channels last", channels_last(inputs)


def ways(kind: Callable[[Work], Contender], work: Work) -> dict[str, Contender]:
    """A contender with the batch in every order."""
    return {order: kind(replace(work, inputs=inputs)) for order, inputs in orders(work.inputs)}


def predictors(contenders: Mapping[str, Contender], points: torch.Tensor, samples: int) -> dict[str, Any]:
    """Every way in which a contender can predict the points."""

    def in_pieces(contender: Contender, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([contender.predict(piece, samples) for piece in inputs.split(PIECE)], 1)

    found: dict[str, Any] = {}
    for order, inputs in orders(points):
        found[order] = partial(contenders[order].predict, inputs, samples)
        if len(points) > PIECE:
            found[f"{order}, {PIECE} at a time"] = partial(in_pieces, contenders[order], inputs)
    return found


def fastest(runs: Mapping[str, dict[str, Any]]) -> dict[str, tuple[Any, float]]:
    """Of every contender's ways the fastest, named by contender and way, and its seconds at its best."""
    found = {}
    for name, ways in runs.items():
        best = {}
        for way, run in ways.items():
            run()
            best[way] = min(seconds(run, 1) for _ in range(2))
        way = min(best, key=lambda way: best[way])
        found[name + way] = (ways[way], best[way])
    return found


def times(
    runs: Mapping[str, dict[str, Any]],
    rounds: int,
    trials: Mapping[str, dict[str, Any]] | None = None,
    share: float = 1.0,
) -> tuple[list[dict], dict[str, list[float]]]:
    """A row per contender in its fastest way, and what was measured.

    Args:
        runs: By contender and way.
        rounds: At most.
        trials: What tells the fastest way, in place of the runs themselves.
        share: Of the time of a run that a trial takes.
    """
    chosen = fastest(trials or runs)
    a_round = sum(max(SECONDS_PER_TURN, lasts / share) for _, lasts in chosen.values())
    rounds = min(rounds, max(5, round(LONGEST / a_round)))
    every = {name + way: run for name, ways in runs.items() for way, run in ways.items()}
    measured = interleaved({name: every[name] for name in chosen}, rounds)
    rows = [
        {"contender": name, "milliseconds": 1000 * median(found), "rounds": rounds}
        for name, found in measured.items()
    ]
    return rows, measured


Against = tuple[str, float, float, float]
"""The name of another, and of the rounds' ratios to its time the median and both quartiles."""


def against(measured: dict[str, list[float]], method: str, others: Sequence[str]) -> Against | None:
    """The fastest of the others, and the ratio of a method's time to its; None without others."""
    if not others:
        return None
    best = min(others, key=lambda name: median(measured[name]))
    return best, ratio(measured, method, best), *quartiles(measured, method, best)


def goal(what: str, method: str, largest: float | None, found: Against | None) -> dict:
    """A row of the table of goals."""
    to, value, lower, upper = found or (None, None, None, None)
    missed = largest is not None and value is not None and value > largest
    verdict = (
        "no goal" if largest is None else "not measured" if value is None else "missed" if missed else "hit"
    )
    return {
        "what": what,
        "method": method,
        "against": to,
        "ratio": value,
        "lower": lower,
        "upper": upper,
        "goal": largest,
        "verdict": verdict,
    }


HELD = ("mfvi", "radial")
"""Ours that are held against libraries with a bound; `ivon` is against the package of its authors."""

PRODUCTS = "the products alone"
"""A prediction's, in their fastest order: what no contender can do without; told, and no goal."""

Found = dict[str, list[dict]]
"""Rows of the tables: goals, steps, predictions, memory."""


def stepping(case: Case, samples: int, peers: Peers, rounds: int) -> Found:
    """Time and memory of a training step."""
    about = f"step, {case.name}, B {case.batch}, S {samples}"
    print(about, file=sys.stderr, flush=True)
    work, kinds = case.work(samples), {**peers, **OURS}
    runs = {n: {way: c.step for way, c in ways(kind, work).items()} for n, kind in peers.items()}
    runs |= {f"floor{way}": {"": c.step} for way, c in ways(Floor, work).items()}
    runs |= {name: {"": kind(work).step} for name, kind in OURS.items()}
    rows, measured = times(runs, rounds)
    bounds = tuple(name for name, kind in peers.items() if getattr(kind, "has_bound", True))
    others = [name for name in measured if name.startswith(bounds)]
    floor = [name for name in measured if name.startswith("floor")][-1:]
    goals = []
    for name in HELD:
        largest = case.step.get(samples)
        if name == "radial" and samples == 1:
            largest = case.radial or largest
        goals.append(goal(about, name, largest, against(measured, name, others)))
        goals.append(goal(about, name, case.floor, against(measured, name, floor)))
    if case.step:
        theirs = [name for name in measured if name.startswith("ivon-opt")]
        goals.append(goal(about, "ivon", 1.0 if samples == 1 else None, against(measured, "ivon", theirs)))
    shape = {"network": case.name, "batch": case.batch, "samples": samples}
    peaks = [
        shape | {"contender": name, "MiB": peak(partial(three_steps, kind, work)) / 2**20}
        for name, kind in (kinds | {"floor": Floor}).items()
    ]
    return {"goals": goals, "steps": [shape | row for row in rows], "memory": peaks}


def predicting(case: Case, peers: Peers, rounds: int) -> Found:
    """Time of a prediction."""
    about = f"prediction, {case.name}, {case.points} examples, S {SAMPLES}"
    print(about, file=sys.stderr, flush=True)
    work = case.work(1)
    inputs = torch.randn(case.points, *case.shape, generator=torch.Generator().manual_seed(1))
    ready = {name: ways(kind, work) for name, kind in peers.items()}
    ours = {name: kind(work) for name, kind in OURS.items()}

    def runs(samples: int) -> dict[str, dict[str, Any]]:
        found = {name: predictors(contenders, inputs, samples) for name, contenders in ready.items()}
        found |= {name: {"": partial(own.predict, inputs, samples)} for name, own in ours.items()}
        found[PRODUCTS] = {
            order + way: run
            for order, given in orders(inputs)
            for way, run in products(work, given, samples).items()
        }
        return found

    rows, measured = times(runs(SAMPLES), rounds, runs(TRIAL), TRIAL / SAMPLES)
    others = [name for name in measured if name not in OURS and not name.startswith(PRODUCTS)]
    floor = next(name for name in measured if name.startswith(PRODUCTS))
    shape = {"network": case.name, "examples": case.points, "samples": SAMPLES}
    return {
        "goals": [goal(about, name, case.prediction, against(measured, name, others)) for name in HELD]
        + [goal(about, PRODUCTS, None, against(measured, floor, others))],
        "predictions": [shape | row for row in rows],
    }


def measure(cases: Sequence[Case], peers: Peers, rounds: int) -> Found:
    """Steps, predictions and memory of every contender, and the goals."""
    found: Found = {"goals": [], "steps": [], "predictions": [], "memory": []}
    for case in cases:
        for part in (
            *(stepping(case, samples, peers, rounds) for samples in case.samples),
            predicting(case, peers, rounds),
        ):
            for name, rows in part.items():
                found[name] += rows
    return found


def three_steps(kind: Callable[[Work], Contender], work: Work) -> Contender:
    """A contender made anew, after three steps."""
    contender = kind(work)
    for _ in range(3):
        contender.step()
    return contender


def fits(rounds: int) -> tuple[list[dict], list[dict]]:
    """What the engine adds to a fit, and its goals."""
    from small_fits import LARGEST_EXTRA_PER_FIT, LARGEST_EXTRA_PER_STEP, overhead

    print("a fit beyond its steps", file=sys.stderr, flush=True)
    rows, step = overhead(rounds)
    added = {
        "a fit of 10 steps, ms beyond them": (rows[0], LARGEST_EXTRA_PER_FIT),
        "a step of a fit, ms beyond it": (step, LARGEST_EXTRA_PER_STEP),
    }
    names = ("extra_milliseconds", "extra_lower", "extra_upper")
    return rows, [
        goal(what, "mfvi", most, ("a bare loop", *(row[name] for name in names)))
        for what, (row, most) in added.items()
    ]


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of what was measured."""
    names = ["posterior-bench", "torch", *packages]
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


# --------------------------------------------------------------------------------------------- the report


def report(cases: Sequence[Case], rounds: int, errors: dict[str, str]) -> dict[str, Any]:
    """All measurements, of the peers that can be had."""
    torch.set_num_threads(1)
    trainer.keep_memory()
    torch.manual_seed(0)
    rows, goals = fits(rounds)  # first: what some peers import changes how Lightning logs
    absent = {name: reason for name in PEERS if (reason := why_not(name, errors)) is not None}
    present = {name: kind for name, kind in PEERS.items() if name not in absent}
    found = measure(cases, present, rounds)
    found["goals"] = [
        row for row in [*found["goals"], *goals] if row["goal"] is not None or row["method"] == PRODUCTS
    ]
    return {
        "threads": 1,
        "rounds": rounds,
        "versions": versions(list(present)),
        "absent": absent,
        **found,
        "fits": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds of every comparison")
    parser.add_argument("--cases", default="", help="measure only networks whose name contains this")
    parser.add_argument("--json", type=Path, help="file for all (the committed one is benchmarks/peers.json)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--cache", type=Path, default=CACHE_ROOT / "peers", help="folder of the environment")
    arguments = parser.parse_args()
    chosen = [case for case in CASES if arguments.cases in case.name]
    if not chosen:
        parser.error(f"--cases {arguments.cases}: none of {', '.join(case.name for case in CASES)}")
    errors = entered(arguments.cache, {n: p.needs for n, p in PEERS.items()})
    found = report(chosen, arguments.rounds, errors)
    for name in ("steps", "predictions", "memory", "goals"):
        print(f"\n{name}\n")
        print_table(found[name])
    for name, reason in found["absent"].items():
        print(f"\nnot measured: {name}: {reason}")
    if arguments.json:
        write(arguments.json, found)
    return int(arguments.check and any(row["verdict"] == "missed" for row in found["goals"]))


if __name__ == "__main__":
    sys.exit(main())
