"""How noisy the gradient is: its variance in a layer of 512 channels against the scale of the posterior.

Question: does the variance of the likelihood's gradient explode as the posterior widens?

Protocol: nothing is trained. A network of four 3x3 convolutions starts at He's means; the scale sigma of all
weights, biases too, is set to 1e-4 .. 1 in turn. At each sigma pairs of draws of the method's noise, the same
at every sigma, give gradients of the negative log likelihood of one fixed batch, in nats per example, with
respect to the means of the last convolution, 512 to 512 channels. The variance of an entry between draws is
averaged over the D = 2,359,296 entries. Beside it stand the angle between the gradients of two draws, and
how far draws lie from the mean and from each other.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), sections 4.1, 4.2 and 4.4
(Fig. 4.6a). Deviations: the source names neither network, data, batch nor the range of sigma; its figure is
of a 3x3 convolution with 512 channels. Ours is the fourth of four convolutions, on grey images of 28 pixels.

What would mislead: sigma is not the same thing in two families. Of independent normals it is the standard
deviation of a weight, of the radial family sqrt(D) times it, so that equal sigma compares distances from the
mean that differ by sqrt(D) = 1536. Every variance vanishes with sigma; whether it explodes is a question of
how noise compares with signal, which the angle tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from torch.utils.data import TensorDataset

from bench import data, figures, intervals, likelihoods, priors
from bench.comparison import by_task, pairs
from bench.contract import (
    Arrays,
    Batch,
    Budget,
    Comparison,
    Engine,
    FinishedRun,
    Method,
    Metric,
    Metrics,
    Problem,
    Row,
    Spec,
    Task,
)
from bench.errors import UsageError
from bench.intervals import Band, Interval
from bench.settings import Count, settings
from bench.studies import active, gradients

NAMES: dict[str, dict[str, object]] = {
    "gradient_variance": {"dataset": "fashion_mnist"},
    "gradient_variance_digits": {"dataset": "digits"},
}

PRESETS: dict[str, dict[str, object]] = {
    "smoke": {"channels": 16, "batch_size": 8, "pairs": 4, "steps_per_decade": 1},
}

DECADES = 4
"""Powers of ten that sigma goes through, up to 1."""
TENFOLD, TWOFOLD = 10.0, 2.0
"""The least rise of a variance that explodes, and the largest of one that does not."""


@settings
class Settings:
    """Settings of the study of the gradient's variance."""

    dataset: Literal["fashion_mnist", "digits"]
    """Images: fixed by the task's name."""
    channels: Annotated[int, Field(ge=4)] = 512
    """Channels of the last two convolutions, at least 4; the first two have a quarter and half of them."""
    batch_size: Count = 16
    """Images of the one batch, at least 1."""
    pairs: Annotated[int, Field(ge=2)] = 50
    """Pairs of draws at every sigma, at least 2."""
    steps_per_decade: Count = 2
    """Values of sigma per power of ten, at least 1."""
    fresh_batches: bool = False
    """Every draw has a batch of its own, so that the variance is also that between batches."""


