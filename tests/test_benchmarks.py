"""The benchmarks' own rules, at sizes that measure nothing: no peer, no network, no accelerator is needed."""

import importlib
import importlib.metadata
import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

from bench import cli, networks, priors
from bench.contract import Budget
from bench.engine.engine import Engine
from bench.errors import BenchError
from bench.runs import registry
from bench.runs.plan import Plan
from bench.settings import build
from bench.studies import pictures
from bench.tasks import shift
from bench.tasks.uci_regression import Settings, UCIRegression

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    """The modules of the folder, which import each other by their plain names."""
    sys.path.insert(0, str(BENCHMARKS))
    names = (
        "contenders",
        "memory",
        "peers",
        "gpu",
        "forecast",
        "trajectory",
        "passes",
        "anchors",
        "bare_loop",
        "accelerated",
    )
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def case(scripts):
    """A convolutional network that takes microseconds, with goals."""
    network = partial(nn.Sequential, nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 1))
    return scripts.peers.Case(
        "tiny", network, (2, 4, 4), 3, (1, 2), {1: 1e9, 2: 1e-9}, 1, floor=1e9, prediction=1e9, points=5
    )


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_every_script_finds_what_it_imports(scripts, path):
    importlib.import_module(path.stem)


# ---- peers


def test_every_contender_is_measured_and_goals_are_held_against_bounds(scripts, case):
    class Quick(scripts.contenders.Floor):
        has_bound = False

        def step(self):
            """Nothing, faster than anybody."""

    peers = {"stand-in": scripts.contenders.Floor, "quick": Quick}
    found = scripts.peers.measure([case], peers, rounds=1)
    everybody = ["stand-in", "quick", "floor", "floor", "mfvi", "radial", "ivon"]
    for samples in case.samples:
        names = [row["contender"] for row in found["steps"] if row["samples"] == samples]
        assert [name.partition(",")[0] for name in names] == everybody
    names = [row["contender"].partition(",")[0] for row in found["predictions"]]
    assert names == ["stand-in", "quick", "mfvi", "radial", "ivon", "the products alone"]
    assert {row["contender"] for row in found["memory"]} == set(everybody)
    assert all(row["MiB"] > 0 for row in found["memory"])
    own = [r for r in found["goals"] if r["method"] == "ivon"]
    assert [r["verdict"] for r in own] == ["not measured", "no goal"]  # its authors' package is not here
    (floor,) = (r for r in found["goals"] if r["method"] == "the products alone")
    assert floor["ratio"] > 0
    assert floor["verdict"] == "no goal"
    found["goals"] = [r for r in found["goals"] if r["method"] in ("mfvi", "radial")]
    verdicts = {(r["what"].partition(",")[0], r["goal"]): r["verdict"] for r in found["goals"]}
    assert verdicts == {("step", 1e9): "hit", ("step", 1e-9): "missed", ("prediction", 1e9): "hit"}
    against = {r["against"].partition(",")[0] for r in found["goals"] if r["what"].startswith("step")}
    assert against == {"stand-in", "floor"}


def test_the_products_alone_are_those_of_every_sample_in_every_layer(scripts, case, monkeypatch):
    """Of two layers and three samples: three convolutions, and three matrix products in either order."""
    shapes = {"conv2d": [], "mm": []}
    convolve, multiply = scripts.contenders.conv2d, torch.mm

    def convolved(*given):
        shapes["conv2d"].append(tuple((made := convolve(*given)).shape))
        return made

    def multiplied(*given):
        shapes["mm"].append(tuple((made := multiply(*given)).shape))
        return made

    monkeypatch.setattr(scripts.contenders, "conv2d", convolved)
    monkeypatch.setattr(torch, "mm", multiplied)
    ways = scripts.contenders.products(case.work(1), torch.randn(5, 2, 4, 4), 3)
    for way, product in (("", (5, 1)), (", examples last", (1, 5))):
        for made in shapes.values():
            made.clear()
        ways[way]()
        assert shapes == {"conv2d": [(5, 2, 2, 2)] * 3, "mm": [product] * 3}


