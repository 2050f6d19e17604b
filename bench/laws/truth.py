"""The law of truth: who changes the held-out truth of a task changes no more than what is scored by it.

The law puts a small world below a task: it replaces `bench.data.load`, `bench.data.unbalanced` and
`bench.tables.load` by made-up data of their form, and wraps `Task.own_data`. The task then runs three times:
in the world as it is; with other held-out truth (other labels of all test examples, other inputs of some, and
other labels of points that no oracle was asked for); and with other training labels. The first two runs must
agree in the data given to fits, histories, fitted weights, logged numbers and arrays. Only the predictions of
the changed inputs may move.

Data read in another way would stay as they are and move nothing. So the task's own code (not what the engine
does for it) is watched: but for the places above it may open no file and call no loader or generator of
`sklearn.datasets`, `torchvision.datasets`, `bench.data`, `bench.tables` or numpy. The law cannot see numbers
that a task makes by torch's generators, nor a copy of the data in the task's source.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench import bert, cifar, data, tables
from bench.contract import Arrays, Problem, Task
from bench.data import array_digest
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.runs import registry
from bench.studies import active, hmc_predictions, references, topics

SMALLEST = {
    "acquired": 1,
    "acquisition_samples": 2,
    "draws": 2,
    "epochs": 1,
    "hidden": 5,
    "network": "mlp",
    "num_train": 50,
    "repetitions": 1,
    "splits": 1,  # of several, the test rows of one are training rows of another
    "test_samples": 2,
    "trajectories": 2,
}
"""Settings of the law's runs, where a task has them and takes them, on top of its preset smoke."""

WEIGHED_IN_THE_RUN = {"singular_evidence": {"log_ratios"}}
"""Arrays that a run makes of held-out truth itself. singular_evidence: predictive densities at 5,000 fresh
observations under every draw are too many numbers to keep, so the run sums over the draws."""
NOTHING_PREDICTED = ("gradient_variance", "training_dynamics", "trained_product_matrix")
"""Files of tasks that look at training alone: they have no targets, and no held-out data reach them."""

OPEN = ("train", "val", "pool")
"""Parts of `Task.own_data` that a run may use as it likes."""

LOADERS = tuple(
    os.path.join(*parts) + os.sep for parts in (("sklearn", "datasets"), ("torchvision", "datasets"))
)
FITTER = os.path.join("sklearn", "mixture") + os.sep
"""Fits what it is handed, by a RandomState that it seeds; its first call looks for plug-ins on disk."""
SIZE, TEST = 1300, 60
"""Training and test images of the law's world."""
ROWS = 60
"""Rows of its tables."""


def smallest(entry: registry.Entry, given: Mapping[str, Any] | None = None) -> Any:
    """The task's settings of the preset smoke, made smaller; `given` are those it cannot do without."""
    values = {**entry.fixed, **entry.presets.get("smoke", {}), **(given or {})}
    for name in sorted(SMALLEST.keys() & set(entry.flags())):
        try:
            registry.build(entry.cls.settings_class, smaller := values | {name: SMALLEST[name]}, "task")
        except UsageError:
            continue
        values = smaller
    return registry.build(entry.cls.settings_class, values, "task")


class Replaced(ExitStack):
    """Attributes that are others until the block ends."""

    def __call__(self, holder: Any, name: str, value: Any) -> None:
        """Replaces an attribute of a module, a class or an object."""
        own = vars(holder)
        undo = partial(setattr, holder, name, own[name]) if name in own else partial(delattr, holder, name)
        self.callback(undo)
        setattr(holder, name, value)


# ------------------------------------------------------------------------------------------------- changes


def small_cifar(name: str, data_dir: Any = None, train: int = 1000, test: int = 500) -> Arrays:
    """Small data in place of `bench.cifar.load`: classes that differ in brightness."""
    g, classes = np.random.default_rng(4), cifar.SOURCES[name].classes
    found: Arrays = {}
    for part, size in (("train", train), ("test", test)):
        labels = g.permutation(np.arange(size) % classes).astype(np.uint8)
        images = 200 * labels[:, None, None, None] // classes + g.integers(0, 50, (size, 3, 32, 32))
        found |= {f"{part}_inputs": images.astype(np.uint8), f"{part}_labels": labels}
    return found


