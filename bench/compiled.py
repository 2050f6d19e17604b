"""Long fits as compiled code: what training spends its time in, forward and backward, through torch.compile.

That is a method's `loss_terms`, or the function that its class names (`compilable`).

A step of many operations on small tensors spends most of its time between them; compiled they are fused. It
needs a C++ compiler, without which training is eager. torch keeps what it compiled for later processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.contract import Method

SHORTEST = 10_000
"""Steps of a fit from which compiling is worth its time: about 30 s once, and 2 to 5 ms saved a step."""


def suits(method_class: type[Method]) -> bool:
    """Whether a method has something to compile."""
    part = method_class.compilable
    return part != "loss_terms" or part in method_class.provides


class Compiled:
    """The `compilable` of a method, compiled at the first call; eager for good if that fails (`failed`).

    It fails, too, where torch has compiled one function so often that it would go on eagerly by itself.

    Args:
        method: Whose.
        tell: Called with a sentence for the user when compiling begins, and when it fails.
    """

    def __init__(self, method: Method, tell: Callable[[str], None]) -> None:
        method.prior  # noqa: B018  made here: what a method keeps must not be made under the compiler
        self.eager, self.tell = getattr(method, method.compilable), tell
        # Every shape on its own: sizes left open make slower code, and an epoch has two at most. The
        # processor's instructions are taken at its word: to try them with the compiler takes 16 s more.
        self.compiled = torch.compile(self.eager, dynamic=False, options={"cpp.vec_isa_ok": True})
        self.failed = False
        tell("compiling the training step; takes up to a minute where it is new")

    def __call__(self, *values: Any) -> Any:
        """What the function returns, up to rounding."""
        if self.failed:
            return self.eager(*values)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # slow, and loaded by now

        try:
            return self.compiled(*values)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self.failed = True
            reason = str(getattr(error, "inner_exception", error)).strip() or "no reason given"
            first = reason.splitlines()[0]
            if isinstance(error, FailOnRecompileLimitHit):
                first = "the loss depends on numbers that change, and was compiled for each anew"
            self.tell(f"training runs eager, which is slower: it could not be compiled ({first})")
            return self.eager(*values)


@contextmanager
def compiling(method: Method, tell: Callable[[str], None]) -> Iterator[Compiled]:
    """Within, the method's `compilable` is compiled.

    Args:
        method: Before training, on its device.
        tell: Called with a sentence for the user.
    """
    from torch._dynamo import config  # slow to import

    for name in ("torch.utils.cpp_extension", "torch._dynamo"):  # a missing GPU; how it compiles
        logging.getLogger(name).setLevel(logging.ERROR)
    function = Compiled(method, tell)
    setattr(method, method.compilable, function)
    try:
        with config.patch(fail_on_recompile_limit_hit=True):
            yield function
    finally:
        delattr(method, method.compilable)
        torch.compiler.reset()  # else the ninth fit of a process would silently be eager
