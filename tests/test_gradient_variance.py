"""The gradient's variance: closed forms of a linear model, metrics and verdicts by hand, the protocol."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bench import likelihoods, priors
from bench.comparison import FinishedRun
from bench.contract import Batch, Problem
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.intervals import Interval
from bench.laws.cases import assert_mean_is
from bench.methods import mfvi, mixture_vi, radial
from bench.settings import build
from bench.studies import gradients
from bench.tasks.gradient_variance import GradientVariance, Settings, geometric, verdict

FAMILIES = {"mfvi": mfvi.MFVI, "radial": radial.Radial}
SIGMA, NOISE = 0.3, 0.5
ROWS, INPUTS = 12, 5


def linear_problem():
    """One output, linear in 5 inputs and a bias, with noise of known size."""
    g = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, INPUTS, generator=g)
    train = TensorDataset(inputs, torch.randn(ROWS, 1, generator=g))
    network = lambda dropout=0.0: nn.Linear(INPUTS, 1)  # noqa: E731
    return Problem(network, likelihoods.Gaussian(NOISE), priors.normal(0, 1), train, None, ROWS)


def untrained(cls, problem, seed=0):
    """A method at its start, all its scales SIGMA."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = cls(problem, cls.settings_class())
    method.set_scale(SIGMA)
    return method


def scattered(method, num_pairs=200, seed=2):
    """Gradients of the weights of the linear layer."""
    batch = Batch(*method.problem.train.tensors)
    return gradients.scatter(method, [batch], "weight", num_pairs, torch.Generator().manual_seed(seed))


def test_a_method_without_a_single_mean_is_refused():
    """A mixture has a mean per component, and its network's weights are not trained."""
    method = mixture_vi.MixtureVI(linear_problem(), mixture_vi.Settings())
    with pytest.raises(UsageError, match=r"^MixtureVI has no single trained mean of weight"):
        scattered(method)


def closed_form(method, family):
    """Variance and squared mean of the gradient of the weights, averaged over its entries.

    The NLL per example is |X w + b - y|^2 / (2 n s^2): its gradient is linear in w and b, which are
    uncorrelated with variances sigma^2 (normal), or sigma^2 over the size of their tensor (radial).
    """
    x, y = (t.double() for t in method.problem.train.tensors)
    to_weight, to_bias = x.T @ x / (ROWS * NOISE**2), x.sum(0) / (ROWS * NOISE**2)
    share = INPUTS if family == "radial" else 1
    variance = SIGMA**2 * (to_weight.square().sum() / share + to_bias.square().sum())
    mean, bias = (p.detach().double() for p in method.network.parameters())
    expected = to_weight @ mean[0] + to_bias * bias - (x.T @ y)[:, 0] / (ROWS * NOISE**2)
    return variance.item() / INPUTS, expected.square().mean().item()


# ---- against closed forms


@pytest.mark.parametrize("family", FAMILIES)
def test_variance_and_mean_are_those_of_a_linear_model(family):
    """Four comparisons at 4.5 standard errors: false alarm 3e-5."""
    method = untrained(FAMILIES[family], linear_problem())
    found = scattered(method)
    variance, square = closed_form(method, family)
    assert_mean_is(torch.from_numpy(found.variances), variance)
    assert_mean_is(torch.from_numpy(found.products), square)
    assert (np.abs(found.cosines) <= 1 + 1e-12).all()


def test_law_catches_pairs_that_share_their_noise():
    """Negative controls: a pair of equal draws has no variance, one of opposite draws twice as much."""

    class Equal(mfvi.MFVI):
        def draw_noise(self, num_samples, generator):
            self.drawn = getattr(self, "drawn", 0) + 1
            if self.drawn % 2:
                self.kept = super().draw_noise(num_samples, generator)
                return self.kept
            return {name: self.sign * e for name, e in self.kept.items()}

    for sign, factor in ((1, 0), (-1, 2)):
        method = untrained(Equal, linear_problem())
        method.sign = sign
        variance, _ = closed_form(method, "mfvi")
        found = torch.from_numpy(scattered(method).variances)
        with pytest.raises(AssertionError):
            assert_mean_is(found, variance)
        assert_mean_is(found, factor * variance)


def test_more_samples_divide_the_variance():
    """Under S samples the variance is that of one over S. False alarm: 7e-6."""

    class Four(mfvi.MFVI):
        def draw_noise(self, num_samples, generator):
            return super().draw_noise(4 * num_samples, generator)

    method = untrained(Four, linear_problem())
    assert_mean_is(torch.from_numpy(scattered(method).variances), closed_form(method, "mfvi")[0] / 4)