def test_a_goal_is_held_against_the_fastest_way_of_the_fastest_peer(scripts):
    measured = {"mfvi": [2.0, 2.0, 2.2], "slow": [9.0, 9.0, 9.0], "fast": [4.0, 2.0, 4.0]}
    found = scripts.peers.against(measured, "mfvi", ["slow", "fast"])
    assert found == ("fast", 0.55, 0.5, 1.0)  # of 0.5, 1 and 0.55
    assert scripts.peers.goal("x", "mfvi", 0.5, found)["verdict"] == "missed"
    assert scripts.peers.goal("x", "mfvi", 0.55, found)["verdict"] == "hit"
    assert scripts.peers.goal("x", "mfvi", 0.5, scripts.peers.against(measured, "mfvi", []))["verdict"] == (
        "not measured"
    )


def test_quartiles_leave_a_quarter_of_the_rounds_below_and_above(scripts):
    measured = {"mfvi": [5.0, 1.0, 9.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0], "other": 9 * [1.0]}
    assert scripts.peers.quartiles(measured, "mfvi", "other") == (3, 7)


def test_of_several_ways_the_fastest_is_taken(scripts):
    def work(size):
        return lambda: sum(range(size))

    chosen = scripts.peers.fastest({"a": {"": work(300_000), ", other": work(10)}, "b": {"": work(1)}})
    assert list(chosen) == ["a, other", "b"]
    assert all(lasts >= 0 for _, lasts in chosen.values())


def test_replaced_layers_keep_the_shape_of_the_network(scripts):
    def convolution(*shape, stride, padding):
        return nn.Conv2d(*shape, stride=stride, padding=padding)

    network = networks.small_vgg(2)
    same = nn.Sequential(*scripts.contenders.layered(network, nn.Linear, convolution))
    images = torch.zeros(1, 3, 32, 32)
    for before, after in zip(network, same, strict=True):
        assert before(images).shape == after(images).shape
        images = before(images)


def test_a_peer_that_cannot_be_used_is_named_with_the_reason(scripts, monkeypatch):
    monkeypatch.setitem(sys.modules, "ivon", None)
    assert scripts.contenders.why_not("ivon-opt", {}).startswith("ModuleNotFoundError: import of ivon")
    assert scripts.contenders.why_not("ivon-opt", {"ivon-opt": "no such release"}) == "no such release"


