"""A tanh network with one hidden layer, as fast as the arithmetic allows: its gradients are written out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from bench.weights import Weights


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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
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
