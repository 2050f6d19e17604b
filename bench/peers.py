"""Posteriors of other libraries as methods: `bench run bench.peers:LaplaceTorch fidelity_iris`.

The library fits; the suite poses the problem, predicts and scores. So what is compared
are posteriors, under one network, likelihood, prior and protocol. docs/entering-a-library.md goes through the
first of them and says how theirs agree with ours.

Each keeps what draws are made of as buffers, which every checkpoint holds. The fits of
`posteriors` are made whole in `finish_fit`: one that is stopped is made anew. They need the extra `peers`.
`Cifar10Predictions` reads probabilities of any origin from a file, and needs no package.

Shapes: d weights, N examples, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
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
from bench.likelihoods import Categorical, Gaussian
from bench.methods.map import MAP
from bench.methods.map import Settings as MAPSettings
from bench.predictions import Categorical as ClassPrediction
from bench.priors import joined_normals
from bench.settings import Count, Positive, Share, settings
from bench.studies.hmc_predictions import CLASSES, levels
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
    found = found.astype(np.float64)
    off = np.abs(found.sum(1) - 1)
    wrong = np.flatnonzero(~np.isfinite(found).all(1) | (found < 0).any(1) | (off > 1e-3))
    if len(wrong):
        raise UsageError(f"{file}: row {wrong[0]} holds no probabilities: {found[wrong[0]].tolist()}")
    return torch.from_numpy(found / found.sum(1, keepdims=True)).float()


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