def test_batches_in_turn_add_the_variance_between_them():
    """The batches are two halves of the data, whose expected gradients differ: by the law of total variance.

    Entry by entry the pair (g1, g2) of the halves has E|g1 - g2|^2 / 2 = mean variance + |E g1 - E g2|^2 / 2.
    False alarm: 7e-6.
    """
    problem = linear_problem()
    method = untrained(mfvi.MFVI, problem)
    batches = [Batch(*(t[rows] for t in problem.train.tensors)) for rows in (slice(0, 6), slice(6, 12))]
    found = gradients.scatter(method, batches, "weight", 200, torch.Generator().manual_seed(4))
    within, centres = [], []
    mean, bias = (p.detach().double() for p in method.network.parameters())
    for inputs, targets, _ in batches:
        x, y = inputs.double(), targets.double()
        to_weight, to_bias = x.T @ x / (6 * NOISE**2), x.sum(0) / (6 * NOISE**2)
        within.append(SIGMA**2 * (to_weight.square().sum() + to_bias.square().sum()).item() / INPUTS)
        centres.append(to_weight @ mean[0] + to_bias * bias - (x.T @ y)[:, 0] / (6 * NOISE**2))
    between = (centres[0] - centres[1]).square().mean().item() / 2
    assert between > 0.1 * sum(within)
    assert_mean_is(torch.from_numpy(found.variances), sum(within) / 2 + between)


@pytest.mark.parametrize(
    ("family", "expected"), [("mfvi", math.sqrt(600)), ("radial", math.sqrt(2 / math.pi))]
)
def test_distances_are_those_of_the_family(family, expected):
    """E|w - mu| is sigma sqrt(D) up to a 1/4D of it, or sigma sqrt(2/pi) whatever D. False alarm: 1.4e-5."""
    problem = linear_problem()
    inputs = torch.zeros(ROWS, 600)
    train = TensorDataset(inputs, problem.train.tensors[1])
    wide = Problem(
        lambda dropout=0.0: nn.Linear(600, 1), problem.likelihood, problem.prior, train, None, ROWS
    )
    method = untrained(FAMILIES[family], wide)
    found = gradients.distances(method, "weight", 800, torch.Generator().manual_seed(3))
    assert_mean_is(torch.from_numpy(found) / SIGMA, expected, slack=expected / 2000)


# ---- the network


@pytest.mark.parametrize(("pixels", "maps"), [(28, 3), (8, 2)])
def test_network_has_the_layer_of_the_source(pixels, maps):
    """512 to 512 channels, 3x3, on maps of more than one pixel, so that every weight has a gradient."""
    network = gradients.convolutional(pixels, (128, 256, 512, 512), 10)
    name = gradients.last_convolution(network)
    weight = network.get_parameter(name)
    assert weight.shape == (512, 512, 3, 3)
    seen = []
    network.get_submodule(name.removesuffix(".weight")).register_forward_hook(
        lambda layer, args, output: seen.append(output.shape)
    )
    network(torch.randn(2, 1, pixels, pixels)).logsumexp(1).sum().backward()
    assert seen == [(2, 512, maps, maps)]
    assert weight.grad.flatten(2).abs().sum((0, 1)).all()
    # He's normal for a leaky ReLU of slope 0.2; the standard error of a standard deviation is sd / sqrt(2D)
    he = math.sqrt(2 / (1 + 0.2**2) / (512 * 9))
    assert weight.std().item() == pytest.approx(he, rel=5 / math.sqrt(2 * weight.numel()))


# ---- metrics and verdicts by hand


def make(**values):
    """The task on digits with one sigma per power of ten, but for `values`."""
    return GradientVariance(Settings(**{"dataset": "digits", "steps_per_decade": 1, **values}))


def arrays_of(variances, distance=1.0, weights=100, pairs=4):
    """Arrays of a run whose pairs all have the variance of their sigma."""
    scales = make(steps_per_decade=(len(variances) - 1) // 4).scales
    every = np.repeat(np.array(variances, float)[:, None], pairs, 1)
    return {
        "variances": every,
        "products": np.ones_like(every),
        "cosines": np.full_like(every, 0.5),
        "distances": np.repeat(distance * scales[:, None], pairs, 1),
        "weights": np.full(len(scales), weights),
    }


def test_scales_reach_from_a_ten_thousandth_to_one():
    task = make(steps_per_decade=2)
    assert task.scales[0] == pytest.approx(1e-4)
    assert task.scales[task.tenth] == pytest.approx(0.1)
    assert task.scales[-1] == 1
    assert len(task.scales) == 9


def test_metrics_by_hand():
    """Pairs that all rise fourfold leave the interval of the ratio no width."""
    scores = make().score(arrays_of([1, 2, 3, 5, 20], distance=7))
    assert scores["rise"] == pytest.approx(4)
    assert scores["rise_low"] == pytest.approx(4)
    assert scores["rise_high"] == pytest.approx(4)
    assert scores["variance_at_tenth"] == 5
    assert scores["variance_at_one"] == 20
    assert scores["cosine_at_one"] == 0.5
    assert scores["distance"] == pytest.approx(7)


def test_rise_is_a_ratio_of_means_with_an_interval():
    arrays = arrays_of([1, 1, 1, 1, 1])
    arrays["variances"][-1] = [1, 2, 3, 6]
    scores = make().score(arrays)
    assert scores["rise"] == pytest.approx(3)
    assert scores["rise_low"] < 3 < scores["rise_high"]


def test_interval_of_a_geometric_mean_by_hand():
    """Logarithms 0, 1 and 2: mean 1, standard error 1/sqrt(3), Student's quantile 4.3027."""
    found = geometric(np.exp([0.0, 1.0, 2.0]))
    half = 4.302653 / math.sqrt(3)
    assert found.centre == pytest.approx(math.e)
    assert (found.low, found.high) == pytest.approx((math.exp(1 - half), math.exp(1 + half)), rel=1e-5)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (11, 90, "reproduced"),
        (9, 90, "undecided"),
        (2, 9, "contradicted"),
        (math.nan, math.nan, "undecided"),
    ],
)
def test_verdict_by_hand(low, high, expected):
    assert verdict(Interval((low + high) / 2, low, high, "n = 3"), 10, math.inf) == expected


