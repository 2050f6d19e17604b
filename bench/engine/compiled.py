"""Long fits as compiled code: what training spends its time in, forward and backward, through torch.compile.

That is a method's `loss_terms`, or the function that its class names (`compilable`).

A step of many operations on small tensors spends most of its time between them; compiled they are fused. It
needs a C++ compiler, without which training is eager. torch keeps what it compiled for later processes, a
library of its own that was cut off halfway included: that one is made anew.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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
        notify: Called with a sentence for the user when compiling begins, and when it fails.
    """

    def __init__(self, method: Method, notify: Callable[[str], None]) -> None:
        method.prior  # noqa: B018  made here: what a method keeps must not be made under the compiler
        self.eager, self.notify = getattr(method, method.compilable), notify
        # Every shape on its own: sizes left open make slower code, and an epoch has two at most. The
        # processor's instructions are taken at its word: to try them with the compiler takes 16 s more.
        self.compiled = torch.compile(self.eager, dynamic=False, options={"cpp.vec_isa_ok": True})
        self.failed = False
        self.removed: set[Path] = set()
        notify("compiling the training step; takes up to a minute where it is new")

    def __call__(self, *values: Any) -> Any:
        """What the function returns, up to rounding."""
        if self.failed:
            return self.eager(*values)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # slow, and loaded by now

        try:
            return self.compiled(*values)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            reason = str(getattr(error, "inner_exception", error)).strip() or "no reason given"
            first = reason.splitlines()[0]
            if self.removes_damaged(first):
                return self(*values)
            self.failed = True
            if isinstance(error, FailOnRecompileLimitHit):
                first = "the loss depends on numbers that change, and was compiled for each anew"
            self.notify(f"training runs eager, which is slower: it could not be compiled ({first})")
            return self.eager(*values)

    def removes_damaged(self, reason: str) -> bool:
        """Whether `reason` names a library of torch's cache that does not load; it is removed, once.

        torch writes it in place, so that a process that is stopped meanwhile leaves a part of it.
        """
        from torch._inductor.runtime.cache_dir_utils import cache_dir
        from torch._inductor.utils import clear_caches

        named = re.search(r"(/.+\.so): ", reason)
        library = Path(named[1]) if named else None
        if not library or library in self.removed or not library.is_relative_to(cache_dir()):
            return False
        library.unlink(missing_ok=True)
        self.removed.add(library)
        clear_caches()  # which this process keeps of it
        return True


@contextmanager
def compiling(method: Method, notify: Callable[[str], None]) -> Iterator[Compiled]:
    """Within, the method's `compilable` is compiled.

    Args:
        method: Before training, on its device.
        notify: Called with a sentence for the user.
    """
    from torch._dynamo import config  # slow to import
    from torch._functorch import config as gradients

    for name in ("torch.utils.cpp_extension", "torch._dynamo"):  # a missing GPU; how it compiles
        logging.getLogger(name).setLevel(logging.ERROR)
    function = Compiled(method, notify)
    setattr(method, method.compilable, function)
    try:
        # The backward pass is compiled with the forward pass, so that what fails of it fails here.
        with (
            config.patch(fail_on_recompile_limit_hit=True),
            gradients.patch(force_non_lazy_backward_lowering=True),
        ):
            yield function
    finally:
        delattr(method, method.compilable)
        torch.compiler.reset()  # else the ninth fit of a process would silently be eager
