"""Evidence of singular models: how much of the log evidence does an approximation of the posterior reach?

Question: how close does the evidence lower bound of an approximation come to the log evidence, on models that
are not identifiable and whose learning coefficient is known?

Protocol: a model with its truth inside, n observations with noise N(0, 1), a normal prior of given mean and
variance on every weight. `repetitions` data sets, the same for every method under the same seed, one fit each
in batches of n/10. From `draws` exact draws w of the fitted posterior q: the normalised evidence lower bound
Psi = mean[log p(D | w) + log prior(w) - log q(w)] + n S_n, where n S_n = -sum_i log p0(y_i | x_i) over the n
observations (the paper's S_n is their mean). Psi <= log of the normalised evidence, whose leading terms are
-lambda log n + (m - 1) log log n with the learning coefficient lambda (RLCT) and its multiplicity m. One run
is one row of the paper's tables: mean and standard deviation of Psi over the repetitions that converged (Psi
at least -1e6), and how many did.

    tanh          y = sum_h b_h tanh(a_h x), x ~ U(-1, 1), 2 H weights, all of the truth `true_weight`
    reduced_rank  y = B A x, x ~ N(0, I_M), M = H + 3, H outputs; A0 = [I_H, ones(H, 3)], B0 = I_H
    linear        y = w . x, x ~ N(0, I_H), H weights, all of the truth `true_weight`: the evidence is known
                  exactly, which tells whether a bound is one

The generalisation error is KL(p0 || p_vb) of the predictive density, on 5,000 fresh inputs with the
observation and its mirror image about the truth.

Source: documents 000 (Tables 2 to 4) and 002, section 7 and appendices D and E; learning coefficients from
Aoyagi and Watanabe 2012 (tanh) and 2005 (reduced rank). Deviations: the preset standard changes nothing of
the protocol; what it changes of the methods is theirs.

What would mislead: log q is the method's own word, and one that understates it has a higher Psi; on `linear`
such a Psi exceeds the evidence. Priors far from the truth cost so much that
the RLCT is not seen. A higher Psi need not predict better (002, appendix E). Means over converged repetitions
flatter a method that often fails: read the count. Hence the task is not ranked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.utils.data import TensorDataset

from bench import divergence, likelihoods, priors, randomness
from bench.contract import (
    Arrays,
    Budget,
    Engine,
    Method,
    Metric,
    Metrics,
    Problem,
    Row,
    Spec,
    Task,
    Undefined,
)
from bench.data import array_digest
from bench.errors import Diverged
from bench.settings import Count, Positive, settings
from bench.studies import bands
from bench.weights import Weights, forward

NAMES: dict[str, dict[str, object]] = {"singular_evidence": {}}

PRESETS: dict[str, dict[str, object]] = {"smoke": {"epochs": 20, "repetitions": 2, "draws": 20}}

GRID = np.linspace(0.5, 1, 51)
"""Inputs at which the function of the tanh network is kept (Figs 1 and 2)."""
LOWEST_PSI = -1e6
"""A repetition whose Psi lies below has not converged (000, section 7)."""

_BATCHES = 10
_FRESH = 5_000
"""Fresh inputs of the generalisation error."""
_FUNCTIONS = 500
"""Draws of the function that are kept."""
_BLOCK = 10
"""Draws whose outputs are held at once."""
_NONE = -1e300
"""Stands for a log likelihood that is not finite, or of a fit that diverged."""


# ------------------------------------------------------------------------------------- learning coefficients


def rlct_tanh(hidden: int) -> tuple[float, int]:
    """Learning coefficient and multiplicity of H tanh units on one input where the true weights are 0.

    With i = floor(sqrt(H)): (H + i^2 + i) / (4 i + 2), and 2 if i^2 = H, else 1 (002, Table 1).
    """
    i = math.isqrt(hidden)
    return (hidden + i * i + i) / (4 * i + 2), 2 if i * i == hidden else 1


def rlct_reduced_rank(inputs: int, outputs: int, hidden: int, rank: int) -> tuple[float, int]:
    """Learning coefficient and multiplicity of y = B A x, A `[hidden, inputs]`, B `[outputs, hidden]`.

    The truth B0 A0 has the given rank (002, Table 1; Aoyagi and Watanabe 2005).
    """
    m, n, h, r = inputs, outputs, hidden, rank
    if m + h < n + r:
        return (h * m - h * r + n * r) / 2, 1
    if n + h < m + r:
        return (h * n - h * r + m * r) / 2, 1
    if m + n < h + r:
        return m * n / 2, 1
    q = -((h + r) ** 2) - m**2 - n**2 + 2 * (h + r) * (m + n) + 2 * m * n
    return (q / 8, 1) if (m + h + n + r) % 2 == 0 else ((q + 1) / 8, 2)


def learning_coefficient(model: str, hidden: int, true_weight: float) -> tuple[float, int] | None:
    """Learning coefficient and multiplicity of a model of this task; None where none is known."""
    if model == "reduced_rank":
        return rlct_reduced_rank(hidden + 3, hidden, hidden, hidden)
    if model == "linear":
        return hidden / 2, 1
    return None if true_weight else rlct_tanh(hidden)


# ------------------------------------------------------------------------------------------------- models


class TanhNetwork(nn.Module):
    """sum_h b_h tanh(a_h x): weights a and b `[H]`.

    Args:
        hidden: H.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(hidden)), nn.Parameter(torch.empty(hidden))

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs `[B, 1]` for inputs `[B, 1]`."""
        return self.forward_samples({"a": self.a[None], "b": self.b[None]}, inputs)[0]

    def forward_samples(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Outputs `[S, B, 1]` for inputs `[B, 1]` under S stacked weights; see `bench.weights.forward`."""
        x, a, b = inputs[:, 0], weights["a"], weights["b"]
        if torch.compiler.is_compiling():
            return _FusedTanhSums.apply(x, a, b)[..., None]
        if is_batchedtensor(a):
            return _TanhSumsOfCopies.apply(x, a, b)[..., None]
        return _TanhSums.apply(x, a, b, True)[..., None]


