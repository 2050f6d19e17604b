"""Screens: no honest entry has a flag, every cheat has its own, and a milder honest variant has none."""

from functools import cache
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import stored

from bench.leaderboard.check import screens
from bench.leaderboard.check.reading import arrays_of, read_header
from bench.leaderboard.check.scoring import pose
from bench.leaderboard.evidence.store import run_arrays
from bench.leaderboard.evidence.submission import OURS, SUBMISSIONS, seed_of
from bench.runs.records import read_record

COMMITTED = sorted(path.name for path in (SUBMISSIONS / OURS).iterdir() if path.is_dir())


@cache
def entries(task):
    """Method -> seed -> arrays and metrics, of the project's entries on a task."""
    found = {}
    for run in stored.at_hand(sorted((SUBMISSIONS / OURS / task).glob("*/seed*"))):
        content = run_arrays(run).read_bytes()
        arrays = arrays_of(content, read_header(content, run.name))
        found.setdefault(run.parent.name, {})[seed_of(run)] = arrays, read_record(run).metrics
    return {method: dict(sorted(runs.items())) for method, runs in found.items()}


def posed(task):
    run = next((SUBMISSIONS / OURS / task).glob("*/seed0"))
    return pose(read_record(run), task).task


def by_itself(arrays, metrics=None, dataset=""):
    """Names of the screens that flag a run by itself."""
    seen = screens.examine(
        0, arrays, metrics or {}, SimpleNamespace(settings=SimpleNamespace(dataset=dataset))
    )
    return [flag.screen for flag in seen.flags]


@cache
def gallery(task):
    return {m: [screens.look(s, a) for s, (a, _) in runs.items()] for m, runs in entries(task).items()}


def beside(task, runs):
    """Names of the screens that flag made-up runs beside the project's entries on a task."""
    others = gallery(task)
    made = [screens.look(seed, arrays) for seed, arrays in enumerate(runs)]
    return [flag.screen for flag in screens.Gallery(others | {"made": made}).flags("made", others)]


# ---- false alarms


@pytest.mark.parametrize("task", COMMITTED)
def test_no_entry_of_the_project_is_flagged(task):
    """Each looked at as a stranger's that is handed in last: 0 of all."""
    own = posed(task)
    seen = {
        method: [screens.examine(seed, arrays, metrics, own) for seed, (arrays, metrics) in runs.items()]
        for method, runs in entries(task).items()
    }
    beside_each_other = screens.Gallery(seen)
    assert {m: f for m in seen if (f := beside_each_other.flags(m, seen))} == {}


# ---- copies


def test_a_mixture_of_two_is_caught_among_fifty_examples_too():
    """All draws of one entry and of another in one run; with the draws of a third for a tenth it passes."""
    draws = {m: [runs[s][0]["draws"] for s in (1, 2, 0)] for m, runs in entries("fidelity_iris").items()}
    first, second, third = (draws[m] for m in ("mfvi", "laplace", "sgld"))
    both = [{"draws": np.concatenate(pair)} for pair in zip(first, second, strict=True)]
    assert beside("fidelity_iris", both) == ["copy"]
    more = [
        {"draws": np.concatenate([*three[:2], three[2][:18]])}
        for three in zip(first, second, third, strict=True)
    ]
    assert beside("fidelity_iris", more) == []


def test_mixtures_of_any_two_are_caught_among_a_hundred_runs():
    """Of all pairs of entries, be the two near each other or many seeds' distances apart."""
    draws = {m: [runs[s][0]["draws"] for s in (1, 2, 0)] for m, runs in entries("fidelity_iris").items()}

    def made(pair):
        return [{"draws": np.concatenate(both)} for both in zip(*(draws[one] for one in pair), strict=True)]

    pairs = [*combinations(sorted(draws), 2)]
    assert len(pairs) == 210
    assert not [pair for pair in pairs if beside("fidelity_iris", made(pair)) != ["copy"]]


def normalised(log_probs):
    wide = log_probs - log_probs.max(-1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(-1, keepdims=True))).astype(np.float16)


def noisy(log_probs, size, seed):
    noise = np.random.default_rng(seed).normal(0, size, log_probs.shape)
    return normalised(log_probs.astype(np.float64) + noise)


VICTIMS = "ood_digits"


def predicted(method, seed):
    return entries(VICTIMS)[method][seed][0]["log_probs"].astype(np.float64)


def caught(screen, make):
    """Of all entries, the share that is flagged when its runs are made other ones."""
    found = [screen in beside(VICTIMS, [{"log_probs": x} for x in make(m)]) for m in entries(VICTIMS)]
    return np.mean(found)