def runs_of(line, variances, distance, seeds=3, **values):
    """Finished runs of a line, whose variances are those given times a factor of the seed."""
    task = make(**values)
    found = []
    for seed in range(seeds):
        arrays = arrays_of(np.array(variances) * (1 + 0.1 * seed), distance)
        metrics = task.score(arrays)
        names = {"task_name": "g", "task_identity": "g", "preset": "standard", "seed": seed}
        names |= {"method_name": line, "method_identity": line}
        found.append(FinishedRun(task, **names, metrics=metrics, read_arrays=arrays.copy))
    return found


def test_comparison_says_what_the_source_claims_of_each_family():
    """Which claim is put to a line follows from its distances, not from its name."""
    far = runs_of("a", [1e-6, 1e-4, 1e-2, 1, 50], 10)
    near = runs_of("b", [1e-8, 1e-6, 1e-4, 1e-2, 0.015], 1)
    rising = runs_of("c", [1e-8, 1e-6, 1e-4, 1e-2, 1], 1)
    found = GradientVariance.compare([*far, *near, *rising])
    said = {s.split(":")[0]: s for s in found.sentences if "sqrt(D)" in s}
    assert said["g, a"].endswith("that it rises at least tenfold is reproduced")
    assert said["g, b"].endswith("that it stays within twofold is reproduced")
    assert said["g, c"].endswith("that it stays within twofold is contradicted")
    assert "rises at least tenfold is undecided" in " ".join(GradientVariance.compare(far[:2]).sentences)
    equal = [s for s in found.sentences if "a over c" in s]
    # At distance 0.032 = sigma 0.032 of c and 0.0032 of a, where both have variances of 1e-3.
    assert "at the distance 0.032 from the mean their variances have the ratio 1 (" in equal[0]
    assert list(found.charts) == ["g-variance"]


def test_comparison_refuses_other_sigmas():
    runs = [*runs_of("a", [1] * 5, 1), *runs_of("b", [1] * 9, 1, steps_per_decade=2)]
    with pytest.raises(
        UsageError, match="g: the runs differ in their sigmas or their layer; draw them apart"
    ):
        GradientVariance.compare(runs)


# ---- the protocol


def ran(cls, **values):
    """Task and arrays of a small run."""
    task = make(channels=8, batch_size=6, pairs=3)
    engine = Engine(
        cls, build(cls.settings_class, values, "method"), 0, trainer=TrainerOptions(accelerator="cpu")
    )
    return task, task.run(engine), engine


@pytest.mark.parametrize("family", FAMILIES)
def test_run_measures_an_untrained_network_at_every_sigma(family):
    """No step is taken; the expected gradient at the least sigma is that at the means."""
    task, arrays, engine = ran(FAMILIES[family])
    assert [fit["steps"] for fit in engine.fits] == [0]
    assert {name: a.shape for name, a in arrays.items()} == {
        **dict.fromkeys(("variances", "products", "cosines", "distances"), (5, 3)),
        "weights": (5,),
    }
    assert (arrays["weights"] == 8 * 8 * 9).all()
    assert (arrays["variances"] > 0).all()
    assert arrays["cosines"][0] == pytest.approx(1, abs=1e-4)
    scores = task.score(arrays)
    assert scores["distance"] == pytest.approx(24 if family == "mfvi" else 1, rel=0.7)


def test_fresh_batches_are_as_many_as_draws():
    task = make(batch_size=6, pairs=3, fresh_batches=True)
    assert len(task.problem().train) == 36
    assert len(make(batch_size=6, pairs=3).problem().train) == 6


def test_method_without_noise_at_its_start_is_refused():
    with pytest.raises(UsageError, match="gradients of all draws are equal"):
        ran(mfvi.MFVI, pretrain_epochs=1)
