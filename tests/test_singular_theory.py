"""What docs/tasks/singular_theory.md says of singular evidences, by quadrature; the page's numbers are these.

Equations are those of "Variational Inference via Resolution of Singularities" 2022 (docs/sources.md).

A standard form has K = prod_j xi_j^(2 k_j) and the prior prod_j (h_j + 1) xi_j^h_j on (0, 1]^d. With
lambda_j = (h_j + 1) / (2 k_j) the variables xi_j^(2 k_j) have densities lambda_j u^(lambda_j - 1) on (0, 1],
so that evidence and best bound depend on lambda_1, ..., lambda_d alone.
"""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special

from bench.methods.nf_gamma import (
    expected_log_prob,
    log_normalizer,
    truncated_moment,
    truncated_normalizer,
)
from bench.studies.singular.theory import rlct_reduced_rank, rlct_tanh

PAGE = Path(__file__).parent.parent / "docs" / "tasks" / "singular_theory.md"

FORMS = [
    ((1,), (0,)),
    ((1, 2), (0, 2)),
    ((1, 1), (0, 1)),
    ((1, 1), (0, 2)),
    ((2, 1), (1, 5)),
    ((2, 1), (0, 1)),
    ((1, 1), (1, 2)),
    ((1, 1, 1), (0, 1, 3)),
    ((1, 1), (0, 0)),
    ((1, 1, 1), (0, 0, 1)),
]
"""k and h of standard forms whose first variable has the least lambda_j; multiplicity 2 for the last two."""
SINGLE, DOUBLE = FORMS[:-2], FORMS[-2:]
SEVERAL = SINGLE[1:]


def vector(values):
    return torch.tensor(values, dtype=torch.float64)


def thresholds(form):
    """lambda_j of every variable."""
    return [(h + 1) / (2 * k) for k, h in zip(*form, strict=True)]


def rlct(form):
    """Least lambda_j, and how many variables have it (eq. 11)."""
    lams = thresholds(form)
    return min(lams), lams.count(min(lams))


def legendre(low, high, pieces, points=16):
    """Nodes and weights of Gauss-Legendre quadrature on equal pieces."""
    x, w = np.polynomial.legendre.leggauss(points)
    edges = np.linspace(low, high, pieces + 1)
    half = np.diff(edges)[:, None] / 2
    return (edges[:-1, None] + half * (x + 1)).ravel(), (half * w).ravel()


# ------------------------------------------------------------------------------------ evidence and bound


def evidence(lams, n):
    """Z_K(n) of a standard form, n up to 1e13 of any shape: over -log of the first u, the rest within."""
    first, *rest = lams
    n = np.asarray(n, float)
    if not rest:
        return first * special.gamma(first) * special.gammainc(first, n) * n**-first
    t, w = legendre(0, 30 + 35 / min(lams), 80)
    return evidence(rest, n[..., None] * np.exp(-t)) @ (w * first * np.exp(-first * t))


def leading_coefficient(form):
    """C of Z_K(n) ~ C n^-lambda (log n)^(m-1): b = prod (h_j + 1) times the corrected eq. 14."""
    (k, h), (lam, m) = form, rlct(form)
    others = [x - lam for x in thresholds(form) if x > lam]
    b = math.prod(x + 1 for x in h)
    return b * math.gamma(lam) / (math.factorial(m - 1) * math.prod(2 * x for x in k) * math.prod(others))


def bound(form, beta, n):
    """Psi_K of the truncated source with the form's own lambda and k and rates beta `[d]` (eq. 4)."""
    k, h = form
    lam, beta = vector(thresholds(form)), vector(beta)
    moment = truncated_moment(lam, beta)
    # E log q - log prior: the powers of xi cancel.
    divergence = -beta * moment - truncated_normalizer(lam, vector(k), beta).log() - (vector(h) + 1).log()
    return (-n * moment.prod() - divergence.sum()).item()


def rates_with(product, lams):
    """Rates beta_j at which beta_j G(lambda_j, beta_j) is `product`, which is below every lambda_j."""

    def excess(x, lam):
        return math.exp(x) * truncated_moment(vector([lam]), vector([math.exp(x)])).item() - product

    return [math.exp(optimize.brentq(excess, -40, 40, (lam,), xtol=1e-13)) for lam in lams]