def small_chains(size: int, seed: int = 5) -> np.ndarray:
    """Probabilities `[size, 10]` in place of `bench.studies.hmc_predictions.load`."""
    return np.random.default_rng(seed).dirichlet(np.ones(10), size).astype(np.float32)


class SmallTopics(topics.Topics):
    """Texts that name their topic and a number, and vectors and layers that no encoder made."""

    width = 8

    def vectors(self, texts: list[str]) -> np.ndarray:
        """Vectors that are near each other where the topic is the same."""
        made = np.stack([self._near(text.split()[0]) + 0.5 * self._near(text) for text in texts])
        return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)

    def states(self, texts: list[str], upper: int, most: int) -> np.ndarray:
        """Two tokens or more, each near the vector of its text."""
        made = np.zeros((len(texts), most, self.width), np.float32)
        for row, (text, vector) in enumerate(zip(texts, self.vectors(texts), strict=True)):
            for token in range(2 + len(text) % (most - 1)):
                made[row, token] = vector + 0.1 * self._near(f"{token} {text}")
        return made

    def upper(self, count: int) -> bert.Layers:
        """Layers of one head whose weights are drawn."""
        draw = torch.Generator().manual_seed(0)
        return bert.Layers([self._layer(draw) for _ in range(count)], 1, 1e-12)

    def _layer(self, draw: torch.Generator) -> dict[str, Tensor]:
        wide = 2 * self.width
        square = "attention.self.query attention.self.key attention.self.value attention.output.dense"
        shapes = dict.fromkeys(square.split(), (self.width, self.width))
        shapes |= {"intermediate.dense": (wide, self.width), "output.dense": (self.width, wide)}
        layer = {}
        for name, shape in shapes.items():
            layer[f"{name}.weight"] = 0.3 * torch.randn(shape, generator=draw)
            layer[f"{name}.bias"] = torch.zeros(shape[0])
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            layer |= {f"{name}.weight": torch.ones(self.width), f"{name}.bias": torch.zeros(self.width)}
        return layer

    @staticmethod
    def _near(text: str) -> np.ndarray:
        return np.random.default_rng(list(text.encode())).normal(size=8)


def small_topics(*_: Any) -> SmallTopics:
    """Small data in place of `bench.studies.topics.load`."""
    names = {source: (*topics.KNOWN, *new) for source, new in topics.NEW.items()}
    texts = {
        source: {topic: [f"{topic} {'very ' * (i % 3)}{source} {i}" for i in range(15)] for topic in of}
        for source, of in names.items()
    }
    return SmallTopics(texts, Path(), "0" * 64)


def shuffled(values: Any) -> Any:
    """Numbers or labels in another order, along the first axis."""
    return values[np.random.default_rng(0).permutation(len(values))]


def some(size: int) -> list[int]:
    """Places, of so many inputs, whose inputs are changed: at irregular distances."""
    return [i for i in range(size) if i % 7 == 1 or i % 11 == 4]


def moved(inputs: Any) -> Any:
    """The inputs, those at `some` places moved and stretched."""
    moved: Any = inputs.clone() if isinstance(inputs, Tensor) else np.array(inputs)
    at = some(len(inputs))
    moved[at] = 2 * moved[at] + 1
    return moved


