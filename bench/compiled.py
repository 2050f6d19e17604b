"""Long fits as compiled code: a method's `loss_terms`, forward and backward, through torch.compile.

A step of many operations on small tensors spends most of its time between them; compiled they are fused. It
needs a C++ compiler, without which training is eager. torch keeps what it compiled for later processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.contract import Batch, Method, Noise

SHORTEST = 10_000
"""Steps of a fit from which compiling is worth its time: about 30 s once, and 2 to 5 ms saved a step."""


class LossTerms:
    """The `loss_terms` of a method, compiled at the first call; eager for good if that fails (`failed`).

    It fails, too, where torch has compiled one function so often that it would go on eagerly by itself.

    Args:
        method: Whose.
        tell: Called with a sentence for the user when compiling begins, and when it fails.
    """

    def __init__(self, method: Method, tell: Callable[[str], None]) -> None:
        method.prior  # noqa: B018  made here: what a method keeps must not be made under the compiler
        self.eager, self.tell = method.loss_terms, tell
        # Every shape on its own: sizes left open make slower code, and an epoch has two at most. The
        # processor's instructions are taken at its word: to try them with the compiler takes 16 s more.
        self.compiled = torch.compile(self.eager, dynamic=False, options={"cpp.vec_isa_ok": True})
        self.failed = False
        tell("compiling the training step; takes up to a minute where it is new")

    def __call__(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """What `loss_terms` returns, up to rounding."""
        if self.failed:
            return self.eager(batch, noise)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # slow, and loaded by now

        try:
            return self.compiled(batch, noise)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self.failed = True
            reason = str(getattr(error, "inner_exception", error)).strip() or "no reason given"
            first = reason.splitlines()[0]
            if isinstance(error, FailOnRecompileLimitHit):
                first = "the loss depends on numbers that change, and was compiled for each anew"
            self.tell(f"training runs eager, which is slower: it could not be compiled ({first})")
            return self.eager(batch, noise)


@contextmanager
def compiling(method: Method, tell: Callable[[str], None]) -> Iterator[LossTerms]:
    """Within, the method's `loss_terms` is compiled.

    Args:
        method: Before training, on its device.
        tell: Called with a sentence for the user.
    """
    from torch._dynamo import config  # slow to import

    for name in ("torch.utils.cpp_extension", "torch._dynamo"):  # a missing GPU; how it compiles
        logging.getLogger(name).setLevel(logging.ERROR)
    terms = LossTerms(method, tell)
    method.loss_terms = terms  # type: ignore[method-assign]
    try:
        with config.patch(fail_on_recompile_limit_hit=True):
            yield terms
    finally:
        del method.loss_terms
        torch.compiler.reset()  # else the ninth fit of a process would silently be eager