@pytest.mark.parametrize("size", [0.01, 0.03])
def test_copies_with_noise_and_permuted_seeds_are_caught(size):
    assert caught("copy", lambda m: [noisy(predicted(m, s), size, k) for k, s in enumerate((1, 2, 0))]) == 1


def test_copies_without_noise_are_caught():
    """What is left of them is rounding, which is no noise; also where it is that of float16."""
    assert caught("copy", lambda m: [predicted(m, s) for s in (1, 2, 0)]) == 1


def test_another_temperature_is_caught():
    """All but one, whose classes are so sure that nothing moves."""
    sharper = lambda m: [normalised(1.2 * predicted(m, s)) for s in range(3)]  # noqa: E731
    assert caught("copy", sharper) >= 0.9


def test_means_of_two_entries_are_caught():
    found = [
        "copy"
        in beside(
            VICTIMS,
            [
                {"log_probs": normalised(np.logaddexp(predicted(one, s), predicted(other, s)))}
                for s in range(3)
            ],
        )
        for one, other in pairwise(entries(VICTIMS))
    ]
    assert np.mean(found) >= 0.9


def test_one_run_as_three_seeds_is_caught():
    assert caught("seeds", lambda m: [noisy(predicted(m, 0), 0.02, k) for k in range(3)]) == 1


def test_noise_as_large_as_another_seed_passes():
    """It costs the copy what it would have gained."""
    assert caught("copy", lambda m: [noisy(predicted(m, s), 1.0, s) for s in range(3)]) <= 0.05


def test_few_examples_are_copies_only_where_they_are_equal():
    """Fifty flowers: noise cannot be told there."""
    draws = [entries("fidelity_iris")["mfvi"][seed][0]["draws"].astype(np.float32) for seed in (2, 0, 1)]
    assert "copy" in beside("fidelity_iris", [{"draws": d + np.float32(1e-4)} for d in draws])
    assert "copy" not in beside("fidelity_iris", [{"draws": normalised(1.3 * d)} for d in draws])


def test_arrays_of_other_shapes_and_of_no_kind_are_not_compared():
    others = gallery(VICTIMS)
    for arrays in ({"log_probs": np.zeros((5, 8), np.float16)}, {"x": np.zeros(3)}):
        seen = {"made": [screens.look(0, arrays)]}
        assert screens.Gallery(others | seen).flags("made", others) == []
    assert screens.Gallery(seen).flags("made") == []


def test_constant_and_enormous_predictions_are_looked_at():
    """Whatever a stranger predicts is an answer."""
    flat = {"log_probs": np.full((40, 4), -np.log(4), np.float16)}
    huge = {"draws": np.full((3, 40), 3e38, np.float32)}
    for arrays in (flat, huge):
        runs = {name: [screens.look(0, arrays), screens.look(1, arrays)] for name in ("a", "b")}
        assert {f.screen for f in screens.Gallery(runs).flags("a", ["b"])} <= {"copy", "seeds"}


def test_noise_is_not_alike_between_neighbours():
    """Independent differences correlate with those of neighbours by 0 in the mean, whatever the places are.

    Of 200 draws of 355 examples and 2 numbers each none may reach `WHITE`: a normal of standard deviation
    0.05 does so in 3 of 10^5 draws. A smooth function of the place does.
    """
    generator = np.random.default_rng(0)
    found = [
        screens._like_neighbours(generator.normal(size=(355, 2)), generator.normal(size=(355, 3)))
        for _ in range(200)
    ]
    assert abs(np.mean(found)) < 0.02
    assert max(found) < screens.WHITE
    places = generator.normal(size=(355, 2))
    assert screens._like_neighbours(np.sin(places), places) > 0.8


# ---- floors


def test_distances_below_the_floor_are_flagged():
    assert by_itself({}, {"wasserstein": 6e-10, "wasserstein_floor": 0.0258}) == ["floor"]
    assert by_itself({}, {"wasserstein": 0.49 * 0.0258, "wasserstein_floor": 0.0258}) == ["floor"]
    assert by_itself({}, {"wasserstein": 0.87 * 0.0258, "wasserstein_floor": 0.0258}) == []
    assert by_itself({}, {"wasserstein": None, "wasserstein_floor": None}) == []


def sure(errors, count, classes=10):
    """Predictions that are sure and right, but for so many."""
    labels = np.random.default_rng(0).integers(0, classes, count).astype(np.uint8)
    named = np.where(np.arange(count) < errors, (labels + 1) % classes, labels)
    p = np.full((count, classes), 1e-3)
    p[np.arange(count), named] = 1 - 1e-3 * (classes - 1)
    return {"log_probs": np.log(p).astype(np.float16), "labels": labels}