@dataclass
class World:
    """Data below a task, in one state.

    Attributes:
        labels: Whether held-out labels are others.
        inputs: Whether some held-out inputs are others.
        training: Whether training labels are others.
        others: Training images whose labels are others, since no oracle was asked for them.
        reads: What was read past the declared sources.
        sizes: Held-out part -> its number of inputs.
        held: Training images whose labels oracles held.
        asked: Those of them that oracles were asked for.
    """

    labels: bool = False
    inputs: bool = False
    training: bool = False
    others: frozenset[int] = frozenset()
    reads: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)

    def images(self, source: str, name: str, *_: Any, **__: Any) -> data.Images:
        """Images for `bench.data.load` and `unbalanced`: classes that differ in brightness."""
        g, side = np.random.default_rng(1), data.SOURCES[name].side

        def part(size: int) -> tuple[Tensor, Tensor]:
            labels = g.permutation(np.arange(size) % data.CLASSES)
            images = 0.5 * g.random((size, 1, side, side)) + 0.05 * labels[:, None, None, None]
            return torch.from_numpy(images).float(), torch.from_numpy(labels)

        train, test = part(SIZE), part(TEST)
        labels = shuffled(train[1]) if self.training else train[1].clone()
        for row in self.others:
            labels[row] = (labels[row] + 1) % data.CLASSES
        return data.Images(train[0], labels, *self.held_out(source, *test), digest="0" * 64)

    def cifar(self, name: str, *_: Any) -> Arrays:
        """Small data in place of `bench.cifar.load`: classes that differ in brightness."""
        found = small_cifar(name, train=SIZE, test=TEST)
        if self.training:
            found["train_labels"] = shuffled(found["train_labels"])
        inputs, labels = self.held_out(name, found["test_inputs"].astype(int), found["test_labels"])
        return found | {"test_inputs": inputs.clip(0, 255).astype(np.uint8), "test_labels": labels}

    def held_out(self, part: str, inputs: Any, labels: Any) -> tuple[Any, Any]:
        """The test examples of this world."""
        self.sizes[part] = len(inputs)
        return moved(inputs) if self.inputs else inputs, shuffled(labels) if self.labels else labels

    def table(self, name: str, test: np.ndarray) -> tables.Table:
        """A table for `bench.tables.load`: a noisy sum of columns; `test` are the rows held out."""
        g = np.random.default_rng(2)
        inputs = g.normal(size=(ROWS, tables.SOURCES[name].columns))
        targets = inputs.sum(1) + g.normal(size=ROWS)
        train = np.setdiff1d(np.arange(ROWS), test)
        inputs[test], targets[test] = self.held_out(name, inputs[test], targets[test])
        if self.training:
            targets[train] = shuffled(targets[train])
        return tables.Table(inputs, targets, (), "0" * 64)

    def own_data(self, read: Callable[..., Any], part: str, *more: Any) -> Any:
        """What a task's `own_data` gives, in this world."""
        inputs, targets = read(part, *more)
        if part not in OPEN:
            return self.held_out(part, inputs, targets)
        return inputs, shuffled(targets) if self.training and part != "val" else targets


class Ahead:
    """The rows of a table that a task holds out: those whose numbers come out of its `targets`."""

    def __init__(self, cls: type[Task], settings: Any) -> None:
        self.cls, self.settings = cls, settings
        self.rows: dict[str, np.ndarray] = {}

    def __call__(self, name: str) -> np.ndarray:
        """Their numbers, in the order of the targets."""
        if name not in self.rows:
            numbered = replace(World().table(name, np.arange(0)), targets=np.arange(float(ROWS)))
            with Replaced() as replaced:
                replaced(tables, "load", lambda *_: numbered)
                targets = self.cls(self.settings).targets()
            rows = np.concatenate([np.asarray(a).reshape(-1) for a in targets.values()])
            assert len(rows) == len(np.unique(rows)) < ROWS, "targets() must be rows of the table, each once"
            self.rows[name] = rows.astype(int)
        return self.rows[name]


# -------------------------------------------------------------------------------------------- who reads what


@contextmanager
def watched(world: World, module: Any) -> Iterator[None]:
    """Inside the block `world.reads` gets all data that Python code reads past the declared sources."""
    here, before = inspect.getfile(module), sys.getprofile()

    def note(what: str, frame: Any) -> None:
        while frame is not None and frame.f_code.co_filename != here:
            if FITTER in frame.f_code.co_filename:
                return
            frame = frame.f_back
        where = "" if frame is None else f", line {frame.f_lineno} of {os.path.basename(here)}"
        world.reads.append(f"{what}{where}")

    def watch(frame: Any, event: str, called: Any) -> None:
        if event == "call":
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            # A RandomState of numpy, however it is seeded, first asks Python for a random number.
            own = {data.__file__: ("array_digest", "<genexpr>"), tables.__file__: (), random.__file__: ()}
            is_loader = any(part in file for part in LOADERS) and not name.startswith("<")
            if is_loader or (file in own and name not in own[file]):
                note(f"{name} of {os.path.basename(file)}", frame)
        elif event == "c_call" and (
            called in (io.open, os.open) or isinstance(_owner(called), random.Random)
        ):
            note(f"{called.__name__}()", frame)

    def generator(*arguments: Any, **named: Any) -> Any:
        if sys.getprofile() is watch:
            note("a generator of numpy", sys._getframe(1))
        return make(*arguments, **named)

    make = np.random.default_rng
    with Replaced() as replaced:
        replaced(sys, "dont_write_bytecode", True)  # an import that compiles opens a file
        for holder in (np.random, module):
            for name in [n for n, value in vars(holder).items() if value is make]:
                replaced(holder, name, generator)
        sys.setprofile(watch)
        try:
            yield
        finally:
            sys.setprofile(before)


