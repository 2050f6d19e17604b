"""The No-U-Turn Sampler of pyro-ppl, taken transition by transition, so that a stopped run can go on.

Source: Hoffman and Gelman 2014, The No-U-Turn Sampler; the code that draws is pyro's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class NoUTurn:
    """A chain of pyro's No-U-Turn Sampler in float64, taken transition by transition.

    The draws are those of `pyro.infer.MCMC` in one go. That class adapts, draws and forgets within one call;
    here what pyro's kernel holds between two transitions can be saved (`state`) and put back.

    Args:
        burn: Transitions that adapt step size and mass.
        step_size: The first one, above 0.
        target_acceptance: Mean probability of acceptance that the step size is adapted to, a fraction.
        position: Where the chain begins, `[d]`.
        energy: The energy of weights `[d]`, in nats.
        seed: Of torch's global generators, which pyro draws from; the chain leaves them as they were.
    """

    def __init__(
        self,
        burn: int,
        step_size: float,
        target_acceptance: float,
        position: Tensor,
        energy: Callable[[Tensor], Tensor],
        seed: int,
    ) -> None:
        from pyro.infer import NUTS

        self.energy, self.gradients = energy, 0
        self.devices = [position.device] if position.device.type == "cuda" else []
        self.kernel: Any = NUTS(
            potential_fn=self._potential,
            step_size=step_size,
            target_accept_prob=target_acceptance,
        )
        self.kernel.initial_params = {"weights": position.double().clone()}
        with torch.random.fork_rng(self.devices):
            torch.manual_seed(seed)
            self.generators = self._generators()
        with self._inside_pyro():
            self.kernel.setup(burn)

    def _potential(self, parameters: dict[str, Tensor]) -> Tensor:
        self.gradients += 1
        return self.energy(parameters["weights"])

    def step(self) -> Tensor:
        """The next state `[d]`."""
        with self._inside_pyro():
            weights: Tensor = self.kernel.sample(None)["weights"]  # it remembers where it is
        return weights

    @contextmanager
    def _inside_pyro(self) -> Iterator[None]:
        """Without warnings and checks of distributions, as in `pyro.infer.MCMC`, by generators of its own."""
        import pyro

        with (
            warnings.catch_warnings(),
            pyro.validation_enabled(False),
            torch.random.fork_rng(self.devices),
        ):
            warnings.simplefilter("ignore")  # what a library does inside is no warning to our users
            torch.random.set_rng_state(self.generators[0])
            for device, state in zip(self.devices, self.generators[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self.generators = self._generators()

    def _generators(self) -> list[Tensor]:
        return [torch.random.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self.devices)]

    @property
    def _parts(self) -> list[tuple[Any, tuple[str, ...]]]:
        """The objects of pyro that change from transition to transition, with the names of what does."""
        adapter = self.kernel._adapter
        averaging, mass = adapter._step_size_adapt_scheme, adapter.mass_matrix_adapter
        last = ("_z_last", "_potential_energy_last", "_z_grads_last")
        return [
            (self, ("generators", "gradients")),
            (self.kernel, ("_t", "_accept_cnt", "_mean_accept_prob", "_divergences", *last)),
            (adapter, ("step_size", "_current_window")),
            (averaging, ("prox_center", "_x_avg", "_g_avg", "_t")),
            (mass, ("inverse_mass_matrix",)),  # begins its estimates anew where it is set: before these
            *((estimate, ("_mean", "_m2", "n_samples")) for estimate in mass._adapt_scheme.values()),
        ]

    @property
    def state(self) -> list[dict[str, Any]]:
        """All that the next transition depends on, but the energy."""
        return [{name: getattr(part, name) for name in names} for part, names in self._parts]

    @state.setter
    def state(self, state: list[dict[str, Any]]) -> None:
        device = self.kernel.initial_params["weights"].device
        for (part, names), values in zip(self._parts, state, strict=True):
            for name in names:
                setattr(part, name, _moved(values[name], device))


def _moved(value: Any, device: torch.device) -> Any:
    """A tensor or a dictionary of tensors on a device; whatever else as it is."""
    if isinstance(value, dict):
        return {name: _moved(entry, device) for name, entry in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value