def best_rates(form, n):
    """The one stationary point of `bound` in beta: there every beta_j G_j is n G_1 ... G_d."""
    lams = thresholds(form)
    lam, m = rlct(form)

    def rates(x):
        own = vector([math.exp(x)])
        product = (own * truncated_moment(vector([lam]), own)).item()
        return m * [math.exp(x)] + rates_with(product, [t for t in lams if t > lam])

    def excess(x):
        beta = vector(rates(x))
        moments = truncated_moment(vector([lam] * m + [t for t in lams if t > lam]), beta)
        return (n * moments.prod() - beta[0] * moments[0]).item()

    assert lams == sorted(lams[:m]) + lams[m:]
    assert lams[:m] == m * [lam]
    return rates(optimize.brentq(excess, -20, math.log(n) + 3, xtol=1e-13))


def supremum(form, n):
    """The supremum of Psi_K over the truncated family."""
    return bound(form, best_rates(form, n), n)


def shortfall(lam, least):
    """What one variable with lambda_j = `lam` > `least` costs the bound as n grows, in nats.

    log of E u^-lambda under lambda_j u^(lambda_j - 1), less its best bound with u^-lambda at E u.
    """
    (beta,) = rates_with(least, [lam])
    log_ratio = math.log(2 * lam * truncated_normalizer(vector([lam]), vector([1.0]), vector([beta])).item())
    return math.log(lam / (lam - least)) - (least - least * math.log(least / beta) + log_ratio)


def limit(form):
    """Limit of sup Psi_K + lambda log n."""
    lam, m = rlct(form)
    tied = (m - 1) * lam * (1 - math.log(lam)) + m * (math.log(lam) + math.lgamma(lam))
    return tied + sum(math.log(x / (x - lam)) - shortfall(x, lam) for x in thresholds(form) if x > lam)


def test_evidence_by_direct_quadrature():
    """The reduction to u_j = xi_j^(2 k_j) against integrals over xi itself, in one and two dimensions."""
    for (k,), (h,) in (((1,), (0,)), ((2,), (1,)), ((1,), (3,))):
        for n in (0.5, 20.0):
            direct = integrate.quad(lambda x: (h + 1) * x**h * math.exp(-n * x ** (2 * k)), 0, 1)[0]  # noqa: B023
            assert evidence(thresholds(((k,), (h,))), n) == pytest.approx(direct, rel=1e-9)
    for form in (FORMS[1], FORMS[3], DOUBLE[0]):
        (k, c), (h, i) = form
        for n in (1.0, 300.0):
            direct = integrate.dblquad(
                lambda y, x: (
                    (h + 1) * (i + 1) * x**h * y**i * math.exp(-n * x ** (2 * k) * y ** (2 * c))  # noqa: B023
                ),
                0, 1, 0, 1, epsabs=1e-12,
            )[0]  # fmt: skip
            assert evidence(thresholds(form), n) == pytest.approx(direct, rel=1e-8)


def test_evidence_by_partial_fractions():
    """With different lambda_j the density of -log K is a sum of exponentials: large n and three variables."""
    for form in SEVERAL:
        lams = thresholds(form)
        for n in (1e2, 1e6, 1e12):
            weights = [
                math.prod(b / (b - a) for j, b in enumerate(lams) if j != i) for i, a in enumerate(lams)
            ]
            expected = sum(w * evidence([a], n) for w, a in zip(weights, lams, strict=True))
            assert evidence(lams, n) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("form", SINGLE)
def test_leading_coefficient_for_multiplicity_1(form):
    """Z_K n^lambda tends to the corrected C; the next term is of order n^-(lambda_2 - lambda)."""
    lam, _ = rlct(form)
    ratios = [evidence(thresholds(form), n) * n**lam / leading_coefficient(form) for n in (1e6, 1e12)]
    assert ratios[1] == pytest.approx(1, abs=2e-3)
    assert abs(ratios[1] - 1) <= abs(ratios[0] - 1) + 1e-9