def import_again(module: Any) -> list[str]:
    """What the module reads when it is imported: data in a constant would escape every change."""
    spec: Any = importlib.util.spec_from_file_location("again", inspect.getfile(module))
    world = World()
    sys.modules["again"] = fresh = importlib.util.module_from_spec(spec)
    try:
        with watched(world, fresh):
            spec.loader.exec_module(fresh)
    finally:
        del sys.modules["again"]
    return world.reads


def _owner(called: Any) -> Any:
    return getattr(called, "__self__", None)


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside the block nothing is noted: the engine is at work, or a declared source."""
    watch = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(watch)


class Teller:
    """An engine, and all that it was given to fit and told about it: `told`, in order."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.told: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.engine, name)
        if name == "fit_stages":
            return partial(self._staged, found)
        if name not in ("fit", "fit_many", "fit_weighted", "predict"):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            if name != "predict":
                self.told += [(f"given to {name}", _digest(a)) for a in (*arguments, *named.values())]
            with unwatched():
                result = found(*arguments, **named)
            if name != "predict":
                self.told += [("fitted weights", _digest(m)) for m in np.atleast_1d(result)]
            return result

        return call

    def _staged(self, fit_stages: Any, stages: list[str], pose: Callable[[int], Problem], budget: Any) -> Any:
        """Fits one after another; the task's own code, which poses their problems, is watched."""
        watch = sys.getprofile()

        def posed(k: int) -> Problem:
            sys.setprofile(watch)
            try:
                problem = pose(k)
            finally:
                sys.setprofile(None)
            self.told.append(("given to fit_stages", _digest(problem)))
            return problem

        fits = fit_stages(stages, posed, budget)
        for _ in stages:
            with unwatched():
                method = next(fits)
            self.told.append(("fitted weights", _digest(method)))
            yield method


def _digest(value: Any) -> str:
    """Of the numbers in a problem, a list of problems, a fitted method or a tensor; else empty."""
    if isinstance(value, list):
        return "".join(_digest(v) for v in value)
    if isinstance(value, Problem):
        return "".join(array_digest(_examples(part)) for part in (value.train, value.val) if part is not None)
    if isinstance(value, Tensor):
        return array_digest({"": value})
    return array_digest(value.state_dict()) if isinstance(value, torch.nn.Module) else ""


def _examples(dataset: Any) -> dict[str, Tensor]:
    if not isinstance(dataset, TensorDataset):
        columns = zip(*(dataset[i] for i in range(len(dataset))), strict=True)
        dataset = TensorDataset(*(torch.stack([torch.as_tensor(v) for v in column]) for column in columns))
    return {str(i): tensor for i, tensor in enumerate(dataset.tensors)}


# ------------------------------------------------------------------------------------------------- the law


@dataclass
class Outcome:
    """What a run left, and the task, still in the run's world for its targets."""

    arrays: Arrays
    targets: Arrays
    told: list[tuple[str, str]]
    score: Callable[[Arrays], Any]