@pytest.mark.parametrize(
    ("dataset", "errors", "count", "found"),
    [
        ("mnist", 0, 10_000, ["floor"]),
        ("mnist", 2, 10_000, []),  # in 0.6% of test sets of the best one's error
        ("mnist", 0, 1_000, []),  # in 41%
        ("fashion_mnist", 250, 10_000, ["floor"]),
        ("fashion_mnist", 310, 10_000, []),
        ("cifar10", 25, 10_000, ["floor"]),
        ("digits", 0, 10_000, []),  # of which no best is published
    ],
)
def test_fewer_errors_than_the_best_published(dataset, errors, count, found):
    assert by_itself(sure(errors, count), dataset=dataset) == found


# ---- uncertainties


def test_ranks_and_areas_are_those_of_all_pairs():
    generator = np.random.default_rng(1)
    values, positive = generator.integers(0, 9, 60), generator.random(60) < 0.3
    pairs = values[positive][:, None] - values[~positive]
    assert screens._auroc(values, positive) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    below = (values[:, None] > values).sum(1) + 0.5 * ((values[:, None] == values).sum(1) - 1) + 1
    assert screens._ranks(values) == pytest.approx(below)
    assert screens._rank_correlation(values, values**3) == pytest.approx(1)
    assert screens._rank_correlation(values, np.ones(60)) == 0


def honest(seed=0, count=2000):
    """Calibrated predictions: labels are drawn from them; and information that is half of the entropy."""
    generator = np.random.default_rng(seed)
    logits = 2 * generator.normal(size=(count, 4))
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = (np.exp(log_probs).cumsum(-1) < generator.random((count, 1))).sum(-1).clip(0, 3)
    entropy = -(np.exp(log_probs) * log_probs).sum(-1)
    loss = -log_probs[np.arange(count), labels]
    made = {"log_probs": log_probs.astype(np.float32), "labels": labels.astype(np.uint8)}
    return made | {"information": (entropy / 2).astype(np.float32)}, entropy, loss


def test_scores_that_are_the_loss_are_flagged():
    arrays, entropy, loss = honest()
    assert by_itself(arrays) == []
    order = loss.argsort().argsort() / len(loss)
    known = (0.9 * entropy.min() * order).astype(np.float32)
    assert by_itself(arrays | {"information": known}) == ["foresight"]
    blurred = entropy / 2 * (0.8 + 0.4 * order)  # which knows a little
    assert by_itself(arrays | {"information": blurred.astype(np.float32)}) == []


def test_predictions_that_know_their_errors_are_flagged():
    arrays, _, _ = honest()
    wrong = arrays["log_probs"].argmax(-1) != arrays["labels"]
    flat = np.log(
        np.where(wrong[:, None], 0.99, 0.01) / 4
        + np.where(wrong[:, None], 0.01, 0.99) * np.exp(arrays["log_probs"])
    )
    assert by_itself(
        arrays | {"log_probs": flat.astype(np.float32), "information": 0 * arrays["information"]}
    ) == ["foresight"]


def test_active_tests_are_looked_at_too():
    arrays, entropy, loss = honest()
    full = {f"full_{name}": array for name, array in arrays.items() if name != "information"}
    assert by_itself(full | {"full_scores": arrays["information"]}) == []
    known = (0.9 * entropy.min() * loss.argsort().argsort() / len(loss)).astype(np.float32)
    assert by_itself(full | {"full_scores": known}) == ["foresight"]


def test_uncertainties_that_know_the_held_out_classes_are_flagged():
    """AUROC 0.998 by position; the best of the project's has 0.972."""
    (arrays, _), *_ = entries("ood_digits")["sngp"].values()
    assert by_itself(arrays) == []
    entropy = -(np.exp(arrays["log_probs"].astype(float)) * arrays["log_probs"]).sum(-1)
    by_position = entropy * np.where(arrays["labels"] > 7, 1, 1e-3 * entropy / 3)
    assert by_itself(arrays | {"information": by_position.astype(np.float32)}) == ["foresight"]


@pytest.mark.parametrize(
    ("share", "shift", "found"),
    [(1.0, 0, []), (1.02, 0, ["information"]), (0.5, -0.02, ["information"]), (0.5, -1e-6, [])],
)
def test_information_lies_between_nothing_and_the_entropy(share, shift, found):
    arrays, entropy, _ = honest()
    made = {"information": (share * entropy + shift).astype(np.float32)}
    assert by_itself(arrays | made) == found