@pytest.mark.parametrize("form", DOUBLE)
def test_leading_coefficient_for_multiplicity_2(form):
    """Z_K n^lambda is linear in log n with slope C."""
    lam, _ = rlct(form)
    low, high = (evidence(thresholds(form), n) * n**lam for n in (1e9, 1e13))
    assert (high - low) / math.log(1e4) == pytest.approx(leading_coefficient(form), rel=1e-4)


def test_printed_constants_are_wrong():
    """Eq. 14 as printed has prod_{j>m} 2 k_j once too often; b = prod 1/(h_j + 1) is no density."""
    form = ((1, 2), (0, 2))
    lam, n = 0.5, 1e12
    unnormalised = evidence(thresholds(form), n) * n**lam / 3
    printed = math.gamma(lam) / (2 * 4 * 4 * (0.75 - lam))
    assert unnormalised == pytest.approx(4 * printed, rel=2e-3)
    mass = integrate.dblquad(lambda y, x: y**2 / 3, 0, 1, 0, 1)[0]
    assert mass == pytest.approx(1 / 9)


# ----------------------------------------------------------------------------------------- Theorem 5.1


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_bound_is_below_the_evidence(form):
    """For random rates and for the best: Psi_K <= log Z_K; in one dimension the best is exact."""
    lams = thresholds(form)
    g = np.random.default_rng(0)
    for n in (3.0, 1e2, 5e3, 1e9):
        log_evidence = math.log(evidence(lams, n))
        top = supremum(form, n)
        for _ in range(20):
            beta = np.exp(g.normal(0, 2, len(lams)) + np.log(best_rates(form, n)))
            assert bound(form, beta.tolist(), n) <= top + 1e-9
        assert top <= log_evidence + 1e-9
        if len(lams) == 1:
            assert top == pytest.approx(log_evidence, abs=1e-9)
        else:
            assert top < log_evidence - 1e-3


def general_bound(form, lam, k, beta, n):
    """Psi_K of the truncated source with any parameters, each expectation by quadrature over log xi."""
    t, w = legendre(-80, 0, 400)
    total, moment = 0.0, 1.0
    for own_k, own_h, *source in zip(*form, lam, k, beta, strict=True):
        s, c, b = source
        log_density = 2 * c * s * t - b * np.exp(2 * c * t)  # of log xi
        mass = w * np.exp(log_density - log_density.max())
        mass /= mass.sum()
        log_q = log_density - math.log(w @ np.exp(log_density)) - t
        moment *= mass @ np.exp(2 * own_k * t)
        total -= mass @ (log_q - own_h * t - math.log(own_h + 1))
    return total - n * moment


@pytest.mark.slow
@pytest.mark.parametrize("form", [FORMS[2], FORMS[3], DOUBLE[0]])
def test_true_lambda_and_k_are_optimal(form):
    """Over lambda, k and beta together the supremum is where lambda and k are the form's own."""
    n, dim = 1000.0, len(form[0])
    beta = best_rates(form, n)
    own = [*thresholds(form), *form[0], *beta]
    assert general_bound(form, *np.reshape(own, (3, dim)), n) == pytest.approx(bound(form, beta, n), abs=1e-7)
    top = bound(form, beta, n)
    g = np.random.default_rng(1)
    for _ in range(3):
        start = np.log(own) + g.normal(0, 0.3, 3 * dim)
        found = optimize.minimize(
            lambda x: -general_bound(form, *np.exp(x.reshape(3, dim)), n),
            start,
            method="Nelder-Mead",
            options={"maxiter": 3000, "xatol": 1e-6, "fatol": 1e-9},
        )
        assert -found.fun <= top + 1e-7
        assert -found.fun > top - 0.02


@pytest.mark.parametrize("form", SINGLE)
def test_leading_term_of_theorem_holds_and_its_constant_does_not(form):
    """The best Psi_K + lambda log n converges, to log C less the shortfall of every further variable."""
    lam, _ = rlct(form)
    lost = sum(shortfall(x, lam) for x in thresholds(form)[1:])
    assert limit(form) == pytest.approx(math.log(leading_coefficient(form)) - lost, abs=1e-12)
    for n in (5e3, 1e9):
        assert supremum(form, n) + lam * math.log(n) == pytest.approx(limit(form), abs=1e-6)
    assert (lost > 0.02) == (len(form[0]) > 1)