@contextmanager
def placed(task: Task, world: World, held_out: Ahead) -> Iterator[None]:
    """Inside the block the task lies in this world."""

    def source(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with unwatched():
                found = read(*arguments, **named)
                for value in vars(sys.modules[type(task).__module__]).values():
                    getattr(value, "cache_clear", lambda: None)()  # so that nobody finds the true data there
                return found

        return call

    def hold(oracle: Any, labels: Tensor) -> None:
        every = task_images[-1].train_labels
        first = next(i for i in range(len(every)) if torch.equal(every[i : i + len(labels)], labels))
        oracle._labels, oracle.asked = labels, []
        world.held.update(range(first, first + len(labels)))
        oracle.first = first

    def ask(oracle: Any, index: int) -> int:
        world.asked.add(oracle.first + index)
        return int(oracle._labels[index])

    task_images: list[data.Images] = []

    def images(name: str, *arguments: Any, **named: Any) -> data.Images:
        task_images.append(world.images(name, *arguments, **named))
        return task_images[-1]

    own = task.own_data
    with Replaced() as replaced:
        replaced(data, "load", source(partial(images, "load")))
        replaced(data, "unbalanced", source(partial(images, "unbalanced")))
        # What a task reads in its own_data is changed there, once.
        is_own = type(task).own_data is not Task.own_data
        replaced(cifar, "load", small_cifar if is_own else source(world.cifar))
        replaced(topics, "load", small_topics)  # read in own_data alone
        replaced(tables, "load", source(lambda name, *_: world.table(name, held_out(name))))
        replaced(task, "own_data", source(lambda *a: world.own_data(own, *a)))
        replaced(references, "read", lambda *_: {})  # of a reference no run knows, nor this law
        replaced(hmc_predictions, "load", lambda *_: small_chains(TEST, seed=5 + world.labels))
        replaced(active.Oracle, "__init__", hold)
        replaced(active.Oracle, "label", ask)
        yield


def run(cls: type[Task], settings: Any, world: World, held_out: Ahead) -> Outcome:
    """One run of the task in a world, by the plainest method that the task takes; the targets are locked."""
    task: Task = cls(settings)
    able = (registry.method(name) for name in ("map", "mfvi", *registry.methods()))
    method = next(m for m in able if task.spec.requires <= m.provides)
    if task.spec.closed_form:
        method = registry.method(registry.NONE)
    own = registry.build(method.cls.settings_class, dict(method.fixed), "method")
    engine = Teller(Engine(method.cls, own, 0, trainer=TrainerOptions(accelerator="cpu")))
    with placed(task, world, held_out):
        with watched(world, sys.modules[cls.__module__]), Replaced() as replaced:
            replaced(task, "targets", lambda: world.reads.append("targets()"))
            arrays = task.run(engine)
        arrays, targets = arrays | task.given(), task.targets()
    engine.told += [
        (f"logged {name}", repr((stage, step, value))) for name, stage, step, value in engine.logged
    ]
    engine.told += [(f"history of {stage}", repr(rows)) for stage, rows in engine.histories]
    return Outcome(arrays, targets, engine.told, task.score)


def the_held_out_truth_moves_nothing_else(cls: type[Task], settings: Any, in_the_run: set[str]) -> None:
    """See above. Raises AssertionError, which says what moved, or what did not.

    Args:
        cls: The task.
        settings: Its settings.
        in_the_run: Arrays that may move with the held-out truth.
    """
    held_out = Ahead(cls, settings)
    world = World()
    base = run(cls, settings, world, held_out)
    elsewhere = World(labels=True, inputs=True, others=frozenset(world.held - world.asked))
    other = run(cls, settings, elsewhere, held_out)
    taught = run(cls, settings, World(training=True), held_out)
    reads = [*world.reads, *elsewhere.reads, *import_again(sys.modules[cls.__module__])]
    assert not reads, f"read past Task.own_data, bench.data and bench.tables: {'; '.join(reads)}"

    # The change arrived.
    free = base.targets.keys() | in_the_run
    assert free, "a task without held-out truth"
    assert elsewhere.sizes, "no held-out data came through Task.own_data, bench.data or bench.tables"
    for name in base.targets:
        assert differ(base.targets[name], other.targets[name]), f"targets() has the old {name}"
    truth = other.targets | {name: other.arrays[name] for name in in_the_run}
    with Replaced() as replaced:
        replaced(hmc_predictions, "load", lambda *_: small_chains(TEST))
        before, after = (base.score(base.arrays | base.targets | t) for t in ({}, truth))
    assert before != after, "other held-out labels change no score"
    predicted = base.arrays.keys() - free
    assert any(differ(base.arrays[n], taught.arrays[n]) for n in predicted), "training labels change no array"

    # Nothing else moved.
    assert len(base.told) == len(other.told)
    for (what, before_it), (_, after_it) in zip(base.told, other.told, strict=True):
        assert before_it == after_it, f"held-out truth reaches what is {what}"
    reached = bool(free - base.targets.keys())
    for name in predicted:
        one, two = base.arrays[name], other.arrays[name]
        reached |= differ(one, two)
        assert one.shape == two.shape, f"held-out truth changes the shape of {name}"
        assert not differ(one, two) or any(
            explained(set(np.flatnonzero(at).tolist()), tuple(elsewhere.sizes.values()), len(at))
            for at in along_axes(one != two)
        ), f"held-out truth moves {name}, and not only where inputs were changed"
    reached |= any(
        differ(np.sort(base.targets[n], axis=None), np.sort(other.targets[n], axis=None))
        for n in base.targets
    )
    assert reached, "other held-out inputs change no prediction"


def held_out_data_move_nothing(cls: type[Task], settings: Any) -> None:
    """Held-out data change nothing of a task without predictions, training labels something."""
    held_out = Ahead(cls, settings)
    world, elsewhere = World(), World(labels=True, inputs=True)
    base, other = (run(cls, settings, each, held_out) for each in (world, elsewhere))
    taught = run(cls, settings, World(training=True), held_out)
    reads = [*world.reads, *elsewhere.reads, *import_again(sys.modules[cls.__module__])]
    assert not reads, f"read past Task.own_data, bench.data and bench.tables: {'; '.join(reads)}"
    assert not base.targets, "a task with held-out truth"
    for name, array in base.arrays.items():
        assert not differ(array, other.arrays[name]), f"held-out data move {name}"
    assert base.told == other.told, "held-out data reach what is told"
    assert any(differ(base.arrays[n], taught.arrays[n]) for n in base.arrays), (
        "training labels change no array"
    )


def nothing_moves_anything(cls: type[Task], settings: Any) -> None:
    """A study in closed form reads no data, fits nothing, and no data change a number of it."""
    worlds = World(), World(labels=True, inputs=True, training=True)
    held_out = Ahead(cls, settings)
    base, other = (run(cls, settings, each, held_out) for each in worlds)
    reads = [*worlds[0].reads, *worlds[1].reads, *import_again(sys.modules[cls.__module__])]
    assert not reads, f"a study in closed form reads: {'; '.join(reads)}"
    assert not base.targets, "a study in closed form with held-out truth"
    assert not base.told, "a study in closed form fits or logs"
    for name, array in base.arrays.items():
        assert not differ(array, other.arrays[name]), f"data move {name}"


def differ(one: np.ndarray, two: np.ndarray) -> bool:
    """Whether two arrays differ anywhere."""
    return not np.array_equal(one, two)


def along_axes(moved: np.ndarray) -> Iterator[np.ndarray]:
    """Where an array moved: along each axis, and along two as one (inputs of many worlds)."""
    for axis, length in enumerate(moved.shape):
        yield np.asarray(np.moveaxis(moved, axis, 0).reshape(length, -1).any(1))
    for first, second in combinations(range(moved.ndim), 2):
        pair = np.moveaxis(moved, (first, second), (0, 1))
        yield np.asarray(pair.reshape(pair.shape[0] * pair.shape[1], -1).any(1))


def explained(places: set[int], sizes: tuple[int, ...], length: int) -> bool:
    """Whether the places along an axis are those of changed inputs: `some` of a run of inputs, or of several.

    Args:
        places: Where two arrays differ.
        sizes: Numbers of inputs in the parts that were changed.
        length: Of the axis.
    """
    if not places:
        return True
    for k, size in enumerate(sizes):
        for at in some(size):
            first = min(places) - at
            if 0 <= first <= length - size and explained(
                places - {first + i for i in some(size)}, sizes[:k] + sizes[k + 1 :], length
            ):
                return True
    return False


def held_out_truth_is_only_scored(entry: registry.Entry, given: Mapping[str, Any] | None = None) -> None:
    """The law that fits the task: of one with predictions, of one without, or of a study in closed form.

    Args:
        entry: The task.
        given: Settings that it cannot do without.

    Raises:
        AssertionError: If the law does not hold; says what moved, or what did not.
    """
    settings = smallest(entry, given)
    if entry.cls(settings).spec.closed_form:
        nothing_moves_anything(entry.cls, settings)
    elif entry.file in NOTHING_PREDICTED:
        held_out_data_move_nothing(entry.cls, settings)
    else:
        weighed = WEIGHED_IN_THE_RUN.get(entry.file, set())
        the_held_out_truth_moves_nothing_else(entry.cls, settings, weighed)
