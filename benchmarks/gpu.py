"""What an accelerator does: steps, many fits at once, and an active-learning trajectory, in one go.

    python benchmarks/gpu.py [--minutes 8] [--json FILE] [--device cuda] [--tiny]

Steps:       plain network, mc_dropout, mfvi and radial with S = 1 on MLP, LeNet and VGG-16 at 64 and 512 px,
             in float32, VGG-16 in bf16-mixed too; mfvi compiled, too, where networks are small. Ratios to the
             plain network and to mc_dropout, and the most memory of the device that each takes.
Walks:       a forward and backward pass under S stacked weights, as a loop, a batched product and vmap.
Fits:        forty-five fits side by side against one after another (benchmarks/small_fits.py).
Trajectory:  radial on active_mnist, preset paper, until ten points are acquired; its time is extrapolated to
             the whole. Farquhar 2022 (docs/sources.md), appendix C, says 2 to 4 hours.

The contenders of a comparison take turns. The clock is read when the device has nothing left to do, before
and after a turn, not at every step. What would begin late within `--minutes` is left out, and named. `--tiny
--device cpu` has everything but the fits at sizes that prove the script and measure nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from timing import Step, interleaved, median, print_table, ratio, write
from torch import nn
from torch.utils.data import TensorDataset

from bench import networks, priors
from bench.contract import Batch, Method, Problem
from bench.engine.compiled import compiling
from bench.errors import BenchError
from bench.likelihoods import Bernoulli, Categorical, Likelihood
from bench.methods.map import MAP
from bench.methods.mc_dropout import MCDropout
from bench.methods.mfvi import MFVI
from bench.methods.radial import Radial
from bench.runs import runner
from bench.runs.plan import Plan
from bench.settings import build
from bench.weights import forward

TURN = 0.1
"""Seconds of a turn, at least."""
NUM_TRAIN = 60_000


@dataclass(frozen=True)
class Net:
    """A network and its batch; `outputs` of 1 is a logit."""

    name: str
    make: Callable[..., nn.Module]
    shape: tuple[int, ...]
    batch: int
    outputs: int = 10
    is_small: bool = True


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    nets: tuple[Net, ...]
    walks: tuple[int, ...]
    rounds: int
    task: str
    task_settings: dict[str, Any]
    preset: str
    acquired: int


FULL = Sizes(
    nets=(
        Net("MLP 784-400-400-10", partial(networks.mlp, 784, 10, (400, 400)), (784,), 128),
        Net("LeNet", networks.lenet, (1, 28, 28), 64),
        Net("VGG-16, 64 px", networks.vgg16, (3, 64, 64), 16, 1, False),
        Net("VGG-16, 512 px", networks.vgg16, (3, 512, 512), 16, 1, False),
    ),
    walks=(1, 8, 32),
    rounds=10,
    task="active_mnist",
    task_settings={},
    preset="paper",
    acquired=10,
)
TINY = Sizes(
    nets=(
        Net("MLP 4-3-10", partial(networks.mlp, 4, 10, (3,)), (4,), 8),
        Net("VGG-16 of one channel, 32 px", partial(networks.vgg16, 1), (3, 32, 32), 2, 1, False),
    ),
    walks=(2,),
    rounds=1,
    task="active_digits",
    task_settings={"acquired": 4},
    preset="smoke",
    acquired=2,
)


class Device:
    """Where everything is measured."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cpu = name == "cpu"

    def clock(self) -> float:
        """Seconds, when nothing is left to do."""
        if not self.is_cpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self, work: Callable[[], object]) -> float | None:
        """Most memory that some work takes, in MiB; None on a CPU."""
        if self.is_cpu:
            return None
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    @property
    def trainer(self) -> dict[str, Any]:
        """Options of a run here."""
        return {"accelerator": "cpu" if self.is_cpu else "gpu", "devices": 1}


# --------------------------------------------------------------------------------------------------- steps