def test_no_reading_of_the_published_constant_is_right():
    """The printed log C(d), without log Gamma(lambda), is above one supremum and below another."""
    for form, side in ((((1, 2), (0, 2)), 1), (((2, 1), (0, 1)), -1)):
        lam, _ = rlct(form)
        away = math.log(leading_coefficient(form)) - math.lgamma(lam) - limit(form)
        assert away * side > 0.02


def test_shortfall_is_that_of_jensens_inequality():
    """Against the best density of any kind for one variable, on a grid: exponential tilting of the prior."""
    for lam, least in ((1.0, 0.5), (0.75, 0.5), (2.0, 0.25)):
        t, w = legendre(0, 60, 200)  # -log u
        prior = w * lam * np.exp(-lam * t)

        def value(log_rate, prior=prior, t=t, least=least):
            weight = np.exp(-math.exp(log_rate) * np.exp(-t))
            q = prior * weight / (prior @ weight)
            kl = q @ (-math.exp(log_rate) * np.exp(-t)) - math.log(prior @ weight)
            return least * math.log(q @ np.exp(-t)) + kl

        best = -optimize.minimize_scalar(value, bounds=(-5, 5), method="bounded", options={"xatol": 1e-9}).fun
        assert math.log(lam / (lam - least)) - best == pytest.approx(shortfall(lam, least), abs=1e-7)


def test_shortfalls_of_the_page():
    """0.03 nats (lambda_j = 6 lambda) to 0.60 nats (1.5 lambda) for lambda = 1/2."""
    assert shortfall(3.0, 0.5) == pytest.approx(0.0295, abs=5e-5)
    assert shortfall(1.5, 0.5) == pytest.approx(0.1228, abs=5e-5)
    assert shortfall(1.0, 0.5) == pytest.approx(0.2957, abs=5e-5)
    assert shortfall(0.75, 0.5) == pytest.approx(0.5949, abs=5e-5)


@pytest.mark.parametrize("form", SINGLE)
def test_gap_stays_bounded_with_the_published_rates(form):
    """With beta_1 = n and every other beta_j = 1 Psi_K + lambda log n converges, as eq. 7 needs."""
    lam, _ = rlct(form)
    values = [
        bound(form, [n, *(1.0 for _ in form[0][1:])], n) + lam * math.log(n) for n in (1e3, 1e6, 1e9, 1e12)
    ]
    assert max(values) - min(values) < 1e-9
    assert values[0] <= limit(form) + 1e-9


@pytest.mark.parametrize("form", DOUBLE)
def test_multiplicity_2_costs_the_whole_log_log_term(form):
    """The best Psi_K + lambda log n converges while log Z_K + lambda log n grows as log log n."""
    lam, _ = rlct(form)
    lams = thresholds(form)
    for n in (1e9, 1e12):
        assert supremum(form, n) + lam * math.log(n) == pytest.approx(limit(form), abs=1e-4)
    gaps = [math.log(evidence(lams, n)) - supremum(form, n) for n in (5e3, 1e9, 1e13)]
    assert gaps[0] < gaps[1] < gaps[2]
    slope = (gaps[2] - gaps[1]) / (math.log(math.log(1e13)) - math.log(math.log(1e9)))
    assert slope == pytest.approx(1, abs=0.1)


def test_published_rates_for_multiplicity_2_do_no_better():
    """beta_j = n^(1/2), as section 5 suggests for m > 1, stays below a bound without log log n too."""
    form = DOUBLE[0]
    values = [bound(form, 2 * [n**0.5], n) + 0.5 * math.log(n) for n in (1e4, 1e8, 1e12)]
    assert values == pytest.approx(3 * [-0.25 + 1 + 2 * math.log(0.5 * math.gamma(0.5))], abs=1e-6)
    assert values[0] < limit(form)


def row(form):
    """A row of the page's table."""
    lam, m = rlct(form)
    cells = ["(" + ", ".join(f"{x:g}" for x in thresholds(form)) + ")", f"{m}"]
    cells += [f"{math.log(leading_coefficient(form)):.3f}"]
    for n in (1e2, 5e3, 1e12):
        log_evidence = math.log(evidence(thresholds(form), n))
        cells += [f"{log_evidence + lam * math.log(n):.3f}", f"{log_evidence - supremum(form, n):.3f}"]
    return f"| {' | '.join([*cells, f'{limit(form):.3f}'])} |".replace("-0.000", "0.000")