class _TanhSums(torch.autograd.Function):
    """sum_h b_h tanh(a_h x), `[S, B]`, for x `[B]` and a, b `[S, H]`.

    Of s = sigmoid(2 a x), on some processors ten times faster: tanh = 2 s - 1 and tanh' = 4 s (1 - s).
    `keep` keeps all s `[S, B, H]` for the backward pass; without it they are made again, sample by sample,
    and never leave the cache.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, keep: bool) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.kept = len(a) * [None]
        sums = []
        for i, (twice, b_s) in enumerate(zip(2 * a, b, strict=True)):
            s = torch.outer(x, twice).sigmoid_()
            sums.append(s.mv(b_s))
            if keep:
                ctx.kept[i] = s
        return 2 * torch.stack(sums) - b.sum(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, a, b = ctx.saved_tensors
        both = torch.stack([gradient, gradient * x], 1)  # [S, 2, B], of which the second goes to a x
        first, second = [], []
        squares = a.new_empty(len(x), a.shape[1])  # one for all samples: it stays in the cache
        for twice, rows, kept in zip(2 * a, both, ctx.kept, strict=True):
            s = torch.outer(x, twice).sigmoid_() if kept is None else kept
            first.append(rows @ s)
            second.append(rows[1] @ torch.mul(s, s, out=squares))
        to_gradient, to_slope = torch.stack(first, 1)
        to_a = 4 * b * (to_slope - torch.stack(second))
        return None, to_a, 2 * to_gradient - gradient.sum(1, keepdim=True), None


class _FusedTanhSums(torch.autograd.Function):
    """The same for the compiler, which fuses each pass over `[S, H, B]` and keeps none.

    The sigmoid is spelt with exp2, since the compiler makes a tensor of every exp that is used twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b)
        return 2 * (b[..., None] * _sigmoids(x, a)).sum(1) - b.sum(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, a, b = ctx.saved_tensors
        s, g = _sigmoids(x, a), gradient[:, None]
        to_a = 4 * b * (s * (1 - s) * (g * x)).sum(2)
        return None, to_a, 2 * (s * g).sum(2) - gradient.sum(1, keepdim=True)


def _sigmoids(x: Tensor, a: Tensor) -> Tensor:
    """sigmoid(2 a x), `[S, H, B]`."""
    return 1 / (1 + torch.exp2(a[..., None] * x * (-2 / math.log(2))))


class _TanhSumsOfCopies(torch.autograd.Function):
    """The same under `vmap`, one copy after another: together their numbers leave the cache.

    A function of its own, since torch looks at the signature of one that has `vmap` at every call: 0.2 ms.
    """

    @staticmethod
    def forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return _TanhSums.apply(x, a, b, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Tensor) -> tuple[Tensor, int]:
        copies = (
            t.unbind(d) if d is not None else info.batch_size * (t,)
            for t, d in zip(arguments, in_dims, strict=True)
        )
        return torch.stack([_TanhSums.apply(*copy, False) for copy in zip(*copies, strict=True)]), 0


def _small(network: nn.Module) -> nn.Module:
    """Weights of standard deviation 1 / sqrt(fan in)."""
    for weight in network.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return network


def _tanh(hidden: int, dropout: float = 0.0, width: float = 1.0) -> nn.Module:
    return _small(TanhNetwork(hidden))


def _linear(widths: tuple[int, ...], dropout: float = 0.0, width: float = 1.0) -> nn.Module:
    """Linear layers without biases; the size of the model is the task's, so neither keyword changes it."""
    layers = (nn.Linear(before, after, bias=False) for before, after in pairwise(widths))
    return _small(nn.Sequential(*layers))


@settings
class Settings:
    """Settings of the evidence of singular models."""

    model: Literal["tanh", "reduced_rank", "linear"] = "tanh"
    """Model and truth: a tanh network, reduced rank regression, or linear regression, which is regular."""
    hidden: Count = 576
    """H, at least 1: hidden units; of the linear model, weights."""
    true_weight: float = 0.0
    """True value of every weight; reduced_rank has a truth of its own and ignores it."""
    prior_mean: float = 5.0
    """Mean of the normal prior of every weight."""
    prior_variance: Positive = 100.0
    """VARIANCE of the normal prior of every weight, above 0."""
    num_train: Annotated[int, Field(ge=10)] = 5000
    """n, at least 10: observations."""
    repetitions: Count = 10
    """Data sets, at least 1; one fit each."""
    epochs: Count = 2000
    """Epochs of ten batches, at least 1."""
    draws: Annotated[int, Field(ge=2)] = 100
    """Draws, at least 2, from which Psi is estimated."""


class SingularEvidence(Task):
    """Evidence lower bounds on models whose learning coefficient is known."""

    settings_class = Settings
    settings: Settings

    @property
    def spec(self) -> Spec:
        """What is measured."""
        bound = "the normalised evidence lower bound"
        found = {
            "psi": Metric(f"{bound}, mean over converged repetitions", "nats", np.inf, -np.inf),
            "psi_sd": Metric("its standard deviation over converged repetitions", "nats", 0, np.inf, True),
            "psi_standard_error": Metric("Monte Carlo error of psi", "nats", 0, np.inf),
            "converged": Metric("repetitions with psi >= -1e6", "repetitions", np.inf, 0),
            "elbo": Metric("psi - entropy, mean over the same", "nats", np.inf, -np.inf),
            "entropy": Metric("n S_n, mean over the same", "nats", 0, np.inf),
            "leading_term": Metric("-lambda log n + (m - 1) log log n", "nats", np.inf, -np.inf, True),
            "psi_minus_leading_term": Metric("psi - leading_term", "nats", np.inf, -np.inf, True),
            "generalisation_error": Metric("KL(p0 || p_vb) on fresh inputs", "nats", -np.inf, np.inf),
            "generalisation_standard_error": Metric("its Monte Carlo error", "nats", 0, np.inf),
        }
        if self.settings.model == "linear":
            found |= {
                "log_evidence": Metric("exact log normalised evidence, mean", "nats", np.inf, -np.inf),
                # Below 0 by more than the Monte Carlo error is no bound: a wrong log q.
                "gap_per_weight": Metric("(log_evidence - psi) / d", "nats", -np.inf, np.inf),
            }
        return Spec(
            question="How close does the evidence lower bound come to the log evidence of a singular model?",
            source="000, Tables 2 to 4; 002, section 7 and appendices D and E",
            version=1,
            metrics=found,
            main_metric="psi",
            requires=frozenset({"density"}),
            ranked=False,
            min_seeds=1,
        )

    # ---- the model and its truth

    def truth(self, inputs: Tensor) -> Tensor:
        """Noiseless observations `[B, K]` of inputs `[B, ...]`."""
        s = self.settings
        if s.model == "tanh":
            return s.true_weight * s.hidden * torch.tanh(s.true_weight * inputs)
        if s.model == "linear":
            return s.true_weight * inputs.sum(1, keepdim=True)
        return inputs[:, : s.hidden] + inputs[:, s.hidden :].sum(1, keepdim=True)

    def _inputs(self, size: int, generator: torch.Generator) -> Tensor:
        s = self.settings
        if s.model == "tanh":
            return 2 * torch.rand(size, 1, generator=generator) - 1
        return torch.randn(size, s.hidden + (3 if s.model == "reduced_rank" else 0), generator=generator)

    def own_data(self, part: str, *generators: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and observations of the part train, drawn by one generator.

        The held-out truth is the part test, drawn by two generators: fresh inputs `[5000, ...]`, and how far
        their observations lie from the truth `[5000, K]`.
        """
        if part == "train":
            return self.draw(*generators)
        fresh = self._inputs(_FRESH, generators[0])
        return fresh, torch.randn(self.truth(fresh).shape, generator=generators[1])

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """N inputs `[n, ...]` and observations `[n, K]`."""
        inputs = self._inputs(self.settings.num_train, generator)
        mean = self.truth(inputs)
        return inputs, mean + torch.randn(mean.shape, generator=generator)

    @property
    def leading_term(self) -> float | None:
        """-lambda log n + (m - 1) log log n; None where no learning coefficient is known."""
        s = self.settings
        known = learning_coefficient(s.model, s.hidden, s.true_weight)
        if known is None:
            return None
        coefficient, multiplicity = known
        log_n = math.log(s.num_train)
        return -coefficient * log_n + (multiplicity - 1) * math.log(log_n)

    def data_digest(self) -> str:
        """Digest over the data set of a fixed seed: those of a run are in its arrays (`data_digests`)."""
        inputs, targets = self.own_data("train", randomness.generator(0, "singular_evidence"))
        return array_digest({"inputs": inputs.numpy(), "targets": targets.numpy()})

    def problem(self) -> Problem:
        """The problem with the data set of a fixed seed."""
        return self._problems([self.own_data("train", randomness.generator(0, "singular_evidence"))])[0]

    def _problems(self, data: list[tuple[Tensor, Tensor]]) -> list[Problem]:
        s = self.settings
        if s.model == "tanh":
            network: Callable[..., nn.Module] = partial(_tanh, s.hidden)
        elif s.model == "linear":
            network = partial(_linear, (s.hidden, 1))
        else:
            network = partial(_linear, (s.hidden + 3, s.hidden, s.hidden))
        likelihood = likelihoods.Gaussian(1.0)
        prior = priors.normal(s.prior_mean, math.sqrt(s.prior_variance))
        return [Problem(network, likelihood, prior, TensorDataset(*d), None, s.num_train) for d in data]

    # ---- protocol

    def run(self, engine: Engine) -> Arrays:
        """Fits every data set, and weighs draws of every posterior."""
        s = self.settings
        data = [self.own_data("train", engine.generator("data", r)) for r in range(s.repetitions)]
        engine.stage("repetitions")

        def compute() -> Arrays:
            budget = Budget(s.epochs, -(-s.num_train // _BATCHES))
            methods = engine.fit_many(self._problems(data), budget, keep_diverged=True)
            parts = [self._weigh(engine, r, m, *data[r]) for r, m in enumerate(methods)]
            return {name: np.stack([p[name] for p in parts]) for name in parts[0]}

        arrays = engine.once(compute)
        digests = [array_digest({"inputs": x.numpy(), "targets": y.numpy()}) for x, y in data]
        arrays["data_digests"] = np.stack([np.frombuffer(bytes.fromhex(d), np.uint8) for d in digests])
        if "functions" in arrays:
            first = int(np.argmax(converged(arrays)))
            arrays["functions"] = arrays["functions"][first]
        return arrays

    def _weigh(self, engine: Engine, r: int, method: Method, inputs: Tensor, targets: Tensor) -> Arrays:
        """What is kept of one repetition."""
        s, noise = self.settings, targets - self.truth(inputs)
        found: Arrays = {"entropies": np.array(-_log_normal(noise).sum().item())}
        fresh, errors = self.own_data(
            "test", engine.generator("fresh", r), engine.generator("fresh noise", r)
        )
        if s.model == "linear":
            found["log_evidences"] = np.array(self._log_evidence(inputs, targets) + found["entropies"])
        if method.diverged:
            found |= {name: np.full(s.draws, _NONE) for name in ("log_likelihoods", "log_priors", "log_qs")}
            found["log_ratios"] = np.zeros(2 * _FRESH, np.float32)
            if s.model == "tanh":
                found["functions"] = np.zeros((_FUNCTIONS, len(GRID)), np.float32)
            return found
        with torch.no_grad():
            weights, log_q = method.sample_and_log_prob(s.draws, engine.generator("draws", r))
            prior = method.problem.prior({name: w[0].double() for name, w in weights.items()})
            log_prior = divergence.log_prob(prior, {name: w.double() for name, w in weights.items()})
            log_likelihood, log_ratios = [], []
            for low in range(0, len(log_q), _BLOCK):
                block = {name: w[low : low + _BLOCK] for name, w in weights.items()}
                log_likelihood.append(_log_normal(targets - forward(method.network, block, inputs)).sum(-1))
                missed = self.truth(fresh) - forward(method.network, block, fresh)
                mirrored = [_log_normal(errors) - _log_normal(missed + sign * errors) for sign in (1, -1)]
                log_ratios.append(torch.cat(mirrored, -1))
            ratios = math.log(len(log_q)) - (-torch.cat(log_ratios)).logsumexp(0)
            if s.model == "tanh":
                draws = method.sample_weights(_FUNCTIONS, engine.generator("functions", r))
                grid = torch.from_numpy(GRID[:, None]).float()
                found["functions"] = forward(method.network, draws, grid)[..., 0].float().numpy()
        found |= {"log_likelihoods": _finite(torch.cat(log_likelihood)), "log_priors": _finite(log_prior)}
        return found | {"log_qs": _finite(log_q), "log_ratios": _finite(ratios).astype(np.float32)}

    def _log_evidence(self, inputs: Tensor, targets: Tensor) -> float:
        """Exact log evidence of the linear model, in nats: y ~ N(X 1 mean, I + variance X X^T)."""
        s, x = self.settings, inputs.double()
        residual = targets.double()[:, 0] - s.prior_mean * x.sum(1)
        # By Woodbury and the determinant lemma, d x d in place of n x n.
        precision = torch.eye(s.hidden, dtype=torch.float64) / s.prior_variance + x.T @ x
        explained = x.T @ residual
        square = residual @ residual - explained @ torch.linalg.solve(precision, explained)
        log_det = torch.linalg.slogdet(precision).logabsdet + s.hidden * math.log(s.prior_variance)
        return float(-0.5 * (square + log_det + len(x) * math.log(2 * math.pi)))

    def targets(self) -> Arrays:
        """None: the truth is the task's own, and what it explains is weighed against it in the run."""
        return {}

    # ---- scoring

    def score(self, arrays: Arrays) -> Metrics:
        """Means over the converged repetitions.

        Raises:
            Diverged: If none converged.
        """
        kept, psi = converged(arrays), psis(arrays)
        if not kept.any():
            raise Diverged(f"none of the {len(kept)} repetitions converged (psi >= {LOWEST_PSI:g})")
        terms = _terms(arrays)[kept]
        count = int(kept.sum())
        psi_mean, leading = float(psi[kept].mean()), self.leading_term
        ratios = arrays["log_ratios"][kept].astype(np.float64)
        pairs = ratios.reshape(count, 2, -1).mean(1)  # an observation and its mirror image
        unknown = Undefined("no learning coefficient is known for this truth")
        one = Undefined("fewer than two repetitions converged")
        scores: Metrics = {
            "psi": psi_mean,
            "psi_sd": float(psi[kept].std(ddof=1)) if count > 1 else one,
            "psi_standard_error": _standard_error(terms),
            "converged": float(count),
            "elbo": float(terms.mean()),
            "entropy": float(arrays["entropies"][kept].mean()),
            "leading_term": unknown if leading is None else leading,
            "psi_minus_leading_term": unknown if leading is None else psi_mean - leading,
            "generalisation_error": float(ratios.mean()),
            "generalisation_standard_error": _standard_error(pairs),
        }
        if "log_evidences" in arrays:
            exact = float(arrays["log_evidences"][kept].mean())
            scores |= {"log_evidence": exact, "gap_per_weight": (exact - psi_mean) / self.settings.hidden}
        return scores

    def curves(self, arrays: Arrays) -> list[Row]:
        """Psi of every converged repetition."""
        kept = np.flatnonzero(converged(arrays))
        return [Row("psi", "repetitions", float(r), float(psis(arrays)[r])) for r in kept]

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Predictive band of the tanh network beside the truth's (Figs 1 and 2)."""
        if "functions" not in arrays or not converged(arrays).any():
            return {}
        truth = self.truth(torch.from_numpy(GRID[:, None]))[:, 0].numpy()
        return {"predictive": predictive_chart(arrays["functions"], truth, "Prediction")}


def predictive_chart(functions: np.ndarray, truth: np.ndarray, title: str) -> Any:
    """What the next observation at the inputs of GRID will be, 5 to 95%, beside the same of the truth.

    Args:
        functions: Draws of f, `[S, 51]`, finite.
        truth: The true f, `[51]`.
        title: Of the chart.
    """
    levels = (0.5, 0.05, 0.95)
    series = {
        "truth": bands.Band(*bands.mixture_quantiles(truth[None], levels)),
        "predictive": bands.Band(*bands.mixture_quantiles(functions, levels)),
    }
    caption = "median; band: 5 to 95%, observation noise included"
    return bands.chart(series, GRID.tolist(), [title, caption], "x", "y")


def _log_normal(residuals: Tensor) -> Tensor:
    """Log density `[..., B]` of residuals `[..., B, K]` under N(0, I), in nats, in double precision."""
    wide = residuals.double()
    return -0.5 * (wide.square().sum(-1) + wide.shape[-1] * math.log(2 * math.pi))


def _finite(values: Tensor) -> np.ndarray:
    return np.nan_to_num(values.double().numpy(), nan=_NONE, posinf=_NONE, neginf=_NONE)


def _terms(arrays: Arrays) -> np.ndarray:
    """Log p(D | w) + log prior(w) - log q(w) of every draw, `[R, S]`."""
    bad = (np.abs(np.stack([arrays[n] for n in ("log_likelihoods", "log_priors", "log_qs")])) >= 1e299).any(0)
    terms = arrays["log_likelihoods"] + arrays["log_priors"] - arrays["log_qs"]
    return np.where(bad, _NONE, terms)


def _standard_error(values: np.ndarray) -> float:
    """Of the mean over `[R, S]`, rows independent, each with its own spread."""
    rows, columns = values.shape
    return float(np.sqrt((values.var(1, ddof=1) / columns).sum()) / rows)


def psis(arrays: Arrays) -> np.ndarray:
    """Psi of every repetition, `[R]`, in nats; about -1e300 where a fit diverged."""
    return _terms(arrays).mean(1) + arrays["entropies"]


def converged(arrays: Arrays) -> np.ndarray:
    """Which repetitions count, `[R]`: Psi is at least -1e6."""
    return psis(arrays) >= LOWEST_PSI