class GradientVariance(Task):
    """One network at its start, under posteriors of growing scale."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        unit = "nats squared"
        return Spec(
            question="Does the variance of the likelihood's gradient explode as the posterior widens?",
            source="Farquhar 2022, section 4.4 and Fig. 4.6a",
            version=1,
            metrics={
                "rise": Metric("variance of the gradient at sigma 1 over that at 0.1", "ratio", 0, np.inf),
                "rise_low": Metric("its 95% interval over pairs of draws, lower end", "ratio", 0, np.inf),
                "rise_high": Metric("its 95% interval over pairs of draws, upper end", "ratio", 0, np.inf),
                "variance_at_tenth": Metric("variance of the gradient at sigma 0.1", unit, 0, np.inf),
                "variance_at_one": Metric("variance of the gradient at sigma 1", unit, 0, np.inf),
                "cosine_at_tenth": Metric(
                    "cosine between gradients of two draws, sigma 0.1", "cosine", 1, -1
                ),
                "cosine_at_one": Metric("cosine between gradients of two draws, sigma 1", "cosine", 1, -1),
                "distance": Metric("root mean square of |w - mu| over draws", "sigma", 0, np.inf),
            },
            main_metric="rise",
            requires=frozenset({"scale_settable", "loss_terms", "weight_samples"}),
            ranked=False,
        )

    @property
    def scales(self) -> np.ndarray:
        """Values of sigma `[K]`, from the least to 1."""
        steps = self.settings.steps_per_decade
        return 10.0 ** (np.arange(DECADES * steps + 1) / steps - DECADES)

    @property
    def tenth(self) -> int:
        """Where sigma is 0.1."""
        return (DECADES - 1) * self.settings.steps_per_decade

    # ---- data

    @cached_property
    def images(self) -> data.Images:
        """The published data set, read once."""
        return data.load(self.settings.dataset, self.data_dir)

    def data_digest(self) -> str:
        """Digest of the raw images and labels."""
        return self.images.digest

    # ---- protocol

    def problem(self) -> Problem:
        """The first training images, standardised: those of the batch, or of all batches."""
        own, images = self.settings, self.images
        count = own.batch_size * (2 * own.pairs if own.fresh_batches else 1)
        inputs = active.standardise(own.dataset, images.train_inputs[:count])
        train = TensorDataset(inputs, images.train_labels[:count])
        quarter = own.channels // 4
        widths = (quarter, 2 * quarter, own.channels, own.channels)
        network = partial(gradients.convolutional, inputs.shape[-1], widths, data.CLASSES)
        return Problem(network, likelihoods.Categorical(), priors.normal(0, 1), train, None, len(train))

    def run(self, engine: Engine) -> Arrays:
        """Of every sigma: variances, products and cosines of pairs of gradients, and distances of draws.

        All `[K, P]`; and the number D of the layer's weights, `[K]`.
        """
        problem = self.problem()
        stages = 1 + len(self.scales)
        engine.stage("start", 1, stages)
        method = engine.fit(problem, Budget(epochs=0))
        found = []
        for number, sigma in enumerate(self.scales, 2):
            engine.stage(f"sigma {sigma:.2g}", number, stages)
            found.append(engine.cached(partial(self.measure, engine, method, float(sigma))))
        arrays = {name: np.stack([part[name] for part in found]) for name in found[0]}
        if not (arrays["variances"].mean(1) > 0).all():
            raise UsageError("gradients of all draws are equal: at its start this method's loss has no noise")
        return arrays

    def measure(self, engine: Engine, method: Method, sigma: float) -> Arrays:
        """What is measured at one sigma."""
        method.set_scale(sigma)
        name, count = gradients.last_convolution(method.network), self.settings.pairs
        assert isinstance(method.problem.train, TensorDataset)
        parts = zip(*(t.split(self.settings.batch_size) for t in method.problem.train.tensors), strict=True)
        batches = [Batch(*part) for part in parts]
        # The same batches and noise at every sigma: ratios of variances are of the same draws.
        scatter = gradients.scatter(method, batches, name, count, engine.generator("noise"))
        return vars(scatter) | {
            "distances": gradients.distances(
                method, name, count, engine.generator("distances", f"{sigma:.3g}")
            ),
            "weights": np.array(method.network.get_parameter(name).numel()),
        }

    def targets(self) -> Arrays:
        """None: nothing is predicted."""
        return {}

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """The rise from sigma 0.1 to 1, and what stands at both."""
        variances, cosines = arrays["variances"], arrays["cosines"]
        rise = intervals.paired_ratio(variances[[-1]].T, variances[[self.tenth]].T)
        return {
            "rise": float(rise.centre[0]),
            "rise_low": float(rise.low[0]),
            "rise_high": float(rise.high[0]),
            "variance_at_tenth": float(variances[self.tenth].mean()),
            "variance_at_one": float(variances[-1].mean()),
            "cosine_at_tenth": float(cosines[self.tenth].mean()),
            "cosine_at_one": float(cosines[-1].mean()),
            "distance": self.distance(arrays),
        }

    def distance(self, arrays: Arrays) -> float:
        """Root mean square distance of draws from the mean, in units of sigma."""
        return float(np.sqrt(np.square(arrays["distances"] / self.scales[:, None]).mean()))

    def curves(self, arrays: Arrays) -> list[Row]:
        """Variance, cosine and distance against sigma."""
        columns = {
            "variance of the gradient": arrays["variances"].mean(1),
            "squared expected gradient": arrays["products"].mean(1),
            "cosine of two gradients": arrays["cosines"].mean(1),
            "distance from the mean": np.sqrt(np.square(arrays["distances"]).mean(1)),
        }
        return [
            Row(name, "last convolution", float(sigma), float(value))
            for name, values in columns.items()
            for sigma, value in zip(self.scales, values, strict=True)
        ]

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Variance, cosine and distance against sigma, with closed forms of the distance."""
        return {"variance": chart(self.scales, {"this run": [arrays]}, [])}

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """The same for several lines, and whether their variances rise as the source says.

        Raises:
            UsageError: If a run is given twice, or the runs of a task differ in their sigmas or their layer.
        """
        charts: dict[str, Any] = {}
        sentences: list[str] = []
        for task, lines in by_task(runs).items():
            found = {line: [run.arrays for run in of.values()] for line, of in lines.items()}
            scales = {tuple(run.task.scales) for of in lines.values() for run in of.values()}
            sizes = {int(arrays["weights"][0]) for of in found.values() for arrays in of}
            if len(scales) > 1 or len(sizes) > 1:
                raise UsageError(f"{task}: the runs differ in their sigmas or their layer; draw them apart")
            charts[f"{task}-variance"] = chart(np.array(*scales), found, [task])
            for line, of in lines.items():
                sentences += [f"{task}, {line}: {said}" for said in claims([*of.values()])]
            for first, second in pairs(lines):
                one, other = lines[first], lines[second]
                is_alike = {run.variant for run in one.values()} == {run.variant for run in other.values()}
                if is_alike and (said := at_equal_distance(one, other)):
                    sentences.append(f"{task}: {first} over {second}: {said}")
        return Comparison(charts, sentences=sentences)