def test_numbers_of_the_page():
    """The table of the page is what this file computes."""
    text = PAGE.read_text()
    missing = [line for line in map(row, FORMS) if line not in text]
    assert not missing, "\n".join(missing)


# ------------------------------------------------------------------------------------------- Lemma C.1


def untruncated_bound(form, lam, k, beta, n):
    """What the proof of Lemma C.1 computes of untruncated sources, with b = prod (h_j + 1)."""
    own_k, h = (vector(x) for x in form)
    lam, k, beta = vector(lam), vector(k), vector(beta)
    power = own_k / k
    moment = (torch.lgamma(lam + power) - torch.lgamma(lam) - power * beta.log()).exp().prod()
    log_prior = h * (torch.digamma(lam) - beta.log()) / (2 * k) + (h + 1).log()
    return (-n * moment - expected_log_prob(lam, k, beta) + log_prior.sum()).item()


def test_lemma_by_quadrature():
    """Every expectation over (0, inf), for parameters that are not the form's own."""
    form, n = ((2, 1), (1, 3)), 7.0
    lam, k, beta = (1.3, 0.7), (1.5, 2.0), (2.0, 0.4)
    moment, rest = 1.0, 0.0
    for own_k, h, a, c, b in zip(*form, lam, k, beta, strict=True):
        mass = integrate.quad(lambda x: x ** (2 * c * a - 1) * math.exp(-b * x ** (2 * c)), 0, 20)[0]  # noqa: B023

        def q(x, mass=mass, a=a, c=c, b=b):
            return x ** (2 * c * a - 1) * math.exp(-b * x ** (2 * c)) / mass

        def gain(x, q=q, h=h):
            return q(x) * (h * math.log(x) + math.log(h + 1) - math.log(q(x))) if q(x) > 0 else 0.0

        moment *= integrate.quad(lambda x: q(x) * x ** (2 * own_k), 0, 20)[0]  # noqa: B023
        rest += integrate.quad(gain, 0, 20, epsabs=1e-11)[0]
    assert untruncated_bound(form, lam, k, beta, n) == pytest.approx(rest - n * moment, rel=1e-8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("factor", [1.0, 0.6, 3.0])
def test_lemma_holds_for_any_lambda_with_the_right_k(form, factor):
    """With beta_1 = n its Psi_K + lambda log n is one constant, whatever n."""
    lam, _ = rlct(form)
    shapes = [factor * x for x in thresholds(form)]
    values = [
        untruncated_bound(form, shapes, form[0], [n, *(2.0 for _ in form[0][1:])], n) + lam * math.log(n)
        for n in (1e2, 1e6, 1e12)
    ]
    assert values == pytest.approx(3 * values[:1], abs=1e-9)


def test_lemma_needs_the_right_k():
    """With k_1 twice too large and beta_1 = n the bound falls as the square root of n."""
    form = ((1, 1), (0, 2))
    values = [untruncated_bound(form, (0.5, 1.5), (2, 1), (n, 1.0), n) for n in (1e4, 1e6, 1e8)]
    assert values[1] / values[0] == pytest.approx(10, rel=0.05)
    assert values[2] / values[1] == pytest.approx(10, rel=0.01)


def test_lemma_is_no_bound_on_the_evidence():
    """The untruncated source has mass outside the cube, where the prior is 0.

    With one variable next to none; with two it exceeds log Z_K by 1.42 nats, and without limit as the second
    rate falls.
    """
    single = ((1,), (0,))
    assert untruncated_bound(single, [0.5], [1], [50.0], 50.0) == pytest.approx(
        math.log(evidence([0.5], 50.0)), abs=1e-10
    )
    form, lams = ((1, 1), (0, 2)), (0.5, 1.5)
    for n in (1e4, 1e8):
        value = untruncated_bound(form, lams, form[0], (n, lams[0]), n)
        assert value - math.log(evidence(lams, n)) == pytest.approx(1.42, abs=0.005)
    values = [untruncated_bound(form, lams, form[0], (1e4 * s, 0.5 / s), 1e4) for s in (1, 1e3, 1e6)]
    assert values[1] - values[0] == pytest.approx(math.log(1e3))
    assert values[2] > 0 > math.log(evidence(lams, 1e4))


# ------------------------------------------------------------------------------------------ Appendix A


def toy_evidence(n):
    """Z_K(n) of a tanh(b x), (a, b) and x uniform on [0, 1]: over a by the error function, over log b."""
    t, w = legendre(-math.log(n) - 60, 0, 200, 40)
    b = np.exp(t)
    square = np.where(b < 1e-2, b**2 / 3 - 2 * b**4 / 15, 1 - np.tanh(b) / b)  # E tanh^2(b x)
    root = np.sqrt(n * square / 2)
    return w @ (b * math.sqrt(math.pi) / 2 * special.erf(root) / root)


def fitted_rlct(log_evidences, n):
    """RLCT and multiplicity by least squares of log Z on log n, log log n and a constant."""
    x = np.log(n)
    columns = np.stack([-x, np.log(x), np.ones_like(x)], 1)
    lam, m_less_1, _ = np.linalg.lstsq(columns, log_evidences, rcond=None)[0]
    return lam, m_less_1 + 1


def test_toy_evidence_by_direct_quadrature():
    """Over (a, b) with E tanh^2(b x) = 1 - tanh(b)/b, and that by quadrature over x."""
    for b in (0.3, 1.0):
        square = integrate.quad(lambda x: math.tanh(b * x) ** 2, 0, 1)[0]  # noqa: B023
        assert square == pytest.approx(1 - math.tanh(b) / b, rel=1e-10)
    for n in (2.0, 5000.0):
        direct = integrate.dblquad(
            lambda a, b: math.exp(-n * a * a * (1 - math.tanh(b) / b) / 2),  # noqa: B023
            1e-4, 1, 0, 1, epsabs=1e-11,
        )[0]  # fmt: skip
        assert toy_evidence(n) == pytest.approx(direct + 1e-4, rel=1e-4)


def test_toy_has_rlct_one_half_and_multiplicity_2():
    """Z_K sqrt(n) = A log n + B with A = sqrt(6 pi)/4; the fit over n = 1e20 to 1e100 agrees."""
    values = [toy_evidence(n) * math.sqrt(n) for n in (1e6, 1e9, 1e12)]
    slope = math.sqrt(6 * math.pi) / 4
    assert np.diff(values) == pytest.approx(2 * [slope * math.log(1e3)], rel=1e-4)
    assert values[2] - slope * math.log(1e12) == pytest.approx(0.3934, abs=1e-4)
    n = np.logspace(20, 100, 9)
    lam, m = fitted_rlct(np.log([toy_evidence(x) for x in n]), n)
    assert lam == pytest.approx(0.5, abs=1e-3)
    assert m == pytest.approx(2, abs=0.02)


def test_toy_at_the_sample_size_of_the_experiments():
    """With n = 5000 the two leading terms are 0.12 nats below the log evidence."""
    n = 5000
    leading = -0.5 * math.log(n) + math.log(math.log(n))
    assert math.log(toy_evidence(n)) - leading == pytest.approx(0.124, abs=0.001)


# ------------------------------------------------------------------------------ the generalized gamma

SOURCES = list(itertools.product((0.3, 1.0, 2.5), (0.5, 1.0, 3.0), (0.2, 1.0, 30.0)))
"""lambda, k and beta."""


@pytest.mark.parametrize(("lam", "k", "beta"), SOURCES)
def test_normalisers_and_moments_by_quadrature(lam, k, beta):
    """Over log xi: both normalisers, E xi^2k of the truncated source, E log q of the untruncated one."""
    t, w = legendre(-40 / (lam * k), 0, 200)
    u, v = legendre(0, math.log(60 / beta + 60) / (2 * k), 200)

    def density(t):  # of log xi, not normalised
        return np.exp(2 * k * lam * t - beta * np.exp(2 * k * t))

    arguments = vector([lam]), vector([k]), vector([beta])
    inside, outside = w @ density(t), v @ density(u)
    assert truncated_normalizer(*arguments).item() == pytest.approx(inside, rel=1e-10)
    assert log_normalizer(*arguments).item() == pytest.approx(math.log(inside + outside), abs=1e-10)
    moment = w @ (density(t) * np.exp(2 * k * t)) / inside
    assert truncated_moment(vector([lam]), vector([beta])).item() == pytest.approx(moment, rel=1e-10)
    s, mass = np.concatenate([t, u]), np.concatenate([w, v])
    log_q = (2 * k * lam - 1) * s - beta * np.exp(2 * k * s) - math.log(inside + outside)
    expected = (mass * density(s) / (inside + outside)) @ log_q
    assert expected_log_prob(*arguments).item() == pytest.approx(expected, abs=1e-8)


def test_expected_log_prob_sums_over_the_entries():
    """A scalar, and one term per entry."""
    lam, k, beta = (vector(x) for x in zip(*SOURCES, strict=True))
    terms = [expected_log_prob(lam[[i]], k[[i]], beta[[i]]).item() for i in range(len(lam))]
    together = expected_log_prob(lam, k, beta)
    assert together.shape == ()
    assert together.item() == pytest.approx(sum(terms))


# ------------------------------------------------------------------------------- learning coefficients


def test_rlct_of_table_1():
    """Table 1 of the paper: RLCT; and the multiplicities of section 7."""
    assert [rlct_tanh(h) for h in (576, 1024)] == [(12.0, 2), (16.0, 2)]
    assert [rlct_reduced_rank(h + 3, h, h, h) for h in (24, 32)] == [(324.0, 1), (560.0, 1)]


def test_tanh_by_hand_and_by_the_formula():
    """H = 1 is the toy of appendix A. H = 2, 3, 4: 2/3, 5/6, 1; a square number has multiplicity 2."""
    expected = [(1 / 2, 2), (2 / 3, 1), (5 / 6, 1), (1.0, 2), (11 / 10, 1)]
    assert [rlct_tanh(h) for h in range(1, 6)] == [(pytest.approx(x), m) for x, m in expected]


def test_tanh_with_two_units_by_quadrature():
    """E over b ~ N(0, I) of exp(-n K) is det(I + n S(a))^(-1/2), S the Gram matrix of tanh(a_h x).

    Over a ~ N(0, I) by quadrature over a_1 and the ratio a_2/a_1, with the determinant from 2 x 2 minors,
    which keep their digits. The slope of -log Z in log n around n = 1e16 is 2/3: a second factor log n would
    take 0.027 away.
    """
    x, wx = np.polynomial.legendre.leggauss(12)
    x, wx = (x + 1) / 2, wx / 2  # S is even in x
    u, wu = legendre(-29, math.log(6), 40, 6)
    v, wv = legendre(-15, math.log(0.5), 20, 6)
    ratio = np.concatenate([np.exp(v), 1 - np.exp(v)])
    first, second = np.exp(u)[:, None], np.exp(u)[:, None] * ratio
    f, g = np.tanh(first[..., None] * x), np.tanh(second[..., None] * x)
    trace = (f**2 + g**2) @ wx
    i, j = np.triu_indices(12, 1)
    determinant = (f[..., i] * g[..., j] - f[..., j] * g[..., i]) ** 2 @ (wx[i] * wx[j])
    # da_1 da_2 = a_1 da_1 dratio; four signs, and two orders of |a_1| and |a_2|.
    prior = 8 * np.exp(-(first**2 + second**2) / 2) / (2 * math.pi) * first**2
    weights = prior * wu[:, None] * np.tile(wv * np.exp(v), 2)

    def log_evidence(n):
        return math.log((weights * (1 + n * trace + n**2 * determinant) ** -0.5).sum())

    assert log_evidence(1e-9) == pytest.approx(0, abs=1e-5)
    slope = (log_evidence(1e15) - log_evidence(1e17)) / math.log(100)
    assert slope == pytest.approx(rlct_tanh(2)[0], abs=5e-4)


CASES = list(itertools.product(range(1, 7), range(1, 7), range(1, 7)))
"""Inputs, outputs and hidden units."""


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # (inputs M, outputs N, hidden H, rank r); K in brackets
        ((1, 1, 1, 0), (1 / 2, 2)),  # case 1 [(ab)^2]: the toy's standard form
        ((1, 1, 1, 1), (1 / 2, 1)),  # case 1 [(ab - 1)^2]: a smooth curve
        ((2, 1, 1, 0), (1 / 2, 1)),  # case 1 [b^2 |a|^2]: 1/2 from b, 2/2 from a
        ((2, 2, 1, 0), (1.0, 2)),  # case 1 [|b|^2 |a|^2]: 2/2 from both
        ((1, 1, 2, 0), (1 / 2, 1)),  # case 1 [(b.a)^2]: a cone in four dimensions, 4/4 at its tip
        ((2, 2, 2, 2), (2.0, 1)),  # case 1: BA is any matrix near the truth, 4 numbers
        ((1, 3, 1, 0), (1 / 2, 1)),  # case 2 [|b|^2 a^2]: 3/2 from b, 1/2 from a
        ((1, 4, 1, 1), (2.0, 1)),  # case 2: BA is any vector near the truth, 4 numbers
        ((3, 1, 1, 0), (1 / 2, 1)),  # case 3: the inputs and outputs of case 2 swapped
        ((6, 3, 3, 3), (9.0, 1)),  # case 3: BA is any matrix near the truth, 18 numbers
        ((1, 1, 3, 0), (1 / 2, 1)),  # case 4 [(b.a)^2]: a cone in six dimensions, 6/4 at its tip
        ((1, 1, 2, 1), (1 / 2, 1)),  # case 4: one smooth equation
    ],
)
def test_reduced_rank_by_hand(shape, expected):
    """Where K is a monomial after at most one blow-up, or regular in the product BA."""
    assert rlct_reduced_rank(*shape) == expected


