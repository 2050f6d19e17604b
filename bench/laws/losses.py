"""Laws of the loss that a method trains on: its gradients, its averages and what its terms are.

Statistical laws compare a mean with its own standard error under fixed seeds. The bound of 4.5 standard
errors is passed by chance once in 150,000 comparisons (normal approximation), that of 5 once in 1.7 million.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from bench.contract import Batch
from bench.divergence import log_prob
from bench.laws import problems
from bench.laws.cases import (
    BUDGET,
    Case,
    assert_mean_is,
    assert_same_prediction,
    differ,
    first,
    generator,
    in_double,
    log_scores,
    one_sample,
    optimised,
    predict,
)
from bench.laws.law import (
    BY_TERMS,
    NOISY,
    VARIATIONAL,
    lacking,
    law,
    predicts_otherwise,
)


@law(*problems.ALL, unfit=BY_TERMS)
def gradients_reach_every_parameter(case: Case) -> None:
    """After one step every trained parameter has a finite gradient that is not zero everywhere."""
    method = case.untrained()
    method.training_step(case.batch, 0)["loss"].backward()
    trained = {id(p) for p in optimised(method)}
    assert trained, "the optimiser gets no parameter"
    for name, p in method.named_parameters():
        assert id(p) in trained or not p.requires_grad, f"no optimiser gets {name}"
        if id(p) in trained:
            assert p.grad is not None, f"{name} has no gradient"
            assert p.grad.isfinite().all(), f"the gradient of {name} is not finite"
            assert p.grad.any(), f"the gradient of {name} is zero"


@law(*problems.ALL, unfit=NOISY)
def sample_gradients_average(case: Case, num_samples: int = 3) -> None:
    """The S-sample gradient of each loss term is the mean of the S one-sample gradients; so are the terms."""
    method = case.untrained().double()
    batch = in_double(case.batch)
    noise = in_double(method.draw_noise(num_samples, generator()))
    parameters = [p for p in method.parameters() if p.requires_grad]

    def evaluate(noise: dict[str, Tensor]) -> list[list[Tensor]]:
        terms = method.loss_terms(batch, noise)
        kind: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return [[t, *torch.autograd.grad(t, parameters, **kind)] for t in terms]

    together = evaluate(noise)
    singles = [evaluate(one_sample(noise, s)) for s in range(num_samples)]
    for term in (0, 1):
        for i, value in enumerate(together[term]):
            mean = torch.stack([single[term][i] for single in singles]).mean(0)
            assert_close(value, mean, rtol=1e-9, atol=1e-9)


@law(unfit=(lacking("loss_terms"),))
def batch_size_does_not_matter(case: Case, repetitions: int = 60) -> None:
    """The mean of the batches' losses, weighted by their rows, is the full batch's loss in expectation.

    With equal noise: methods whose noise does not depend on the rows agree exactly. False alarm: 2e-5.
    """
    method = case.untrained()
    rows = len(case.batch.inputs)
    sizes = [1, 6, rows - 7]
    batches = [Batch(*parts) for parts in zip(*(t.split(sizes) for t in case.batch[:2]), strict=True)]
    differences, full_loss = [], 0.0
    g = generator()
    with torch.no_grad():
        for _ in range(repetitions):
            noise = method.draw_noise(1, g)
            full = torch.stack(method.loss_terms(case.batch, noise))
            parts = [torch.stack(method.loss_terms(b, noise)) * len(b.inputs) / rows for b in batches]
            differences.append(torch.stack(parts).sum(0) - full)
            full_loss = full.abs().sum().item()
    assert_mean_is(torch.stack(differences), 0.0, slack=1e-5 * (1 + full_loss))


@law(unfit=(lacking("loss_terms"),))
def one_row_is_a_batch(case: Case) -> None:
    """A batch of one row has a finite loss that trains the network, and a prediction."""
    method = case.untrained()
    batch = Batch(*(t[:1] for t in case.batch[:2]))
    likelihood_term, prior_term = method.loss_terms(batch, method.draw_noise(1, generator()))
    assert likelihood_term.isfinite()
    assert prior_term.isfinite()
    likelihood_term.backward()
    assert any(p.grad is not None and p.grad.any() for p in method.parameters()), "the row trains nothing"
    fitted = case.fitted()
    assert first(predict(fitted, case.inputs[:1])).shape[1] == 1


@law("mlp", "regression", unfit=(lacking("weighted", "loss_terms"),), each=((2,), (0,)))
def weights_count_examples(case: Case, weight: int, repetitions: int = 80) -> None:
    """An example of weight 2 is the example twice, one of weight 0 is absent, in expectation over the noise.

    Exact where the noise does not depend on the rows. False alarm: 7e-6.
    """
    rows = torch.arange(len(case.batch.inputs))
    changed = rows < 10
    weights = torch.where(changed, float(weight), 1.0)
    weighted = case.on(problems.with_rows(case.problem, rows, weights))
    counted = case.on(problems.with_rows(case.problem, rows.repeat_interleave(weights.long())))
    a, b = weighted.untrained(), counted.untrained()
    g, differences, size = generator(), [], 0.0
    with torch.no_grad():
        for _ in range(repetitions):
            noise = a.draw_noise(1, g)
            expected = torch.stack(b.loss_terms(counted.batch, noise))
            differences.append(torch.stack(a.loss_terms(weighted.batch, noise)) - expected)
            size = expected.abs().sum().item()
    assert_mean_is(torch.stack(differences), 0.0, slack=1e-5 * (1 + size))


@law("mlp", unfit=(lacking("weighted"),))
def reweighted_fits_are_those_made_one_by_one(case: Case) -> None:
    """Fits under several weightings predict what fits to the weighted examples predict, made one by one.

    An example of weight 0 is not in the data, and all fits predict under the same draws.
    """
    rows = len(case.batch.inputs)
    weights = torch.rand(3, rows, generator=generator(6)) + 0.1
    weights[0], weights[1, ::3], weights[2, 5:] = 1.0, 0.0, 0.0
    together, alone = case.engine(), case.engine()
    method = together.fit_weighted(case.problem, weights, BUDGET)
    expected = []
    for w in weights:
        kept = w.nonzero().squeeze(1)
        expected.append(alone.fit(problems.with_rows(case.problem, kept, w[kept]), BUDGET))
    prediction = predict(method, case.inputs)
    singles = [predict(m, case.inputs) for m in expected]
    joined = {name: torch.cat([vars(p)[name] for p in singles]) for name in vars(prediction)}
    assert_same_prediction(prediction, type(prediction)(**joined))
    assert differ(singles[1], singles[0])


@law("mlp", unfit=(*BY_TERMS, lacking("weighted")))
def weights_reach_training(case: Case) -> None:
    """Weights of the data set reach the loss: with all of them zero there is no likelihood left."""
    rows = torch.arange(len(case.batch.inputs))
    method = case.on(problems.with_rows(case.problem, rows, torch.zeros(len(rows)))).fit()
    assert [row["likelihood_term"] for row in method.history] == [0.0] * len(method.history)


@law(unfit=(lacking("loss_terms"), predicts_otherwise))
def likelihood_term_is_of_the_predictions(case: Case, samples: int = 150) -> None:
    """The likelihood term is -log p(targets) under the predictive samples, in the mean. False alarm: 7e-6."""
    method = case.untrained()
    g = generator(7)
    with torch.no_grad():
        terms = [method.loss_terms(case.batch, method.draw_noise(1, g))[0] for _ in range(samples)]
    scores = -log_scores(predict(method, case.batch.inputs, samples), case.batch.targets).sum(1)
    if len(scores) == 1:
        scores = scores.expand(samples)
    assert_mean_is(torch.stack(terms) - scores, 0.0, slack=1e-4 * scores.mean().abs().item())


@law(*problems.ALL, unfit=VARIATIONAL)
def prior_term_is_the_divergence(case: Case, samples: int = 150) -> None:
    """The prior term is E_q[log q(w) - log prior(w)] over draws of the weights. False alarm: 7e-6."""
    method = case.untrained()
    g = generator(8)
    draws = method.sample_weights(samples, g)
    with torch.no_grad():
        ratios = method.log_prob(draws) - log_prob(method.prior, draws)
        terms = torch.stack(
            [method.loss_terms(case.batch, method.draw_noise(1, g))[1] for _ in range(samples)]
        )
    assert_mean_is(ratios - terms, 0.0, slack=1e-4 * terms.mean().abs().item())