def problem_of(net: Net, device: Device) -> Problem:
    """Random examples of one batch, on the device."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(net.batch, *net.shape, generator=generator).to(device.name)
    targets = torch.randint(max(2, net.outputs), (net.batch,), generator=generator).to(device.name)
    likelihood: Likelihood = Bernoulli() if net.outputs == 1 else Categorical()
    return Problem(net.make, likelihood, priors.normal(), TensorDataset(inputs, targets), None, NUM_TRAIN)


def step_of(method: Method, precision: str, device: Device) -> Step:
    """A training step on the whole problem, which does not wait for the device."""
    method.to(device.name)
    method.generator = torch.Generator(device.name).manual_seed(0)
    optimizer: Any = method.configure_optimizers()
    batch = Batch(*method.problem.train.tensors)  # type: ignore[attr-defined]
    mixed = partial(torch.autocast, device.name, torch.bfloat16, enabled=precision == "bf16-mixed")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with mixed():
            result: Any = method.training_step(batch, 0)
        result["loss"].backward()
        optimizer.step()

    return step


METHODS: dict[str, type[Method]] = {"plain": MAP, "mc_dropout": MCDropout, "mfvi": MFVI, "radial": Radial}


def steps(net: Net, precision: str, device: Device, rounds: int, compiles: bool = False) -> list[dict]:
    """A row per method on one network; `compiles` adds the compiled step of mfvi."""
    problem = problem_of(net, device)

    def make(name: str) -> Method:
        kind = METHODS[name]
        torch.manual_seed(0)
        return kind(problem, kind.settings_class())

    def three(name: str) -> Step:
        step = step_of(make(name), precision, device)
        for _ in range(3):
            step()
        return step

    peaks = {name: device.peak(partial(three, name)) for name in METHODS}
    with ExitStack() as stack:
        made = {name: make(name) for name in METHODS}
        runs = {name: step_of(method, precision, device) for name, method in made.items()}
        if compiles:
            method = make("mfvi").to(device.name)
            stack.enter_context(compiling(method, lambda text: print(text, file=sys.stderr)))
            runs["mfvi, compiled"] = step_of(method, precision, device)
        measured = interleaved(runs, rounds, TURN, device.clock)
    return [
        {
            "network": net.name,
            "batch": net.batch,
            "precision": precision,
            "method": name,
            "milliseconds": 1000 * median(found),
            "to_plain": ratio(measured, name, "plain"),
            "to_mc_dropout": ratio(measured, name, "mc_dropout"),
            "peak_mib": peaks.get(name),
        }
        for name, found in measured.items()
    ]


def walks(net: Net, samples: int, device: Device, rounds: int) -> list[dict]:
    """A forward and backward pass under S weights, in every way that the network allows."""
    problem = problem_of(net, device)
    network = net.make().to(device.name)
    inputs, targets = problem.train.tensors  # type: ignore[attr-defined]
    weights = {
        name: p.detach().expand(samples, *p.shape).clone().requires_grad_()
        for name, p in network.named_parameters()
    }

    def run(walk: Any) -> None:
        outputs = forward(network, weights, inputs, walk)
        (-problem.likelihood.log_prob(outputs, targets).mean()).backward()

    runs: dict[str, Step] = {"loop": partial(run, "loop"), "vmap": partial(run, "vmap")}
    if len(net.shape) == 1:
        runs["stacked"] = partial(run, "stacked")
    measured = interleaved(runs, rounds, TURN, device.clock)
    about = {"network": net.name, "batch": net.batch, "samples": samples}
    return [
        about | {"walk": name, "milliseconds": 1000 * median(found), "to_loop": ratio(measured, name, "loop")}
        for name, found in measured.items()
    ]


# -------------------------------------------------------------------------------------------- a trajectory


def trajectory(sizes: Sizes, device: Device, data_dir: str | None, deadline: float) -> dict:
    """The beginning of a run of active learning, and how long the whole would take.

    Args:
        sizes: Which task, and how many points are acquired before it stops.
        device: Where.
        data_dir: Folder with its data.
        deadline: By `time.perf_counter`: when it stops in any case.
    """
    began: list[float] = []
    seen: dict[str, int] = {}
    is_enough = False

    def stop() -> NoReturn:
        nonlocal is_enough
        is_enough = True
        raise KeyboardInterrupt

    def watch(event: str, values: dict[str, Any]) -> None:
        if event == "stage":
            began.append(device.clock())
            seen.update({"done": values["number"] - 1, "of": values["of"]})
            # A test at the start, and one after every third acquisition.
            if values["number"] > 1 + sizes.acquired + sizes.acquired // 3:
                stop()
        if began and time.perf_counter() > deadline:
            stop()

    about: dict[str, Any] = {"method": "radial", "task": sizes.task, "preset": sizes.preset}
    with tempfile.TemporaryDirectory() as folder:
        values = about | {"task_settings": sizes.task_settings, "trainer": device.trainer, "out": folder}
        try:
            runner.execute(build(Plan, values | {"data_dir": data_dir}), (watch,))
        except KeyboardInterrupt:
            if not is_enough:
                raise
        except BenchError as error:
            return about | {"left_out": str(error)}
    done = len(began) - 1
    if done < 1:
        return about | {"left_out": "not one stage ended in time"}
    seconds = (began[-1] - began[0]) / done
    return (
        about
        | {"stages": done, "of": seen["of"], "seconds_per_stage": seconds}
        | {"hours_of_the_whole": seconds * seen["of"] / 3600}
    )


# --------------------------------------------------------------------------------------------- all at once


def measure(
    sizes: Sizes,
    device: Device,
    minutes: float,
    data_dir: str | None = None,
    save: Callable[[dict[str, Any]], object] = lambda found: None,
) -> dict[str, Any]:
    """Everything, as far as there is time; `save` is called after each part with all that was found."""
    from small_fits import many

    began = time.perf_counter()
    found: dict[str, Any] = {"cuda": None if device.is_cpu else torch.version.cuda, "seconds": 0.0}
    found |= {"steps": [], "walks": [], "fits": [], "trajectory": None, "left_out": []}

    def add(what: str, name: str, work: Callable[[], Any], share: float = 1.0) -> None:
        """Does some work, if less than this share of the time has passed."""
        if time.perf_counter() - began > 60 * minutes * share:
            found["left_out"].append(f"{what}, {name}: no time left")
            return
        print(f"{time.perf_counter() - began:4.0f} s  {what}, {name}", file=sys.stderr, flush=True)
        try:
            rows = work()
        except Exception as error:  # the minutes of a device are not lost to one part
            found["left_out"].append(f"{what}, {name}: {type(error).__name__}, {error}".splitlines()[0])
            return
        if isinstance(found[what], list):
            found[what] += rows
        else:
            found[what] = rows
        found["seconds"] = time.perf_counter() - began
        save(found)

    for net in sizes.nets:
        for precision in ("32-true",) if net.is_small else ("32-true", "bf16-mixed"):
            add(
                "steps", f"{net.name}, {precision}", partial(steps, net, precision, device, sizes.rounds), 0.4
            )
    for net in (net for net in sizes.nets if net.is_small):
        for samples in sizes.walks:
            add("walks", f"{net.name}, S {samples}", partial(walks, net, samples, device, sizes.rounds), 0.5)
    until = began + 60 * minutes * 0.75
    add("trajectory", sizes.task, partial(trajectory, sizes, device, data_dir, until), 0.6)
    if sizes is not TINY:
        add("fits", "45 of an MLP and 9 of LeNet", partial(many, 1, device.name), 0.8)
        for net in (net for net in sizes.nets if net.is_small):
            compiled = partial(steps, net, "32-true", device, sizes.rounds, compiles=True)
            add("steps", f"{net.name}, compiled", compiled, 0.85)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8, help="begin nothing that may last longer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that prove the script and measure nothing")
    parser.add_argument("--data-dir", help="folder with MNIST; also $BENCH_DATA")
    parser.add_argument("--json", type=Path, help="file for all (benchmarks/gpu.json)")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no accelerator is to be seen; --device cpu --tiny tries the script out")
    sizes = TINY if arguments.tiny else FULL

    def save(found: dict[str, Any]) -> None:
        if arguments.json:
            write(arguments.json, found, arguments.device)

    found = measure(sizes, Device(arguments.device), arguments.minutes, arguments.data_dir, save)
    for name in ("steps", "walks", "fits"):
        if found[name]:
            print(f"\n{name}\n")
            print_table(found[name])
    print(f"\ntrajectory: {found['trajectory']}")
    for line in found["left_out"]:
        print(f"left out: {line}")
    save(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
