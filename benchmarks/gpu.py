"""What an accelerator does, in four parts of two minutes each, the most telling first.

    python benchmarks/gpu.py [PART ...] [--minutes 2] [--json FILE] [--wheels DIR] [--device cuda] [--tiny]

steps      a training step with S = 1, 8 and 32 on MLP and LeNet, S = 1 on VGG and ResNet-20: the plain
           network on S times the batch; mfvi, radial and ivon; mfvi tensor by tensor, compiled, and as one
           CUDA graph; other libraries (benchmarks/contenders.py). Times, ratios to the plain network, memory.
networks   plain network, mc_dropout, mfvi and radial on large images and residual networks, in float32 and
           bf16-mixed: times, memory, and images a second.
draws      a forward and backward pass under S stacked weights, as a loop, a batched product and vmap; and
           forty-five fits side by side against one after another (benchmarks/small_fits.py).
runs       mfvi on split_mnist, from its first to its last stage; radial on active_mnist, preset paper, until
           ten points are acquired, extrapolated. Farquhar 2022 (docs/sources.md), appendix C, says 2 to 4
           hours.

Without names all parts are measured, each within `--minutes`: what would begin late is left out, and named.
Every part is written to the file as soon as it has a row, with its own date and device, and the other parts
stay as they are: a short loan of a device adds what it measured. The contenders of a comparison take turns.
The clock is read when the device has nothing left to do, before and after a turn, not at every step.

The libraries come from the registry, as for benchmarks/peers.py, or from `--wheels`, a folder of their wheels
for a machine without a network (`pip download -d .wheels bayesian-torch posteriors ivon-opt`). One that is
not there is named. `--tiny --device cpu` has every part but the fits, at sizes that prove the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from contenders import OURS, PEERS, Contender, Floor, OurMFVI, Work, why_not
from peers import entered
from timing import Step, heading, interleaved, median, print_table, ratio
from torch import nn
from torch.utils.data import TensorDataset

from bench import networks, priors, resnet
from bench.contract import Batch, Method, Problem
from bench.engine.compiled import Compiled
from bench.errors import BenchError
from bench.families import location_scale
from bench.likelihoods import Bernoulli, Categorical, Likelihood
from bench.methods.map import MAP
from bench.methods.mc_dropout import MCDropout
from bench.methods.mfvi import MFVI
from bench.methods.radial import Radial
from bench.runs import runner
from bench.runs.plan import Plan
from bench.settings import build
from bench.system.files import write
from bench.system.places import CACHE_ROOT
from bench.weights import forward

TURN = 0.1
"""Seconds of a turn, at least."""
NUM_TRAIN = 60_000
WHEELS = ("bayesian-torch", "posteriors", "ivon-opt")
"""The libraries that are measured here; the others of contenders.py are slower than these on a processor."""


@dataclass(frozen=True)
class Net:
    """A network and its batch; `outputs` of 1 is a logit, `samples` are S of the steps measured."""

    name: str
    make: Callable[..., nn.Module]
    shape: tuple[int, ...]
    batch: int
    outputs: int = 10
    samples: tuple[int, ...] = (1,)
    methods: tuple[str, ...] = ("plain", "mc_dropout", "mfvi", "radial")

    def examples(self, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
        """Random inputs and targets of one batch, on the device."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.batch, *self.shape, generator=generator).to(device.name)
        targets = torch.randint(max(2, self.outputs), (self.batch,), generator=generator).to(device.name)
        return inputs, targets.float() if self.outputs == 1 else targets


@dataclass(frozen=True)
class Trajectory:
    """A run of several stages, and after how many it is stopped; None lets it end."""

    method: str
    task: str
    preset: str
    stages: int | None
    task_settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    steps: tuple[Net, ...]
    networks: tuple[Net, ...]
    walks: tuple[int, ...]
    rounds: int
    runs: tuple[Trajectory, ...]
    compiles: bool = True


