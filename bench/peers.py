"""Posteriors of other libraries as methods: `bench run bench.peers:LaplaceTorch fidelity_iris`.

The library fits; the suite poses the problem, predicts and scores. So what is compared
are posteriors, under one network, likelihood, prior and protocol. docs/entering-a-library.md goes through the
first of them and says how theirs agree with ours.

Each keeps what draws are made of as buffers, which every checkpoint holds. The fits of
`posteriors` are made whole in `finish_fit`: one that is stopped is made anew. They need the extra `peers`.
`Cifar10Predictions` reads probabilities of any origin from a file, and needs no package. `Questions` and
`Answers` do so for every task on a table: the one writes down what is asked, the other hands in what was
answered.

Shapes: d weights, N examples, C classes.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from bench import cifar, randomness
from bench.contract import Batch, Budget, Method, Prediction, Problem
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.likelihoods import Bernoulli, Categorical, Gaussian
from bench.methods.map import MAP
from bench.methods.map import Settings as MAPSettings
from bench.predictions import Categorical as ClassPrediction
from bench.predictions import Gaussian as NumberPrediction
from bench.priors import joined_normals
from bench.settings import Count, Positive, Share, settings
from bench.studies.hmc_predictions import CLASSES, levels
from bench.system.files import write
from bench.weights import linearised, ravel, unravel


class LaplaceTorch(MAP):
    """A normal at the mode that `map` finds: laplace-torch, full curvature, the network linearised."""

    approximates = "the posterior by a normal at its mode with the full curvature there (laplace-torch)"
    declares = "none", {}  # the law of its curvature poses a prior of another mean than 0, which it refuses
    provides = frozenset({"weight_samples"})
    settings_class = MAPSettings
    mode: Tensor  # [d]
    root: Tensor  # [d, d]: root root' is the covariance

    def __init__(self, problem: Problem, settings: MAPSettings, start: MAP | None = None) -> None:
        needs_peers()
        super().__init__(problem, settings, start)
        size = sum(p.numel() for p in self.network.parameters())
        self.register_buffer("mode", torch.zeros(size))
        self.register_buffer("root", torch.zeros(size, size))

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """The curvature of all examples, and of the prior."""
        from laplace import Laplace

        data = DataLoader(TensorDataset(*together(loader)), batch_size=64)
        fitted: Any = Laplace(
            self.network, **likelihood(self), subset_of_weights="all", hessian_structure="full",
            prior_precision=precision(self),
        )  # fmt: skip
        fitted.fit(data)
        self.mode.copy_(fitted.mean)
        self.root.copy_(fitted.posterior_scale)

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws of the normal, `[S, *shape]`."""
        noise = torch.randn(num_samples, len(self.mode), generator=generator, device=self.mode.device)
        return unravel(self.mode + noise @ self.root.T, dict(self.network.named_parameters()))

    def outputs(self, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Outputs of the network linearised at the mode, as that library predicts."""
        return linearised(self.network, weights, inputs)

    predict = Method.predict


class PosteriorsLaplace(LaplaceTorch):
    """The same by `posteriors.laplace.dense_ggn`."""

    approximates = "the posterior by a normal at its mode with the full curvature there (posteriors)"

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """The curvature of all examples, and of the prior."""
        from optree.integrations.torch import tree_ravel
        from posteriors.laplace import dense_ggn

        def forward(weights: Any, batch: Any) -> tuple[Tensor, Tensor]:
            return functional_call(self.network, dict(weights), (batch[0],)), torch.tensor([])

        def log_likelihood(outputs: Tensor, batch: Any) -> Tensor:
            return self.likelihood.log_prob(outputs[None], batch[1]).sum()

        transform = dense_ggn.build(forward, log_likelihood, init_prec=precision(self))
        state = transform.init({n: p.detach() for n, p in self.network.named_parameters()})
        state, _ = transform.update(state, together(loader))
        places = unravel(torch.arange(len(self.mode))[None], dict(self.network.named_parameters()))
        order, _ = tree_ravel({name: place[0] for name, place in places.items()})  # theirs, of ours
        self.mode.copy_(vector(self, state.params))
        self.root[order] = torch.linalg.inv(torch.linalg.cholesky(state.prec)).T


class _Posteriors(Method):
    """A posterior over the vector of weights that a transform of `posteriors` updates batch by batch."""

    provides = frozenset({"weight_samples"})
    trains = False
    budget: Budget

    def __init__(self, problem: Problem, settings: Any, start: Method | None = None) -> None:
        needs_peers()
        super().__init__(problem, settings, start)
        self.network = problem.network()

    def spends(self, budget: Budget) -> Budget:
        """The task's budget, which `updated` goes through by itself."""
        self.budget = super().spends(budget)
        return self.budget

    def log_posterior(self, weights: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Log joint over N of a batch that stands for all examples, and nothing beside it."""
        outputs = functional_call(self.network, dict(weights), (batch[0],))[None]
        nll = likelihood_term(self.likelihood, outputs, Batch(*batch), self.problem.num_train)
        prior = log_prob(self.prior, {name: w[None] for name, w in weights.items()}).sum()
        return (prior - nll) / self.problem.num_train, torch.tensor([])

    def updated(self, transform: Any, loader: Iterable[Batch]) -> Iterator[Any]:
        """The state after every batch of the budget, in a new order every epoch."""
        inputs, targets = together(loader)
        state = transform.init({n: p.detach().clone() for n, p in self.network.named_parameters()})
        with seeded(self.generator):
            for _ in range(self.budget.epochs):
                for rows in torch.randperm(len(inputs)).split(self.budget.batch_size or len(inputs)):
                    state, _ = transform.update(state, (inputs[rows], targets[rows]))
                    yield state


@settings
class VISettings:
    """Settings of mean-field inference by posteriors."""

    learning_rate: Positive = 1e-2
    """Step size of Adam, above 0."""
    initial_rho: float = -3.0
    """Standard deviations start at softplus of it."""


class PosteriorsVI(_Posteriors):
    """Independent normals by `posteriors.vi.diag`, one weight sample a step."""

    approximates = "the posterior by independent normals (posteriors)"
    declares = "mean-field optimum of KL", {"learning_rate": 0.02}
    settings_class = VISettings
    settings: VISettings
    normal: Tensor  # [2, d]: mean and standard deviation

    def __init__(self, problem: Problem, settings: VISettings, start: Method | None = None) -> None:
        super().__init__(problem, settings, start)
        size = sum(p.numel() for p in self.network.parameters())
        self.register_buffer("normal", torch.zeros(2, size))

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """All of the fit."""
        import torchopt
        from posteriors.vi import diag

        scale = math.log(softplus(torch.tensor(self.settings.initial_rho)))
        adam = torchopt.adam(lr=self.settings.learning_rate)
        transform = diag.build(
            self.log_posterior, adam, temperature=1 / self.problem.num_train, init_log_sds=scale
        )
        *_, state = self.updated(transform, loader)
        self.normal.copy_(torch.stack([vector(self, state.params), vector(self, state.log_sd_diag).exp()]))

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws, `[S, *shape]`."""
        mean, sd = self.normal
        noise = torch.randn(num_samples, len(mean), generator=generator, device=mean.device)
        return unravel(mean + sd * noise, dict(self.network.named_parameters()))


@settings
class SGLDSettings:
    """Settings of stochastic gradient Langevin dynamics by posteriors."""

    learning_rate: Positive = 1e-2
    """Step size, above 0, of the gradient per example."""
    burn_in: Share = 0.5
    """Share of the steps before the first draw, from 0 to below 1."""
    kept: Count = 50
    """Draws that are kept of the steps after that, evenly; at least 1."""


class PosteriorsSGLD(_Posteriors):
    """Draws of one chain by `posteriors.sgmcmc.sgld`."""

    approximates = "the posterior by draws of noisy gradient steps (posteriors)"
    declares = "exact in the limit of steps", {"learning_rate": 0.16, "burn_in": 0.05, "kept": 400}
    settings_class = SGLDSettings
    settings: SGLDSettings
    draws: Tensor  # [kept, d]

    def __init__(self, problem: Problem, settings: SGLDSettings, start: Method | None = None) -> None:
        super().__init__(problem, settings, start)
        size = sum(p.numel() for p in self.network.parameters())
        self.register_buffer("draws", torch.zeros(settings.kept, size))

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """All of the fit."""
        from posteriors.sgmcmc import sgld

        s, count = self.settings, self.problem.num_train
        transform = sgld.build(self.log_posterior, s.learning_rate, temperature=1 / count)
        steps = self.budget.epochs * -(-count // (self.budget.batch_size or count))
        first = min(round(s.burn_in * steps), steps - 1)
        places = torch.linspace(first, steps - 1, s.kept).round().long().tolist()
        for step, state in enumerate(self.updated(transform, loader)):
            for place, at in enumerate(places):
                if at == step:
                    self.draws[place] = vector(self, state.params)

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """A random choice of the draws, `[S, *shape]`: each once before any is taken again."""
        chosen = randomness.subset(len(self.draws), num_samples, generator)
        return unravel(self.draws[chosen.sort().values], dict(self.network.named_parameters()))


@settings
class PredictionsSettings:
    """Settings of predictions that are handed in."""

    file: str = "probs.npy"
    """NumPy file (.npy) of class probabilities `[10000, 10]`, in the order of CIFAR-10's test images."""


class Cifar10Predictions(Method):
    """Class probabilities of CIFAR-10's test images that something else made: nothing is fitted.

    An image is known by its pixels, wherever it stands among the inputs. One that is no test image has equal
    probabilities. The images are found in $BENCH_DATA or in the cache, not by `--data-dir`.
    """

    approximates = "the predictive distribution by probabilities read from a file"
    declares = "none", {}
    seed_matters = False
    trains = False
    settings_class = PredictionsSettings
    settings: PredictionsSettings
    log_probs: Tensor  # [N + 1, C], the last of any other image

    def __init__(self, problem: Problem, settings: PredictionsSettings, start: Method | None = None) -> None:
        super().__init__(problem, settings, start)
        images = cifar.load("cifar10")["test_inputs"]
        self.rows = {image.tobytes(): row for row, image in enumerate(images)}
        probabilities = handed_in(settings.file)
        if probabilities.shape != (len(images), CLASSES):
            raise UsageError(
                f"{settings.file}: probabilities {list(probabilities.shape)}, and CIFAR-10 has {len(images)} "
                f"test images of {CLASSES} classes"
            )
        self.network = problem.network()
        self.register_buffer("log_probs", torch.cat([probabilities, torch.full((1, CLASSES), 0.1)]).log())

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """Nothing is fitted."""

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """The rows of the images, `[1, B, 10]`, whatever `num_samples` says."""
        pixels = levels(inputs).cpu().numpy()
        rows = [self.rows.get(image.tobytes(), -1) for image in pixels]
        return ClassPrediction(self.log_probs[rows][None])


def handed_in(file: str) -> Tensor:
    """Class probabilities float32 `[N, C]` of a NumPy file.

    Raises:
        UsageError: If it cannot be read, or holds what are no probabilities.
    """
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{file}: no NumPy file ({' '.join(str(error).split())})") from None
    if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind != "f" or not len(found):
        raise UsageError(f"{file}: must hold one array of probabilities [N, C], of floats")
    return probabilities_of(found, file)


def probabilities_of(found: np.ndarray, file: str) -> Tensor:
    """Class probabilities float32 `[N, C]` of an array of floats.

    Raises:
        UsageError: If a row holds what are no probabilities.
    """
    found = found.astype(np.float64)
    off = np.abs(found.sum(1) - 1)
    wrong = np.flatnonzero(~np.isfinite(found).all(1) | (found < 0).any(1) | (off > 1e-3))
    if len(wrong):
        raise UsageError(f"{file}: row {wrong[0]} holds no probabilities: {found[wrong[0]].tolist()}")
    return torch.from_numpy(found / found.sum(1, keepdims=True)).float()


@settings
class QuestionsSettings:
    """Settings of questions and answers."""

    file: str = "questions.npz"
    """NumPy file (.npz) of what a task asks, and of what is answered."""


class _OnTables(Method):
    """A fit that is known by its training examples, and rows of a table by what the network would take."""

    declares = "none", {}
    seed_matters = False
    trains = False
    settings_class = QuestionsSettings
    settings: QuestionsSettings

    def __init__(self, problem: Problem, settings: QuestionsSettings, start: Method | None = None) -> None:
        super().__init__(problem, settings, start)
        tensors = problem.train.tensors if isinstance(problem.train, TensorDataset) else ()
        if len(tensors) != 2 or tensors[0].ndim != 2 or isinstance(problem.likelihood, Bernoulli):
            raise UsageError(f"{type(self).__name__} takes rows of a table, and their classes or numbers")
        self.examples = [tensor.numpy() for tensor in tensors]
        self.is_of_classes = self.examples[1].dtype.kind in "iu"
        self.network = problem.network()
        content = b"".join(np.ascontiguousarray(part).tobytes() for part in self.examples)
        self.fit_name = hashlib.sha256(content).hexdigest()[:12]

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """Nothing is fitted."""


class Questions(_OnTables):
    """Writes down what a task asks; it predicts the share of each class, or one normal, for all rows alike.

    The file has of each fit, under a name F of its own, its `F/train_inputs` `[n, D]` and `F/train_targets`
    `[n]`, and `F/inputs` `[N, D]`, the rows whose targets are asked for; of classes `F/num_classes` too.
    Inputs and numbers are standardised as the task has them. What the file holds already stays.
    """

    approximates = "nothing: one prediction for all rows"

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """The same for every row, `[1, B, ..]`."""
        file, (known, targets) = Path(self.settings.file), self.examples
        kept = read_arrays(self.settings.file) if file.exists() else {}
        rows = inputs.cpu().numpy()
        asked = np.concatenate([kept.get(f"{self.fit_name}/inputs", rows[:0]), rows])
        found = {"train_inputs": known, "train_targets": targets.reshape(len(targets)), "inputs": asked}
        if self.is_of_classes:
            found["num_classes"] = np.array(self.network(inputs[:1]).shape[-1])
        whole: dict[str, Any] = kept | {f"{self.fit_name}/{name}": of for name, of in found.items()}
        content = io.BytesIO()
        np.savez(content, **whole)
        write(file, content.getvalue())
        if self.is_of_classes:
            counts = np.bincount(targets, minlength=int(found["num_classes"])) + 1.0
            shares = torch.tensor(counts / counts.sum(), dtype=inputs.dtype, device=inputs.device)
            return ClassPrediction(shares.log().expand(1, len(inputs), -1))
        like = inputs.new_ones(1, len(inputs), 1)
        return NumberPrediction(like * float(targets.mean()), like * float(targets.var()))


class Answers(_OnTables):
    """Predictions of a table's rows that something else made: nothing is fitted.

    To what `Questions` wrote they add `F/probabilities` `[N, C]`, or `F/mean` and `F/variance` `[S, N]` of S
    equally likely normals, of the standardised number, in the order of `F/inputs`.
    """

    approximates = "the predictive distribution by answers read from a file"

    def __init__(self, problem: Problem, settings: QuestionsSettings, start: Method | None = None) -> None:
        super().__init__(problem, settings, start)
        found = read_arrays(settings.file)
        asked = found.get(f"{self.fit_name}/inputs")
        if asked is None:
            raise UsageError(
                f"{settings.file} has no questions of this fit: bench run bench.peers:Questions with the "
                "same task and settings writes them"
            )
        self.rows = {row.tobytes(): place for place, row in enumerate(asked)}
        names = ("probabilities",) if self.is_of_classes else ("mean", "variance")
        answers = [found.get(f"{self.fit_name}/{name}") for name in names]
        number = int(found.get(f"{self.fit_name}/num_classes", 0))
        self.answers = [
            self._checked(of, name, len(asked), number) for of, name in zip(answers, names, strict=True)
        ]
        if len({of.shape for of in self.answers}) > 1:
            raise UsageError(f"{settings.file}: mean and variance of {self.fit_name} have different shapes")

    def _checked(self, found: np.ndarray | None, name: str, rows: int, classes: int) -> Tensor:
        """An array of answers, as float32.

        Raises:
            UsageError: If it is missing, of another shape, or holds what is none.
        """
        file = f"{self.settings.file}: {self.fit_name}/{name}"
        shape = f"[{rows}, {classes}]" if self.is_of_classes else f"[S, {rows}]"
        if found is None:
            raise UsageError(f"{file} {shape} is missing: nobody has answered")
        fits = found.ndim == 2 and found.dtype.kind == "f" and len(found) > 0
        if not fits or (found.shape != (rows, classes) if self.is_of_classes else found.shape[1] != rows):
            raise UsageError(f"{file} is {found.dtype} {list(found.shape)}, and must be floats {shape}")
        if self.is_of_classes:
            return probabilities_of(found, file)
        if not np.isfinite(found).all() or (name == "variance" and (found <= 0).any()):
            raise UsageError(f"{file} holds what is no {name}")
        return torch.from_numpy(found).float()

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """The answers to the rows, `[1, B, C]` or `[S, B, 1]`, whatever `num_samples` says.

        Raises:
            UsageError: If a row was not asked for.
        """
        places = [self.rows.get(row.tobytes(), -1) for row in inputs.cpu().numpy()]
        if -1 in places:
            raise UsageError(
                f"{self.settings.file} has no answer to a row of {self.fit_name}: it was not asked for"
            )
        if self.is_of_classes:
            return ClassPrediction(self.answers[0][places].to(inputs.device).log()[None])
        mean, variance = (of[:, places, None].to(inputs.device) for of in self.answers)
        return NumberPrediction(mean, variance)


def read_arrays(file: str) -> dict[str, np.ndarray]:
    """The arrays of a NumPy file by name.

    Raises:
        UsageError: If it cannot be read.
    """
    try:
        with np.load(file, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"{file}: no NumPy file of arrays by name ({' '.join(str(error).split())})"
        ) from None


# ------------------------------------------------------------------------------------------------ helpers


def needs_peers() -> None:
    """Refuses before training what could not be imported after it."""
    if missing := [name for name in ("laplace", "posteriors") if find_spec(name) is None]:
        raise UsageError(f"{' and '.join(missing)} cannot be imported: pip install 'posterior-bench[peers]'")


def together(loader: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """All inputs `[N, ...]` and targets `[N, ...]`."""
    batches = list(loader)
    return torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])


def precision(method: Method) -> float:
    """Precision 1 / s^2 of the prior, which must be N(0, s^2) for every weight."""
    normals = joined_normals(method.prior)
    if normals is None or normals[0].any() or (normals[1] != normals[1][0]).any():
        raise UsageError(f"{type(method).__name__} needs a prior N(0, s^2), the same for all weights")
    return float(normals[1][0] ** -2)


def likelihood(method: Method) -> dict[str, Any]:
    """What laplace-torch calls the likelihood; it takes classes, or numbers with a known noise."""
    found = method.likelihood
    if isinstance(found, Categorical):
        return {"likelihood": "classification"}
    if isinstance(found, Gaussian) and not found.per_example and not list(found.parameters()):
        return {"likelihood": "regression", "sigma_noise": float(found.log_sigma.exp())}
    raise UsageError("LaplaceTorch takes classes, or numbers with a known noise; take another task")


def vector(method: Method, tree: Any) -> Tensor:
    """Tensors by name as one vector `[d]`, in the order of the network's parameters."""
    return ravel({name: tree[name].detach()[None] for name, _ in method.network.named_parameters()})[0]


@contextmanager
def seeded(generator: torch.Generator) -> Iterator[None]:
    """Inside the block torch's global generator, from which that library draws, goes on from this one."""
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
