"""Coresets against a brute-force search of every choice."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import UsageError
from bench.studies import coreset
from bench.studies.coreset import k_center


def brute_force(points, size):
    """As defined, in plain Python: every point against every chosen one."""
    chosen = [0]
    while len(chosen) < size:
        best, farthest = None, -1.0
        for i in range(len(points)):
            if i in chosen:
                continue
            nearest = min(math.dist(points[i], points[c]) for c in chosen)
            if nearest > farthest:  # of equals the first stays
                best, farthest = i, nearest
        chosen.append(best)
    return chosen


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_against_brute_force_on_a_grid_full_of_ties(count, dimensions, seed):
    """Whole coordinates from 0 to 2: copies and equal distances everywhere."""
    points = np.random.default_rng(seed).integers(0, 3, (count, dimensions)).astype(float)
    for size in {1, (count + 1) // 2, count}:
        assert k_center(points, size).tolist() == brute_force(points.tolist(), size)


def test_against_brute_force_in_many_pieces(monkeypatch):
    points = torch.randn(101, 7, generator=torch.Generator().manual_seed(0))
    expected = brute_force(points.double().tolist(), 25)
    assert k_center(points, 25).tolist() == expected
    monkeypatch.setattr(coreset, "_CHUNK", 20)
    assert k_center(points, 25).tolist() == expected


def test_by_hand():
    """On a line: from 0 the end at 10, then the middle, then the first of 2 and 7, each 2 away."""
    line = [0.0, 2.0, 5.0, 7.0, 10.0]
    assert k_center(torch.tensor(line)[:, None], 5).tolist() == [0, 4, 2, 1, 3]


def test_no_point_twice_even_among_copies():
    assert k_center(torch.ones(4, 3), 4).tolist() == [0, 1, 2, 3]
    assert k_center(torch.zeros(3, 0), 2).tolist() == [0, 1]


@pytest.mark.parametrize(
    "points",
    [
        torch.tensor([[0, 0], [255, 0], [3, 0]], dtype=torch.uint8),
        np.array([[0, 0], [255, 0], [3, 0]], dtype=np.uint8),
        np.array([[0, 0], [255, 0], [3, 0]], dtype=np.float32),
        torch.tensor([[0, 0], [255, 0], [3, 0]], dtype=torch.bfloat16, requires_grad=True),
        [[0, 0], [255, 0], [3, 0]],
    ],
    ids=["uint8 tensor", "uint8 array", "float32 array", "bfloat16 with gradient", "list"],
)
def test_any_real_type_gives_a_long_tensor(points):
    """Differences of unsigned bytes must not wrap round."""
    chosen = k_center(points, 3)
    assert chosen.tolist() == [0, 1, 2]
    assert (chosen.dtype, chosen.ndim, chosen.requires_grad) == (torch.int64, 1, False)


def test_points_stay_as_they_are():
    points = torch.randn(20, 3)
    before = points.clone()
    k_center(points, 5)
    assert torch.equal(points, before)


@pytest.mark.parametrize("size", [0, -1, 6, 2.5, True, None, "2"])
def test_wrong_size_is_refused_in_one_line(size):
    for choose in (k_center, lambda p, s: coreset.random(p, s, torch.Generator())):
        with pytest.raises(
            UsageError, match=f"size must be a whole number from 1 to 5, not {size}"
        ) as caught:
            choose(torch.zeros(5, 2), size)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (torch.zeros(5), "must be [N, D], not of shape [5]"),
        (torch.zeros(5, 2, 2), "must be [N, D], not of shape [5, 2, 2]"),
        (torch.zeros(0, 2), "from 1 to 0, not 1"),
        (torch.tensor([[0.0], [math.nan]]), "finite"),
        (torch.tensor([[0.0], [math.inf]]), "finite"),
    ],
)
def test_wrong_points_are_refused_in_one_line(points, message):
    with pytest.raises(UsageError) as caught:
        k_center(points, 1)
    assert message in str(caught.value)


def test_random_draws_without_replacement_from_its_own_generator():
    points = torch.zeros(50, 2)
    state = torch.get_rng_state()
    chosen = coreset.random(points, 30, torch.Generator().manual_seed(3))
    assert torch.equal(state, torch.get_rng_state())
    assert (chosen.dtype, len(set(chosen.tolist()))) == (torch.int64, 30)
    assert torch.equal(chosen, coreset.random(points, 30, torch.Generator().manual_seed(3)))
    assert not torch.equal(chosen, coreset.random(points, 30, torch.Generator().manual_seed(4)))
    assert sorted(coreset.random(points, 50, torch.Generator()).tolist()) == list(range(50))


def test_random_is_uniform():
    """Each of 8 points is among 3 drawn in 3/8 of 4000 draws; 5 standard errors, false alarms below 1e-5."""
    generator = torch.Generator().manual_seed(0)
    counts = sum(
        torch.bincount(coreset.random(torch.zeros(8, 1), 3, generator), minlength=8) for _ in range(4000)
    )
    torch.testing.assert_close(counts / 4000, torch.full((8,), 3 / 8), atol=5 * 0.0077, rtol=0)