def test_the_environment_sees_this_one_and_names_what_was_not_installed(scripts, tmp_path, monkeypatch):
    commands = []

    def install(command, **options):
        commands.append(command)
        fails = "bad" in command
        return subprocess.CompletedProcess(command, int(fails), "", "x\nERROR: no such release\n")

    with monkeypatch.context() as patched:
        patched.setattr(scripts.peers.subprocess, "run", install)
        packages = {"good": ("needed",), "bad": ()}
        python, errors = scripts.peers.environment(tmp_path / "env", packages)
        assert scripts.peers.environment(tmp_path / "env", packages) == (python, errors)  # a second time
        scripts.peers.environment(tmp_path / "env", {"good": ()}, tmp_path / "wheels")
    assert errors == {"bad": "ERROR: no such release"}
    assert commands[0][-2:] == ["good", "needed"]
    assert "--no-index" not in commands[0]
    assert commands[-1][-4:] == ["--no-index", "--find-links", str(tmp_path / "wheels"), "good"]
    assert f"torch=={importlib.metadata.version('torch')}\n" in (tmp_path / "env" / "held.txt").read_text()
    look = "import importlib.util as u, sys; print(sys.prefix, all(map(u.find_spec, ('torch', 'bench.cli'))))"
    done = subprocess.run([str(python), "-c", look], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == [str(tmp_path / "env"), "True"], done.stderr


def test_memory_at_the_peak_counts_what_lives_at_a_time(scripts):
    size = 2**20

    def both():
        return torch.ones(size), torch.ones(size)

    def in_turn():
        torch.ones(size)
        torch.ones(size)

    assert scripts.memory.peak(both) == pytest.approx(8 * size, rel=0.01)
    assert scripts.memory.peak(in_turn) == pytest.approx(4 * size, rel=0.01)


# ---- accelerators


@pytest.mark.slow
def test_all_that_an_accelerator_would_be_asked_runs_on_a_processor(scripts, tmp_path):
    """Every part, in its smallest form; another part of the file stays as it was."""
    gpu, device, path = scripts.gpu, scripts.gpu.Device("cpu"), tmp_path / "gpu.json"

    class Broken(scripts.contenders.Floor):
        def step(self):
            raise RuntimeError("no such kernel")

    peers = {"stand-in": scripts.contenders.Floor, "broken": Broken}
    for name in gpu.PARTS:
        saved = []

        def save(found, name=name, saved=saved):
            gpu.keep(path, name, found, device)
            saved.append(json.loads(path.read_text())[name])

        gpu.measure(name, gpu.TINY, device, 5, peers, None, save)
        assert len(saved) > 1, "what is measured is kept before all of it is"
    found = json.loads(path.read_text())
    assert list(found) == list(gpu.PARTS)
    assert all(part["date"] and part["device"] and part["cuda"] is None for part in found.values())
    (net,) = gpu.TINY.steps
    assert found["steps"]["left_out"] == [
        f"steps, {net.name}, S {samples}, {line}"
        for samples in net.samples
        for line in (
            "mfvi, one graph: BenchError, only CUDA has graphs",
            "broken: RuntimeError, no such kernel",
        )
    ]
    ours = {"plain", "mfvi", "radial", "ivon", "mfvi, tensor by tensor", "stand-in"}
    rows = {(row["samples"], row["contender"]) for row in found["steps"]["steps"]}
    assert rows == {(samples, name) for samples in net.samples for name in ours}
    (net,) = gpu.TINY.networks
    rows = {(row["precision"], row["method"]) for row in found["networks"]["networks"]}
    assert rows == {(p, name) for p in ("32-true", "bf16-mixed") for name in net.methods}
    assert {row["walk"] for row in found["draws"]["walks"]} == {"loop", "vmap", "stacked"}
    whole, beginning = found["runs"]["runs"]
    assert whole["stages"] == whole["of"]
    assert beginning["stages"] == 3  # two points acquired, and one test
    for row in (whole, beginning):
        told = row["seconds"] / row["stages"] * row["of"] / 3600
        assert row["hours_of_the_whole"] == pytest.approx(told)


class _SoonOver:
    """A deadline that has passed when it is asked for the second time, which is within a fit."""

    asked = 0

    def __lt__(self, now):
        self.asked += 1
        return self.asked > 1


def test_a_deadline_within_a_fit_ends_the_trajectory_and_ctrl_c_ends_the_script(scripts, monkeypatch):
    gpu, device = scripts.gpu, scripts.gpu.Device("cpu")
    with pytest.raises(BenchError, match="not one stage ended in time"):
        gpu.trajectory(gpu.TINY.runs[1], device, None, _SoonOver())

    def interrupted(*plan):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.trajectory(gpu.TINY.runs[1], device, None, _SoonOver())


def test_what_there_is_no_time_for_is_named(scripts):
    gpu = scripts.gpu
    for name in gpu.PARTS:
        found = gpu.measure(name, gpu.FULL, gpu.Device("cpu"), 0, {})
        assert found.keys() == {"seconds", "left_out"}
        assert found["left_out"]
        assert all(line.endswith(": no time left") for line in found["left_out"])


# ---- forecasts


@pytest.mark.parametrize(
    ("told", "measured", "may_stop", "hit"),
    [
        (15, 10, False, True),
        (10, 15, False, True),
        (15.1, 10, False, False),
        (10, 15.1, False, False),
        (90, 10, True, True),
        (10, 15.1, True, False),
    ],
)
def test_a_forecast_is_held_to_a_factor_both_ways(scripts, told, measured, may_stop, hit):
    assert scripts.forecast.is_hit(told, measured, may_stop) is hit


def test_a_forecast_is_compared_with_the_run(scripts, monkeypatch, capsys):
    def in_this_process(arguments):
        assert cli.main(["run", *arguments]) == 0
        return capsys.readouterr().out, 2**30

    monkeypatch.setattr(scripts.forecast, "call", in_this_process)
    row = scripts.forecast.compare("tiny", "map toy_regression --preset smoke")
    assert row["steps"] == row["steps_told"] > 0
    assert row["mib"] == 1024
    assert row["seconds_ratio"] == row["seconds_told"] / row["seconds"]
    assert row["verdict"] in ("hit", "missed")


def test_a_run_that_fails_ends_the_comparison_with_what_it_says(scripts):
    with pytest.raises(SystemExit, match="exit code"):
        scripts.forecast.call(["nosuch", "toy_regression"])


# ---- trajectory


def test_the_least_of_a_part_is_its_operations_at_the_speed_of_a_product(scripts):
    """A product of matrices `[2, 3]` and `[3, 4]` has 2 x 24 operations; adding tensors counts as none."""
    first, second = torch.ones(2, 3), torch.ones(3, 4)
    assert scripts.trajectory.operations(lambda: first @ second) == 48
    assert scripts.trajectory.operations(lambda: first + first) == 0
    square = torch.ones(400, 400)

    def slow():
        time.sleep(0.02)
        return square @ square

    found = scripts.trajectory.measure({"a": (slow, 6000)}, rounds=1)
    part, whole = found["parts"]
    assert part["calls"] == 6000
    assert whole["minutes"] == part["minutes"] >= 2.0  # 6000 x 20 ms, and the products
    assert part["ms"] > part["ms at the speed of a product"] > 0


# ---- passes


@pytest.mark.parametrize(
    ("method", "settings", "gradients", "forward"),
    [
        ("deep_ensemble", {}, 3, 3),  # members, each a network of its own
        ("mc_dropout", {}, 1, 8),  # one mask a step; the task predicts by 8 samples
        ("mfvi", {"train_samples": 4}, 4, 8),
    ],
)
def test_passes_are_those_that_a_method_makes_by_construction(scripts, method, settings, gradients, forward):
    plan = Plan(method=method, task="shift_digits", method_settings=settings)
    (row,) = scripts.passes.rows([plan])
    assert row["gradients"] == pytest.approx(gradients)
    assert row["forward"] == pytest.approx(forward)


def test_work_that_is_no_pass_counts_by_its_size(scripts):
    """The ten particles of `svgd` have ten gradients; the products of its kernel come on top."""
    (row,) = scripts.passes.rows([Plan(method="svgd", task="shift_digits")])
    assert 10 < row["gradients"] < 10.5


# ---- anchors


class MeanOfWhatItSaw:
    """Predicts the mean of the targets of its rows, and their spread."""

    def fit(self, inputs, targets):
        """Keeps both."""
        assert len(inputs) == len(targets) == 359  # of 442, 398 less a tenth
        self.mean, self.spread = targets.mean(), targets.std()
        return self

    def predict(self, inputs, return_std):
        """The same for all."""
        return np.full(len(inputs), self.mean), np.full(len(inputs), self.spread)


def test_an_anchor_sees_the_rows_of_a_network_and_is_scored_by_the_task(scripts):
    """Standardised targets have mean 0 and spread 1: its log likelihood is that of their normal, by hand."""
    task = UCIRegression(Settings(dataset="diabetes", splits=2))
    found = scripts.anchors.scores(task, lambda inputs: MeanOfWhatItSaw())
    for k, told in enumerate(found["splits"]):
        part, targets = task.standardised(k), task.targets()["targets"][k]
        z = (targets - part.centre) / part.scale
        by_hand = (-(z**2) / 2).mean() - 0.5 * np.log(2 * np.pi) - np.log(part.scale)
        assert told == pytest.approx(by_hand, abs=1e-3)


def test_committed_anchors_are_what_the_script_finds(scripts):
    """On the first two splits; and they are better than the mean alone, which is the control."""
    task = UCIRegression(Settings(dataset="diabetes", splits=2))
    (committed,) = json.loads((BENCHMARKS / "anchors.json").read_text())["tasks"].values()
    found = scripts.anchors.scores(task, scripts.anchors.ANCHORS["Bayesian linear regression"])
    assert found["splits"] == pytest.approx(committed["Bayesian linear regression"]["splits"][:2], abs=1e-4)
    alone = scripts.anchors.scores(task, lambda inputs: MeanOfWhatItSaw())
    assert min(np.mean(of["splits"][:2]) for of in committed.values()) > np.mean(alone["splits"]) + 0.2


# ---- the bare loop


def test_the_bare_loop_scores_as_the_task_does(scripts):
    """A network that says the same of every image: its scores are those of its class, by counting."""
    task = shift.Shift(shift.Settings(dataset="digits", num_train=64, epochs=1, test_images=20))
    constant = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.zeros_(constant[1].weight)
    with torch.no_grad():
        constant[1].bias.copy_(torch.arange(10.0))
    found = scripts.bare_loop.scores(task, constant)
    labels = task.targets()["labels"].astype(int)
    by_hand = np.mean(np.log(np.exp(np.arange(10.0)).sum()) - labels)
    assert found["nll"] == pytest.approx(by_hand) == found["nll_clean"]
    assert found["accuracy"] == pytest.approx(np.mean(labels == 9)) == found["accuracy_clean"]


@torch.no_grad()
def distance(first, second):
    """Euclidean, of all weights of two networks."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return float(sum((p - q).square().sum() for p, q in pairs).sqrt())


@pytest.fixture
def in_float64(monkeypatch):
    """Networks and images of 64-bit numbers."""
    before = torch.get_default_dtype()
    monkeypatch.setattr(
        pictures, "normalised", lambda levels, mean, std: (levels.double() / 255 - mean) / std
    )
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def digits_briefly(network):
    """Three epochs of 300 images."""
    small = {"num_train": 300, "channels": 4, "epochs": 3, "test_images": 1}
    return shift.Shift(shift.Settings(dataset="digits", network=network, **small))


def fitted_by_map(task, problem, **changed):
    """The network of a fit of `map` through the engine."""
    own, cls = task.settings, registry.method("map").cls
    engine = Engine(cls, build(cls.settings_class, changed, "method"), 0)
    engine.stage("fit")
    return engine.fit(problem, Budget(own.epochs, own.batch_size, draws=own.num_train)).network


def test_a_bare_loop_is_kept_beside_those_of_other_rates(scripts, tmp_path):
    """Loops of two rates are two, so that neither stands beside a `map` of the other's."""
    run = {"seed": 0, "device": "one", "rate": 0.001, "nll": 1.0}
    for more in ({}, {"rate": 0.005}, {"device": "two"}, {"nll": 2.0}):
        scripts.bare_loop.keep(tmp_path / "kept.json", "shift_digits", "fused", run | more)
    kept = json.loads((tmp_path / "kept.json").read_text())["tasks"]["shift_digits"]["fused"]
    assert kept == [run | {"rate": 0.005}, run | {"device": "two"}, run | {"nll": 2.0}]


@pytest.mark.parametrize("network", ["small_cnn", "resnet20"])
def test_map_is_the_bare_loop_to_the_last_digit(scripts, in_float64, network):
    """Same weights before the fit, same batches: what is left is the order of sums.

    Controls are what an engine may do wrong: a prior left out or counted twice, a larger step, other batches.
    """
    task = digits_briefly(network)
    problem = task.problem()
    loop, (start, _) = scripts.bare_loop.fit(task, "map", 0), scripts.bare_loop.drawn_by_map(task, 0)
    way = distance(start, loop)
    assert distance(fitted_by_map(task, problem), loop) < 1e-12 * way
    cheats = [
        fitted_by_map(task, replace(problem, prior=priors.normal(0, 1e6))),
        fitted_by_map(task, replace(problem, num_train=problem.num_train // 2)),
        fitted_by_map(task, problem, learning_rate=1.001e-3),
        fitted_by_map(
            task, replace(problem, train=TensorDataset(*(t.flip(0) for t in problem.train.tensors)))
        ),
    ]
    assert min(distance(cheat, loop) for cheat in cheats) > 1e-4 * way


@pytest.mark.parametrize("network", ["small_cnn", "resnet20"])
def test_map_is_the_bare_loop_to_the_last_bit(scripts, network):
    """In 32-bit numbers, with Adam as one kernel; the control is Adam of many, which rounds otherwise."""
    task = digits_briefly(network)
    ours = fitted_by_map(task, task.problem())
    assert distance(ours, scripts.bare_loop.fit(task, "fused", 0)) == 0
    assert distance(ours, scripts.bare_loop.fit(task, "map", 0)) > 0


@pytest.mark.parametrize(("network", "least", "most"), [("small_cnn", 1e-7, 1e-5), ("resnet20", 1e-3, 1)])
def test_rounding_grows_in_a_residual_network(scripts, in_float64, network, least, most):
    """Initial weights larger by 10^-7: how far twenty steps of 64-bit numbers then end from the others'.

    So rounding may part two fits of one seed on two processors.
    """
    settings = {"num_train": 1280, "epochs": 2, "test_images": 1}
    task = shift.Shift(shift.Settings(dataset="digits", network=network, **settings))
    plain, moved = (scripts.bare_loop.fit(task, draws, 0) for draws in ("map", "nudged"))
    way = distance(scripts.bare_loop.drawn_by_map(task, 0)[0], plain)
    assert least * way < distance(plain, moved) < most * way


def test_the_bare_loop_learns(scripts):
    """Sixty-four digits, over and over; the control has one step."""
    losses = []
    for epochs in (1, 30):
        task = shift.Shift(shift.Settings(dataset="digits", num_train=64, epochs=epochs, test_images=1))
        inputs, labels = task.examples("train").tensors
        losses.append(
            float(scripts.bare_loop.loss_and_hits(scripts.bare_loop.fit(task, "torch", 0), inputs, labels)[0])
        )
    assert losses[1] < losses[0] / 2


# ---- runs on an accelerator (docs/scale.md)


def test_runs_on_an_accelerator_are_draws_of_the_law_of_a_processor(scripts):
    """How many of 19 runs lie outside the 95% of Student's t with four degrees of freedom, by either metric.

    False alarm: 4% at most, since each does so by chance in 10% of all choices of seeds at most. The control
    takes each run for one of the next method.
    """
    kept = json.loads((BENCHMARKS / "accelerated.json").read_text())
    found, known, names = kept["runs"], kept["processor"], list(kept["runs"])

    def outside(shift):
        distances = np.array(
            [
                [
                    scripts.accelerated.distance(value, [metrics[name] for metrics in known[other]])
                    for name, value in found[method].items()
                ]
                for method, other in zip(names, names[shift:] + names[:shift], strict=True)
            ]
        )
        return (abs(distances).max(1) > stats.t.ppf(0.975, df=4)).sum()

    assert len(names) == 19
    assert outside(0) <= 4 < 10 < outside(1)
    for method in ("map", "deep_ensemble"):  # no noise in training, and the same seed
        for name, value in found[method].items():
            assert value == pytest.approx(known[method][0][name], abs=0.004)


def test_distance_of_one_more_draw_has_students_distribution(scripts):
    """By the probability integral transform over 4,000 samples. False alarm: 0.1%."""
    drawn = np.random.default_rng(0).normal(3, 2, (4000, 6))
    distances = [scripts.accelerated.distance(row[0], list(row[1:])) for row in drawn]
    assert stats.kstest(stats.t.cdf(distances, df=4), "uniform").pvalue > 0.001
    assert stats.kstest(stats.norm.cdf(distances), "uniform").pvalue < 0.001


def test_the_page_on_own_data_has_the_committed_comparison():
    """Every row of it, as the page rounds, and no other; five splits of four tables."""
    found = json.loads((BENCHMARKS / "own_tables.json").read_text())["compare"]
    page = (BENCHMARKS.parent / "docs" / "own-data.md").read_text(encoding="utf-8")
    head = "| table | method | NLL, nats | minus gradient boosting |"
    shown = page.partition(head)[2].partition("\n\n")[0].splitlines()[2:]

    def line(row):
        change = "{difference:.2f} ({low:.2f} to {high:.2f})".format(**row)
        error = f"{row['rmse']:.2f}" if "rmse" in row else f"{row['accuracy']:.3f}"
        change = "" if row["method"] == "gradient boosting" else change
        by_width = row.get("by width", "")
        return f"| `{row['table']}` | {row['method']} | {row['nll']:.3f} | {change} | {error} | {by_width} |"

    assert shown == [line(row) for row in found]
    assert {row["table"] for row in found} == {"diabetes", "breast_cancer", "energy", "yacht"}
    assert len(found) == 3 * 8 + 6