MLP = Net("MLP 784-400-400-10", partial(networks.mlp, 784, 10, (400, 400)), (784,), 128, samples=(1, 8, 32))
LENET = Net("LeNet", networks.lenet, (1, 28, 28), 64, samples=(1, 8, 32))
VGG = Net("small VGG, 64 px", networks.small_vgg, (3, 64, 64), 16, 1)
RESNET = Net(
    *("ResNet-20 with FRN and swish", partial(resnet.resnet_frn_swish, 20), (3, 32, 32), 128),
    methods=("plain", "mfvi", "radial"),
)
FULL = Sizes(
    steps=(MLP, LENET, VGG, RESNET),
    networks=(
        RESNET,
        Net("VGG-16, 64 px", networks.vgg16, (3, 64, 64), 16, 1),
        Net("VGG-16, 512 px", networks.vgg16, (3, 512, 512), 16, 1),
    ),
    walks=(1, 8, 32),
    rounds=10,
    runs=(
        Trajectory("mfvi", "split_mnist", "standard", None),
        # A test at the start, and one after every third acquisition.
        Trajectory("radial", "active_mnist", "paper", 1 + 10 + 10 // 3),
    ),
)
TINY = Sizes(
    steps=(Net("MLP 4-3-10", partial(networks.mlp, 4, 10, (3,)), (4,), 8, samples=(1, 2)),),
    networks=(Net("VGG-16 of one channel, 32 px", partial(networks.vgg16, 1), (3, 32, 32), 2, 1),),
    walks=(1, 2),
    rounds=1,
    runs=(
        Trajectory("mfvi", "split_digits", "smoke", None),
        Trajectory("radial", "active_digits", "smoke", 3, {"acquired": 4}),
    ),
    compiles=False,  # which alone takes a minute
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
        """Most memory that some work takes, in MiB; on a CPU it is done, and None."""
        if self.is_cpu:
            work()
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


Row = dict[str, Any]


class Part:
    """What is measured within some minutes, kept as it grows.

    Args:
        minutes: After which nothing begins.
        save: Called with all that was found after each addition.
    """

    def __init__(self, minutes: float, save: Callable[[dict[str, Any]], object]) -> None:
        self._began, self._minutes, self._save = time.perf_counter(), minutes, save
        self.found: dict[str, Any] = {"seconds": 0.0, "left_out": []}

    @property
    def deadline(self) -> float:
        """By `time.perf_counter`."""
        return self._began + 60 * self._minutes

    def add(self, what: str, name: str, work: Callable[[], list[Row]]) -> None:
        """Adds the rows that some work gives to those of this kind, if there is time."""
        if time.perf_counter() > self.deadline:
            self.leave_out(f"{what}, {name}: no time left")
            return
        print(f"{time.perf_counter() - self._began:4.0f} s  {what}, {name}", file=sys.stderr, flush=True)
        try:
            rows = work()
        except Exception as error:  # the minutes of a device are not lost to one row
            self.leave_out(f"{what}, {name}: {type(error).__name__}, {error}".splitlines()[0])
            return
        self.found.setdefault(what, []).extend(rows)
        self.found["seconds"] = round(time.perf_counter() - self._began, 1)
        self._save(self.found)

    def leave_out(self, line: str) -> None:
        """Names what is not measured."""
        self.found["left_out"].append(line)
        self._save(self.found)


# --------------------------------------------------------------------------------------------------- steps


class TensorByTensor(OurMFVI):
    """mfvi without its flat vectors."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)

        def draw(posterior: Any, noise: Any, prior: Any) -> Any:
            return location_scale.draw_with_divergence(posterior, noise, prior, None)

        self.method.draw = draw  # type: ignore[attr-defined]


class CompiledStep(OurMFVI):
    """mfvi, whose loss is compiled."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.function = Compiled(self.method, lambda text: print(text, file=sys.stderr))
        self.method.loss_terms = self.function

    def step(self) -> None:
        """A compiled one, or none: the suite goes on eagerly where compiling fails."""
        super().step()
        if self.function.failed:
            raise BenchError("its step cannot be compiled")


class Graph(OurMFVI):
    """mfvi, a step of which is recorded once and replayed; what graphs would give, the suite has none."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        if work.inputs.device.type != "cuda":
            raise BenchError("only CUDA has graphs")
        self.optimizer = torch.optim.Adam(self.method.parameters(), fused=True, capturable=True)
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                super().step()
        torch.cuda.current_stream().wait_stream(beside)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.method.generator)
        with torch.cuda.graph(self.graph):
            super().step()

    def step(self) -> None:
        """The recorded step on the same batch, with new noise."""
        self.graph.replay()


def contended(
    net: Net,
    samples: int,
    device: Device,
    rounds: int,
    compiles: bool,
    peers: Mapping[str, Any],
    leave_out: Callable[[str], None],
) -> list[Row]:
    """A row per contender: a training step with S samples. What cannot take one is left out, and named."""
    work = Work(net.make, *net.examples(device), samples)  # type: ignore[arg-type]
    kinds: dict[str, Callable[[Work], Contender]] = {"plain": Floor, **OURS}
    kinds |= {"mfvi, tensor by tensor": TensorByTensor, "mfvi, one graph": Graph}
    kinds |= {"mfvi, compiled": CompiledStep} if compiles else {}
    made: dict[str, Contender] = {}
    peaks: dict[str, float | None] = {}

    def three(name: str, kind: Callable[[Work], Contender]) -> None:
        torch.manual_seed(0)
        contender = kind(work)
        for _ in range(3):
            contender.step()
        made[name] = contender

    for name, kind in (kinds | dict(peers)).items():
        try:
            peaks[name] = device.peak(partial(three, name, kind))
        except Exception as error:
            what = f"steps, {net.name}, S {samples}, {name}"
            leave_out(f"{what}: {type(error).__name__}, {error}".splitlines()[0])
    measured = interleaved({name: c.step for name, c in made.items()}, rounds, TURN, device.clock)
    about = {"network": net.name, "batch": net.batch, "samples": samples}
    return [
        about
        | {"contender": name, "milliseconds": 1000 * median(found)}
        | {"to_plain": ratio(measured, name, "plain"), "peak_mib": peaks[name]}
        for name, found in measured.items()
    ]


def steps(part: Part, sizes: Sizes, device: Device, peers: Mapping[str, Any], data_dir: str | None) -> None:
    """Ours and others, the smallest S first."""
    pairs = [(samples, net) for net in sizes.steps for samples in net.samples]
    for samples, net in sorted(pairs, key=lambda pair: pair[0]):
        about = (sizes.rounds, sizes.compiles, peers, part.leave_out)
        work = partial(contended, net, samples, device, *about)
        part.add("steps", f"{net.name}, S {samples}", work)


# ------------------------------------------------------------------------------------------------ networks


METHODS: dict[str, type[Method]] = {"plain": MAP, "mc_dropout": MCDropout, "mfvi": MFVI, "radial": Radial}


AGAINST = {"to_plain": "plain", "to_mc_dropout": "mc_dropout"}


def problem_of(net: Net, device: Device) -> Problem:
    """Of one batch, on the device."""
    likelihood: Likelihood = Bernoulli() if net.outputs == 1 else Categorical()
    data = TensorDataset(*net.examples(device))
    return Problem(net.make, likelihood, priors.normal(), data, None, NUM_TRAIN)


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


def by_method(net: Net, precision: str, device: Device, rounds: int) -> list[Row]:
    """A row per method on one network."""
    problem = problem_of(net, device)

    def make(name: str) -> Method:
        kind = METHODS[name]
        torch.manual_seed(0)
        return kind(problem, kind.settings_class())

    def three(name: str) -> None:
        step = step_of(make(name), precision, device)
        for _ in range(3):
            step()

    peaks = {name: device.peak(partial(three, name)) for name in net.methods}
    runs = {name: step_of(make(name), precision, device) for name in net.methods}
    measured = interleaved(runs, rounds, TURN, device.clock)
    about = {"network": net.name, "batch": net.batch, "precision": precision}
    return [
        about
        | {
            "method": name,
            "milliseconds": 1000 * median(found),
            "images_per_second": net.batch / median(found),
        }
        | {to: ratio(measured, name, other) if other in measured else None for to, other in AGAINST.items()}
        | {"peak_mib": peaks[name]}
        for name, found in measured.items()
    ]


def large(part: Part, sizes: Sizes, device: Device, peers: Mapping[str, Any], data_dir: str | None) -> None:
    """Methods on large networks, in both precisions."""
    for net in sizes.networks:
        for precision in ("32-true", "bf16-mixed"):
            work = partial(by_method, net, precision, device, sizes.rounds)
            part.add("networks", f"{net.name}, {precision}", work)


# --------------------------------------------------------------------------------------------------- draws


def walks(net: Net, samples: int, device: Device, rounds: int) -> list[Row]:
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


def draws(part: Part, sizes: Sizes, device: Device, peers: Mapping[str, Any], data_dir: str | None) -> None:
    """Walks over the samples, and fits side by side."""
    from small_fits import many

    for net in (net for net in sizes.steps if len(net.samples) > 1):
        for samples in sizes.walks:
            part.add("walks", f"{net.name}, S {samples}", partial(walks, net, samples, device, sizes.rounds))
    if sizes is not TINY:
        part.add("fits", "45 of an MLP and 9 of LeNet", partial(many, 1, device.name))


# ---------------------------------------------------------------------------------------------------- runs


def trajectory(of: Trajectory, device: Device, data_dir: str | None, deadline: float) -> list[Row]:
    """A run, or its beginning and how long the whole would take.

    Args:
        of: Which, and where it is stopped.
        device: Where.
        data_dir: Folder with its data.
        deadline: By `time.perf_counter`: when it stops in any case.
    """
    began: list[float] = []
    whole: list[int] = []
    is_enough = False

    def stop() -> NoReturn:
        nonlocal is_enough
        is_enough = True
        raise KeyboardInterrupt

    def watch(event: str, values: dict[str, Any]) -> None:
        if event == "stage":
            began.append(device.clock())
            whole[:] = [values["of"]]
            if of.stages is not None and values["number"] > of.stages:
                stop()
        if began and time.perf_counter() > deadline:
            stop()

    about: Row = {"method": of.method, "task": of.task, "preset": of.preset}
    with tempfile.TemporaryDirectory() as folder:
        values = about | {"task_settings": dict(of.task_settings), "trainer": device.trainer, "out": folder}
        try:
            runner.execute(build(Plan, values | {"data_dir": data_dir}), (watch,))
            seconds, done = device.clock() - began[0], whole[0]
        except KeyboardInterrupt:
            if not is_enough:
                raise
            seconds, done = began[-1] - began[0], len(began) - 1
    if done < 1:
        raise BenchError("not one stage ended in time")
    counts = {"stages": done, "of": whole[0], "seconds": seconds}
    return [about | counts | {"hours_of_the_whole": seconds / done * whole[0] / 3600}]


def runs(part: Part, sizes: Sizes, device: Device, peers: Mapping[str, Any], data_dir: str | None) -> None:
    """Runs as a user has them, each with an equal share of what time is left."""
    for k, of in enumerate(sizes.runs):
        now = time.perf_counter()
        until = now + (part.deadline - now) / (len(sizes.runs) - k)
        part.add("runs", f"{of.method} on {of.task}", partial(trajectory, of, device, data_dir, until))


# --------------------------------------------------------------------------------------------- all at once


PARTS: dict[str, Callable[..., None]] = {"steps": steps, "networks": large, "draws": draws, "runs": runs}


def measure(
    name: str,
    sizes: Sizes,
    device: Device,
    minutes: float,
    peers: Mapping[str, Any],
    data_dir: str | None = None,
    save: Callable[[dict[str, Any]], object] = lambda found: None,
) -> dict[str, Any]:
    """One part, as far as there is time; `save` is called after each addition with all that was found."""
    part = Part(minutes, save)
    PARTS[name](part, sizes, device, peers, data_dir)
    return part.found


def keep(path: Path, name: str, found: dict[str, Any], device: Device) -> None:
    """Writes a part into the file, in which the others stay as they are."""
    about = heading(device.name) | {"cuda": None if device.is_cpu else torch.version.cuda}
    kept = json.loads(path.read_text()) if path.exists() else {}
    write(path, (json.dumps(kept | {name: about | found}, indent=2) + "\n").encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without a name")
    parser.add_argument("--minutes", type=float, default=2, help="of a part, after which nothing begins")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that prove the script and measure nothing")
    parser.add_argument("--data-dir", help="folder with MNIST; also $BENCH_DATA")
    parser.add_argument(
        "--wheels", type=Path, help="folder of the libraries' wheels; without it the registry's"
    )
    parser.add_argument(
        "--cache", type=Path, default=CACHE_ROOT / "peers", help="folder of their environment"
    )
    parser.add_argument("--json", type=Path, help="file for all (benchmarks/gpu.json)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"{unknown[0]} is none of {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no accelerator is to be seen; --device cpu --tiny tries the script out")
    chosen = arguments.parts or list(PARTS)
    peers: dict[str, Any] = {}
    absent: dict[str, str] = {}
    if "steps" in chosen and not arguments.tiny:
        errors = entered(arguments.cache, {name: PEERS[name].needs for name in WHEELS}, arguments.wheels)
        absent = {name: reason for name in WHEELS if (reason := why_not(name, errors)) is not None}
        peers = {name: PEERS[name] for name in WHEELS if name not in absent}
    sizes, device = TINY if arguments.tiny else FULL, Device(arguments.device)
    for name in chosen:

        def save(found: dict[str, Any], name: str = name) -> None:
            if arguments.json:
                keep(arguments.json, name, found, device)

        found = measure(name, sizes, device, arguments.minutes, peers, arguments.data_dir, save)
        for what, rows in found.items():
            if isinstance(rows, list) and rows and what != "left_out":
                print(f"\n{what}\n")
                print_table(rows)
        if name == "steps":
            found["left_out"] += [f"steps, {peer}: {reason}" for peer, reason in absent.items()]
        for line in found["left_out"]:
            print(f"left out: {line}")
        save(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
