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
    linear        y = w . x, x ~ N(0, I_H), H weights, all of the truth `true_weight`

The log evidence of a data set tells whether a bound is one, and what it lacks. It is known of linear, and of
tanh up to 32 units under a prior of mean 0 (bench/studies/singular/evidence.py).

The generalisation error is KL(p0 || p_vb) of the predictive density, on 5,000 fresh inputs with the
observation and its mirror image about the truth.

Source: the paper "Variational Inference via Resolution of Singularities" 2022 (docs/sources.md), section 7,
Tables 2 to 4 and appendices D and E; learning coefficients from Aoyagi and Watanabe 2012 (tanh) and 2005
(reduced rank).
Deviations: the preset standard changes nothing of the protocol; what it changes of the methods is theirs.

What would mislead: log q is the method's own word, and one that understates it has a higher Psi; where the
evidence is known such a Psi exceeds it. Priors far from the truth cost so much that the RLCT is not seen.
A higher Psi need not predict better (appendix E of the paper). Means over converged repetitions flatter a
method that often fails: read the count. Hence the task is not ranked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bench import divergence, likelihoods, priors, randomness
from bench.contract import (
    Arrays,
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
    Undefined,
)
from bench.data import array_digest
from bench.errors import Diverged
from bench.settings import Count, Positive, settings
from bench.studies import singular
from bench.studies.singular import theory
from bench.studies.singular.charts import GRID, predictive_chart
from bench.studies.singular.models import MODELS, Model
from bench.weights import forward

NAMES: dict[str, dict[str, object]] = {"singular_evidence": {}}

PRESETS: dict[str, dict[str, object]] = {"smoke": {"epochs": 20, "repetitions": 2, "draws": 20}}

LOWEST_PSI = -1e6
"""A repetition whose Psi lies below has not converged (section 7 of the paper)."""