# ---------------------------------------------------------------------------------------- several runs


def geometric(values: np.ndarray) -> Interval:
    """Geometric mean of positive values `[R]`, with Student's interval of their logarithms."""
    mean = intervals.student(np.log(values))
    centre, low, high = np.exp(mean[:3])
    return Interval(float(centre), float(low), float(high), mean.basis)


def over_seeds(values: np.ndarray) -> Band:
    """Geometric means over R runs `[R, K]`, with Student's interval at every point, from three runs on."""
    columns = [geometric(column) for column in values.T]
    middle, low, high = (np.array([limits[i] for limits in columns]) for i in range(3))
    return Band(middle, low, high) if len(values) >= intervals.FEWEST else Band.flat(middle)


def chart(scales: np.ndarray, lines: Mapping[str, Sequence[Arrays]], notes: Sequence[str]) -> Any:
    """Three panels against sigma: variance of the gradient, cosine of two gradients, distance from the mean.

    Args:
        scales: Values of sigma `[K]`.
        lines: Line -> arrays of its runs.
        notes: Further lines of the titles.
    """
    import altair as alt

    x, size = scales.tolist(), int(next(iter(lines.values()))[0]["weights"][0])
    several = max(map(len, lines.values())) >= intervals.FEWEST
    notes = [*notes, "geometric mean over the runs; band: 95% at every sigma"] if several else notes
    variances = {
        line: over_seeds(np.stack([a["variances"].mean(1) for a in of])) for line, of in lines.items()
    }
    cosines = {line: Band.flat(np.mean([a["cosines"].mean(1) for a in of], 0)) for line, of in lines.items()}
    distances = {
        line: Band.flat(np.sqrt(np.mean([np.square(a["distances"]).mean(1) for a in of], 0)))
        for line, of in lines.items()
    } | {f"sigma sqrt(D), D = {size:,}": Band.flat(scales * size**0.5), "sigma": Band.flat(scales)}
    log_x = partial(figures.bands, logarithmic_x=True)
    log_both = partial(log_x, logarithmic=True)
    return alt.concat(
        log_both(variances, x, ["Variance of the gradient", *notes], "sigma", "nats squared"),
        log_x(cosines, x, ["Cosine of the gradients of two draws"], "sigma", "cosine"),
        log_both(distances, x, ["Distance of draws from the mean"], "sigma", "distance"),
        columns=2,
    ).resolve_scale(**figures.APART)


def verdict(found: Interval, low: float, high: float) -> str:
    """Whether the interval lies within the claimed range, outside it, or neither."""
    if low <= found.low and found.high <= high:
        return "reproduced"
    return "contradicted" if found.high < low or found.low > high else "undecided"


def claims(runs: Sequence[FinishedRun]) -> list[str]:
    """What the source says of a family whose draws lie as far from the mean as these, and what came out."""
    size, distance = runs[0].arrays["weights"][0], np.mean([run.metrics["distance"] for run in runs])
    rise = geometric(np.array([run.metrics["rise"] for run in runs]))
    cosine = intervals.student(np.array([run.metrics["cosine_at_one"] for run in runs], float))
    if distance > size**0.25:  # nearer to sqrt(D) than to 1
        claim, limits = "rises at least tenfold", (TENFOLD, np.inf)
    else:
        claim, limits = "stays within twofold", (1 / TWOFOLD, TWOFOLD)
    return [
        f"draws lie {distance:.4g} sigma from the mean (sqrt(D) = {size**0.5:.4g}); the variance at sigma 1 "
        f"is {rise:.3g} times that at 0.1; that it {claim} is {verdict(rise, *limits)}",
        f"at sigma 1 gradients of two draws have a cosine of {cosine:.3g}",
    ]


def at_equal_distance(first: Mapping[int, FinishedRun], second: Mapping[int, FinishedRun]) -> str:
    """Variances of two lines where their draws lie equally far from the mean; empty if they nowhere do."""
    ratios = []
    for seed in sorted(first.keys() & second.keys()):
        both = [first[seed], second[seed]]
        away = [np.log(run.task.scales * run.metrics["distance"]) for run in both]
        low, high = max(a[0] for a in away), min(a[-1] for a in away)
        if low > high:
            return ""
        middle = (low + high) / 2
        one, other = (
            np.interp(middle, a, np.log(run.arrays["variances"].mean(1)))
            for a, run in zip(away, both, strict=True)
        )
        ratios.append(np.exp(one - other))
    ratio = geometric(np.array(ratios))
    return f"at the distance {np.exp(middle):.2g} from the mean their variances have the ratio {ratio:.3g}"