@pytest.mark.parametrize("size", range(1, 6))
def test_reduced_rank_with_one_unit_is_a_standard_form(size):
    """K = |b|^2 |a|^2/2 in polar coordinates: lambda_j = M/2 and N/2."""
    for other in range(1, 6):
        expected = (min(size, other) / 2, 2 if size == other else 1)
        assert rlct_reduced_rank(size, other, 1, 0) == expected


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (3, 3), (3, 4), (2, 5), (1, 4)]
)
def test_reduced_rank_with_two_units_by_quadrature(inputs, outputs):
    """Rank 0: E over A of exp(-n |BA|^2/2) is det(I + n B'B)^(-M/2), B'B a 2 x 2 Wishart matrix.

    Over its two eigenvalues by quadrature. The slope of -log Z in log n from 1e6 to 1e14 is lambda; m is told
    by the fit.
    """
    t, w = legendre(-75, math.log(80 + 4 * outputs), 120)
    s = np.exp(t)
    single = w * s ** ((outputs - 1) / 2) * np.exp(-s / 2)
    density = single[:, None] * single * np.abs(s[:, None] - s)
    n = np.logspace(6, 14, 9)
    factors = [(1 + x * s) ** (-inputs / 2) for x in n]
    log_evidences = np.log([f @ density @ f / density.sum() for f in factors])
    lam, m = fitted_rlct(log_evidences, n)
    expected = rlct_reduced_rank(inputs, outputs, 2, 0)
    assert lam == pytest.approx(expected[0], abs=0.01)
    assert m == pytest.approx(expected[1], abs=0.25)


def test_reduced_rank_laws():
    """Swapping inputs and outputs, taking the rank out of every size, and lambda <= min(d, MN)/2.

    Rank r is r (M + N - r) regular directions, beside rank 0 with every size less by r.
    """
    for m, n, h in CASES:
        for r in range(min(m, n, h) + 1):
            lam, multiplicity = rlct_reduced_rank(m, n, h, r)
            assert rlct_reduced_rank(n, m, h, r) == (lam, multiplicity)
            assert 0 <= lam <= min(h * (m + n), m * n) / 2
            if r < min(m, n, h):
                rest = rlct_reduced_rank(m - r, n - r, h - r, 0)
                assert (lam - r * (m + n - r) / 2, multiplicity) == rest
            else:
                assert (lam, multiplicity) == (r * (m + n - r) / 2, 1)


def test_tanh_is_at_most_regular_and_grows_with_the_units():
    """At most d/2 = H, and a further unit never lowers it."""
    lams = [rlct_tanh(h)[0] for h in range(1, 200)]
    assert all(lam <= h for h, lam in enumerate(lams, 1))
    assert lams == sorted(lams)