def test_rounding_to_float16_stays_in_the_bounds():
    """Where it is coarsest: near the entropy of ten equal classes."""
    log_probs = normalised(np.random.default_rng(0).normal(0, 0.05, (4000, 10)))
    exact = np.random.default_rng(0).normal(0, 0.05, (4000, 10))
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    entropy = -(np.exp(exact) * exact).sum(-1)
    assert by_itself({"log_probs": log_probs, "information": entropy.astype(np.float16)}) == []


def test_deviations_of_a_probability_have_a_bound():
    p = np.linspace(0.01, 0.99, 50)
    arrays = {"log_probs": np.log(np.stack([1 - p, p], 1)).astype(np.float32)}
    most = np.sqrt(p * (1 - p))
    assert by_itself(arrays | {"deviation": most.astype(np.float32)}) == []
    assert by_itself(arrays | {"deviation": (1.05 * most).astype(np.float32)}) == ["information"]


# ---- predicted numbers


def numbers(deviation, error, members=1):
    """Normals about 0 of these deviations `[N]`, and targets that are these errors `[N]`."""
    n = len(error)
    return {
        "mean": np.zeros((2, members, n), np.float32),
        "variance": np.broadcast_to((deviation**2).astype(np.float32), (2, members, n)),
        "centre_and_scale": np.array([[3.0, 2.0]] * 2),
        "targets": 3 + 2 * np.stack([error, error[::-1]]),
    }


def test_the_log_of_an_error_varies_by_at_least_one():
    """Of a uniform by 1, of a normal by pi^2/8; by the quantiles of both."""
    from scipy.special import ndtri

    levels = (np.arange(200_000) + 0.5) / 200_000
    assert np.log(levels).var() == pytest.approx(1, rel=1e-3)
    assert np.log(ndtri(0.5 + levels / 2)).var() == pytest.approx(np.pi**2 / 8, rel=1e-3)


@pytest.mark.parametrize("blur", [0.0, 0.3, 0.5])
def test_deviations_that_are_the_errors_are_flagged(blur):
    """Also where they know them but for a factor of exp(blur)."""
    generator = np.random.default_rng(0)
    error = generator.normal(size=300)
    known = np.abs(error) * np.exp(generator.normal(0, blur, 300))
    arrays = numbers(known, error)
    arrays["variance"] = np.stack([arrays["variance"][0], arrays["variance"][1, :, ::-1]])
    assert by_itself(arrays) == ["likelihood"]


@pytest.mark.parametrize("noise", ["normal", "uniform", "laplace", "standard_t"])
def test_deviations_that_know_the_noise_pass(noise):
    """Where noise differs from row to row by a factor of e^3, and all of it is known. No false alarm in 100.

    Of uniform errors, the least favourable ones, the variance has the standard deviation 0.11 at 600 rows.
    """
    generator = np.random.default_rng(0)
    draw = {"standard_t": lambda size: generator.standard_t(3, size)}.get(
        noise, lambda size: getattr(generator, noise)(*((-1, 1) if noise == "uniform" else (0, 1)), size)
    )
    for _ in range(100):
        deviation = np.exp(generator.uniform(-1.5, 1.5, 300))
        arrays = numbers(deviation, deviation * draw(300))
        arrays["variance"] = np.stack([arrays["variance"][0], arrays["variance"][1, :, ::-1]])
        assert by_itself(arrays) == []


def test_a_density_that_means_and_deviations_cannot_have_is_flagged():
    """One of eighty normals at the target; a mixture of two modes that are honest passes."""
    generator = np.random.default_rng(0)
    arrays = numbers(np.ones(300), generator.normal(size=300), 80)
    assert by_itself(arrays) == []
    target = (arrays["targets"] - 3) / 2
    mean, variance = arrays["mean"].copy(), arrays["variance"].copy()
    mean[:, 0], variance[:, 0] = target, 1e-10
    assert by_itself(arrays | {"mean": mean, "variance": variance}) == ["likelihood"]
    sides = np.where(np.arange(80) % 2, 3.0, -3.0).astype(np.float32)
    side = np.where(generator.random((2, 300)) < 0.5, -3, 3)
    two = arrays | {"mean": np.broadcast_to(sides[:, None], mean.shape), "targets": 3 + 2 * (side + target)}
    assert by_itself(two) == []


def test_two_modes_gain_as_much_as_is_said():
    """1 nat where they are 10.7 standard deviations apart: log sqrt(1 + d^2/4) - log 2."""
    assert np.log(np.sqrt(1 + 10.7**2 / 4)) - np.log(2) == pytest.approx(1, abs=0.01)