_ROW = ("model", "hidden", "true_weight", "prior_mean", "prior_variance", "num_train", "repetitions")
"""Settings that a row of the published tables names."""
_OF_LOG_Q = {
    "psi",
    "psi_sd",
    "psi_standard_error",
    "converged",
    "elbo",
    "psi_minus_leading_term",
    "gap_per_weight",
}
"""Metrics that rest on the log density of its draws, which the method alone knows."""
_BATCHES = 10
_FRESH = 5_000
"""Fresh inputs of the generalisation error."""
_LARGEST_ERROR = 0.1
"""Monte Carlo error in nats up to which a log evidence counts as known."""
_FUNCTIONS = 500
"""Draws of the function that are kept."""
_BLOCK = 10
"""Draws whose outputs are held at once."""
_NONE = -1e300
"""Stands for a log likelihood that is not finite, or of a fit that diverged."""


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
        if self.finds_evidence:
            missed = self.model.draws_evidence
            mean = "log normalised evidence, mean over the same"
            found |= {
                "log_evidence": Metric(mean, "nats", np.inf, -np.inf, missed),
                # Below 0 by more than the Monte Carlo errors is no bound: a wrong log q.
                "gap_per_weight": Metric("(log_evidence - psi) / d", "nats", -np.inf, np.inf, missed),
            }
        return Spec(
            question="How close does the evidence lower bound come to the log evidence of a singular model?",
            source="Variational Inference via Resolution of Singularities, 2022, section 7 and Tables 2 to 4",
            version=1,
            metrics=found,
            main_metric="psi",
            requires=frozenset({"density"}),
            ranked=False,
            min_seeds=1,
            self_reported=frozenset(_OF_LOG_Q & found.keys()),
        )

    @property
    def finds_evidence(self) -> bool:
        """Whether log evidences are looked for."""
        return self.model.finds_evidence(self.settings.prior_mean)

    # ---- the model and its truth

    @cached_property
    def model(self) -> Model:
        """The model with its truth."""
        return MODELS[self.settings.model](self.settings.hidden, self.settings.true_weight)

    def own_data(self, part: str, *generators: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and observations of the part train, drawn by one generator.

        The held-out truth is the part test, drawn by two generators: fresh inputs `[5000, ...]`, and how far
        their observations lie from the truth `[5000, K]`.
        """
        if part == "train":
            return self.draw(*generators)
        fresh = self.model.inputs(_FRESH, generators[0])
        return fresh, torch.randn(self.model.truth(fresh).shape, generator=generators[1])

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """N inputs `[n, ...]` and observations `[n, K]`."""
        inputs = self.model.inputs(self.settings.num_train, generator)
        mean = self.model.truth(inputs)
        return inputs, mean + torch.randn(mean.shape, generator=generator)

    @property
    def leading_term(self) -> float | None:
        """-lambda log n + (m - 1) log log n; None where no learning coefficient is known."""
        return theory.leading_term(self.model.learning_coefficient(), self.settings.num_train)

    def data_digest(self) -> str:
        """Digest over the data set of a fixed seed: those of a run are in its arrays (`data_digests`)."""
        inputs, targets = self.own_data("train", randomness.generator(0, "singular_evidence"))
        return array_digest({"inputs": inputs.numpy(), "targets": targets.numpy()})

    def problem(self) -> Problem:
        """The problem with the data set of a fixed seed."""
        return self._problems([self.own_data("train", randomness.generator(0, "singular_evidence"))])[0]

    def _problems(self, data: list[tuple[Tensor, Tensor]]) -> list[Problem]:
        s = self.settings
        likelihood = likelihoods.Gaussian(1.0)
        prior = priors.normal(s.prior_mean, math.sqrt(s.prior_variance))
        network: Callable[..., nn.Module] = self.model.network
        return [Problem(network, likelihood, prior, TensorDataset(*d), None, s.num_train) for d in data]

    # ---- protocol

    def run(self, engine: Engine) -> Arrays:
        """Fits every data set, and weighs draws of every posterior."""
        s = self.settings
        data = [self.own_data("train", engine.generator("data", r)) for r in range(s.repetitions)]
        engine.stage("repetitions")

        def compute() -> Arrays:
            budget = Budget(s.epochs, -(-s.num_train // _BATCHES))
            methods = engine.fit_many(self._problems(data), budget)
            parts = [self._weigh(engine, r, m, *data[r]) for r, m in enumerate(methods)]
            return {name: np.stack([p[name] for p in parts]) for name in parts[0]}

        arrays = engine.cached(compute)
        digests = [array_digest({"inputs": x.numpy(), "targets": y.numpy()}) for x, y in data]
        arrays["data_digests"] = np.stack([np.frombuffer(bytes.fromhex(d), np.uint8) for d in digests])
        if "functions" in arrays:
            first = int(np.argmax(converged(arrays)))
            arrays["functions"] = arrays["functions"][first]
        return arrays

    def _weigh(self, engine: Engine, r: int, method: Method, inputs: Tensor, targets: Tensor) -> Arrays:
        """What is kept of one repetition."""
        s, model = self.settings, self.model
        noise = targets - model.truth(inputs)
        found: Arrays = {"entropies": np.array(-_log_normal(noise).sum().item())}
        fresh, errors = self.own_data(
            "test", engine.generator("fresh", r), engine.generator("fresh noise", r)
        )
        if self.finds_evidence:
            generator = engine.generator("evidence", r)
            known = model.log_evidence(inputs, targets[:, 0], s.prior_mean, s.prior_variance, generator)
            found["log_evidences"] = np.array(known.value + found["entropies"])
            found["log_evidence_errors"] = np.array(known.standard_error)
        if method.diverged:
            found |= {name: np.full(s.draws, _NONE) for name in ("log_likelihoods", "log_priors", "log_qs")}
            found["log_ratios"] = np.zeros(2 * _FRESH, np.float32)
            if model.keeps_functions:
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
                missed = model.truth(fresh) - forward(method.network, block, fresh)
                mirrored = [_log_normal(errors) - _log_normal(missed + sign * errors) for sign in (1, -1)]
                log_ratios.append(torch.cat(mirrored, -1))
            ratios = math.log(len(log_q)) - (-torch.cat(log_ratios)).logsumexp(0)
            if model.keeps_functions:
                draws = method.sample_weights(_FUNCTIONS, engine.generator("functions", r))
                grid = torch.from_numpy(GRID[:, None]).float()
                found["functions"] = forward(method.network, draws, grid)[..., 0].float().numpy()
        found |= {"log_likelihoods": _finite(torch.cat(log_likelihood)), "log_priors": _finite(log_prior)}
        return found | {"log_qs": _finite(log_q), "log_ratios": _finite(ratios).astype(np.float32)}

    def targets(self) -> Arrays:
        """None: the truth is part of the task, and the run weighs the draws against it."""
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
        if self.finds_evidence:
            known = float(arrays["log_evidence_errors"][kept].max()) <= _LARGEST_ERROR
            exact = float(arrays["log_evidences"][kept].mean())
            missed = Undefined("draws of the inner weights miss the posterior: the log evidence is not known")
            scores["log_evidence"] = exact if known else missed
            scores["gap_per_weight"] = (exact - psi_mean) / self.model.num_weights if known else missed
        return scores

    def curves(self, arrays: Arrays) -> list[Row]:
        """Psi of every converged repetition."""
        kept = np.flatnonzero(converged(arrays))
        return [Row("psi", "repetitions", float(r), float(psis(arrays)[r])) for r in kept]

    def figures(self, arrays: Arrays) -> dict[str, Any]:
        """Predictive band of the tanh network beside the truth's (Figs 1 and 2)."""
        if "functions" not in arrays or not converged(arrays).any():
            return {}
        truth = self.model.truth(torch.from_numpy(GRID[:, None]))[:, 0].numpy()
        return {"predictive": predictive_chart(arrays["functions"], truth, "Prediction")}

    @classmethod
    def compare(cls, runs: Sequence[FinishedRun]) -> Comparison:
        """Rows beside the published ones, claims of the source with intervals, predictive bands, slopes."""
        return singular.compare([row(run) for run in runs])


def row(run: FinishedRun) -> singular.EvidenceRun:
    """A run as a row of the published tables."""
    s, kept = run.task.settings, converged(run.arrays)
    named = {f"task.{setting}" for setting in _ROW}
    changed = [
        f"{flag.partition('.')[2]}={value}" for flag, value in run.changed.items() if flag not in named
    ]
    true_weight = s.true_weight if run.task.model.has_true_weight else None
    error, of_error = "generalisation_error", "generalisation_standard_error"
    is_known = isinstance(run.metrics.get("log_evidence"), float)
    return singular.EvidenceRun(
        method=run.method_name,
        preset=", ".join([run.preset, *changed]),
        seed=run.seed,
        triplet=singular.Triplet(s.model, s.hidden, true_weight, s.prior_mean, s.prior_variance),
        num_train=s.num_train,
        epochs=s.epochs,
        psis=np.where(kept, psis(run.arrays), np.nan),
        log_evidences=run.arrays["log_evidences"] if is_known else np.full(len(kept), np.nan),
        digests=run.arrays["data_digests"],
        leading_term=run.task.leading_term,
        generalisation=(run.metrics[error], run.metrics[of_error]),
        functions=run.arrays.get("functions") if kept.any() else None,
    )


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
