"""Mean-field posteriors of other libraries behind one face, for benchmarks/peers.py.

    floor               the plain network on S * B examples: forward, backward and Adam, no posterior at all
    bayesian-torch      its reparametrisation layers, each of which returns its KL with its output
    blitz               its Bayesian layers under `variational_estimator`, by `sample_elbo`
    torch-uncertainty   its Bayesian layers under its `ELBOLoss`
    posteriors          its `vi.diag` with torchopt's Adam; vmap over the samples
    ivon                its optimiser, whose state is the posterior; one backward pass per sample

Each is used as its own examples do. All have independent normals over all weights and see the same batch. It
is equal work, not an equal bound: bayesian-torch takes the mean of the KL over the weights of a tensor where
the bound has the sum, torch-uncertainty the mean over layers; blitz and torch-uncertainty have a KL by one
draw; IVON has none, and half the parameters under gradients, so that its steps are told and no goal is held
against them. Where one has an optimiser of its own it is used; the others have the fused Adam, as ours.

Shapes: S weight samples, B examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, conv2d, cross_entropy

from bench import optimizers, priors
from bench.contract import Batch, Likelihood, Method, Problem
from bench.engine.predicting import predict
from bench.likelihoods import Bernoulli, Categorical
from bench.methods.ivon import IVON
from bench.methods.mfvi import MFVI
from bench.methods.radial import Radial
from bench.weights import channels_last

LEARNING_RATE = 1e-3
NUM_TRAIN = 60_000
"""Examples by which the KL is scaled."""


@dataclass(frozen=True)
class Work:
    """A network and examples for it.

    Attributes:
        network: Makes it, plain.
        inputs: Of a batch, `[B, ...]`.
        targets: `[B]`: of ten classes, or of two where the network has one output.
        samples: S, of a training step.
    """

    network: Callable[[], nn.Sequential]
    inputs: Tensor
    targets: Tensor
    samples: int

    @property
    def is_binary(self) -> bool:
        """Whether there are two classes."""
        return self.targets.is_floating_point()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean negative log likelihood of outputs `[B, C]`."""
        if self.is_binary:
            return binary_cross_entropy_with_logits(outputs.flatten(), targets)
        return cross_entropy(outputs, targets)


class Contender(Protocol):
    """A posterior that takes training steps and predicts."""

    def __init__(self, work: Work) -> None: ...

    def step(self) -> object:
        """One training step on the batch."""

    def predict(self, inputs: Tensor, samples: int) -> Tensor:
        """Outputs `[S, B, C]`, one draw of the weights each."""


class Torch(ABC):
    """What contenders share whose model is a module that draws weights at every call; made by `model`.

    Args:
        work: What it works on; in channels-last order if its inputs are.
    """

    package: ClassVar[str | None] = None
    """On the registry."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Packages that it imports and does not ask for."""
    has_bound: ClassVar[bool] = True
    """Whether its step differentiates a bound on the evidence: only then is its time held against ours."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.network = self.model(work.network()).to(work.inputs.device)
        if work.inputs.ndim == 4 and work.inputs.stride(1) == 1:
            self.network.to(memory_format=torch.channels_last)
        self.optimizer = self.make_optimizer()

    def model(self, network: nn.Sequential) -> nn.Module:
        """The network with the library's layers."""
        return network

    def make_optimizer(self) -> Any:
        """The fused Adam."""
        return optimizers.make(self.network.parameters(), "adam", LEARNING_RATE)

    @abstractmethod
    def step(self) -> None:
        """One training step on the batch."""

    def predict(self, inputs: Tensor, samples: int) -> Tensor:
        """A forward pass per sample."""
        with torch.no_grad():
            return torch.stack([self.network(inputs) for _ in range(samples)])


class ByLoss(Torch):
    """Those of them whose step is one backward pass of a loss."""

    @abstractmethod
    def loss(self) -> Tensor:
        """Of a training step."""

    def step(self) -> None:
        """Zero grad, loss, backward, optimiser."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimizer.step()


def layered(network: nn.Sequential, linear: Any, convolution: Any) -> list[nn.Module]:
    """The layers of a network, those with weights replaced."""

    def made(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Linear):
            return linear(layer.in_features, layer.out_features)
        if isinstance(layer, nn.Conv2d):
            shape = (layer.in_channels, layer.out_channels, layer.kernel_size)
            return convolution(*shape, stride=layer.stride, padding=layer.padding)
        return layer

    return list(map(made, network))


# ---------------------------------------------------------------------------------------------------- floor


class Floor(ByLoss):
    """The plain network, S times the batch at once."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.inputs = torch.cat([work.inputs] * work.samples)
        if work.inputs.ndim == 4 and work.inputs.stride(1) == 1:
            self.inputs = channels_last(self.inputs)
        self.targets = work.targets.repeat(work.samples)

    def loss(self) -> Tensor:
        """Without a KL."""
        return self.work.loss(self.network(self.inputs), self.targets)


def products(work: Work, inputs: Tensor, samples: int) -> dict[str, Callable[[], None]]:
    """The matrix products and convolutions of a prediction and nothing else, in every order of units.

    The weights of all samples and the inputs of every layer lie ready: no draws, biases, units or pools.
    """
    layers, hidden = [], inputs
    with torch.no_grad():
        for layer in work.network():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layers.append((layer, hidden.clone(), torch.randn(samples, *layer.weight.shape)))
            hidden = layer(hidden)

    def run(columns: bool) -> None:
        for layer, hidden, weights in layers:
            inward = hidden.mT.contiguous() if columns and hidden.ndim == 2 else hidden
            for weight in weights:
                if hidden.ndim == 4:
                    conv2d(inward, weight, None, layer.stride, layer.padding)
                elif columns:
                    torch.mm(weight, inward)
                else:
                    torch.mm(inward, weight.mT)

    return {"": partial(run, False), ", examples last": partial(run, True)}


# --------------------------------------------------------------------------------------------------- others


class _BayesianTorchNetwork(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `[B, C]` and KL under one draw of the weights."""
        hidden, total = inputs, inputs.new_zeros(())
        for layer in self.layers:
            hidden = layer(hidden)
            if isinstance(hidden, tuple):
                hidden, kl = hidden
                total = total + kl
        return hidden, total


class BayesianTorch(ByLoss):
    """bayesian-torch."""

    # For S > 1 its gradient of rho is wrong (checked on 0.5.0 at S = 2 against autograd): every pass
    # overwrites the noise that the backward pass of the earlier ones still needs.
    package = "bayesian-torch"

    def model(self, network: nn.Sequential) -> nn.Module:
        """Reparametrisation layers."""
        from bayesian_torch.layers import Conv2dReparameterization, LinearReparameterization

        return _BayesianTorchNetwork(layered(network, LinearReparameterization, Conv2dReparameterization))

    def loss(self) -> Tensor:
        """A forward pass per sample."""
        work = self.work
        passes = [self.network(work.inputs) for _ in range(work.samples)]
        outputs, divergences = zip(*passes, strict=True)
        nll = work.loss(torch.cat(outputs), work.targets.repeat(work.samples))
        return nll + torch.stack(divergences).mean() / NUM_TRAIN

    def predict(self, inputs: Tensor, samples: int) -> Tensor:
        """Without the KL, by the library's flag."""
        plain: list[Any] = list(self.network.layers)  # type: ignore[arg-type]
        for layer in plain:
            layer.dnn_to_bnn_flag = True
        outputs = []
        with torch.no_grad():
            for _ in range(samples):
                hidden = inputs
                for layer in plain:
                    hidden = layer(hidden)
                outputs.append(hidden)
        for layer in plain:
            layer.dnn_to_bnn_flag = False
        return torch.stack(outputs)


class Blitz(ByLoss):
    """blitz-bayesian-pytorch."""

    package = "blitz-bayesian-pytorch"

    def model(self, network: nn.Sequential) -> nn.Module:
        """Bayesian layers under its decorator."""
        from blitz.modules import BayesianConv2d, BayesianLinear
        from blitz.utils import variational_estimator

        kind = variational_estimator(type("Estimator", (nn.Sequential,), {}))
        return kind(*layered(network, BayesianLinear, BayesianConv2d))

    def loss(self) -> Tensor:
        """Its `sample_elbo`."""
        estimate: Any = self.network.sample_elbo
        return estimate(self.work.inputs, self.work.targets, self.work.loss, self.work.samples, 1 / NUM_TRAIN)


class TorchUncertainty(ByLoss):
    """torch-uncertainty."""

    package = "torch-uncertainty"
    needs = ("lightning>=2.0,<2.7", "timm")

    def model(self, network: nn.Sequential) -> nn.Module:
        """Bayesian layers."""
        from torch_uncertainty.layers.bayesian import BayesConv2d, BayesLinear
        from torch_uncertainty.losses import ELBOLoss

        work = self.work

        class Inner(nn.Module):
            def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
                return work.loss(outputs, targets)

        model = nn.Sequential(*layered(network, BayesLinear, BayesConv2d))
        self.elbo = ELBOLoss(model, Inner(), 1 / NUM_TRAIN, work.samples)
        return model

    def loss(self) -> Tensor:
        """Its `ELBOLoss`."""
        return self.elbo(self.work.inputs, self.work.targets)


class Posteriors(Torch):
    """posteriors."""

    package = "posteriors"

    def make_optimizer(self) -> None:
        """A functional one, inside the transform."""
        import posteriors
        import torchopt
        from torch.func import functional_call

        def log_posterior(parameters: Any, batch: Any) -> tuple[Tensor, Tensor]:
            inputs, targets = batch
            nll = self.work.loss(functional_call(self.network, parameters, (inputs,)), targets)
            return posteriors.diag_normal_log_prob(parameters) / NUM_TRAIN - nll, torch.tensor([])

        self.transform = posteriors.vi.diag.build(
            log_posterior,
            torchopt.adam(lr=LEARNING_RATE),
            temperature=1 / NUM_TRAIN,
            n_samples=self.work.samples,
            init_log_sds=-3.0,
        )
        self.state = self.transform.init({n: p.detach() for n, p in self.network.named_parameters()})

    def step(self) -> None:
        """One update of the state."""
        self.state, _ = self.transform.update(self.state, (self.work.inputs, self.work.targets))

    def predict(self, inputs: Tensor, samples: int) -> Tensor:
        """A forward pass per draw: on a CPU vmap is slower for convolutions."""
        import posteriors
        from torch.func import functional_call

        with torch.no_grad():
            draws = [posteriors.vi.diag.sample(self.state) for _ in range(samples)]
            return torch.stack([functional_call(self.network, dict(d), (inputs,)) for d in draws])


class Ivon(Torch):
    """ivon-opt."""

    package = "ivon-opt"
    has_bound = False

    def make_optimizer(self) -> Any:
        """IVON."""
        from ivon import IVON

        return IVON(self.network.parameters(), lr=0.1, ess=NUM_TRAIN, mc_samples=self.work.samples)

    def step(self) -> None:
        """A backward pass per sample."""
        for _ in range(self.work.samples):
            with self.optimizer.sampled_params(train=True):
                self.optimizer.zero_grad()
                self.work.loss(self.network(self.work.inputs), self.work.targets).backward()
        self.optimizer.step()

    def predict(self, inputs: Tensor, samples: int) -> Tensor:
        """A forward pass per draw."""
        outputs = []
        with torch.no_grad():
            for _ in range(samples):
                with self.optimizer.sampled_params():
                    outputs.append(self.network(inputs))
        return torch.stack(outputs)


PEERS: dict[str, type[Torch]] = {
    kind.package: kind
    for kind in (BayesianTorch, Blitz, TorchUncertainty, Posteriors, Ivon)
    if kind.package is not None
}
"""By their names on the registry."""


# ----------------------------------------------------------------------------------------------------- ours


class Ours:
    """A method of this project, through its `training_step` and the engine's prediction."""

    kind: ClassVar[type[Method]]

    def __init__(self, work: Work) -> None:
        data = torch.utils.data.TensorDataset(work.inputs, work.targets)
        likelihood: Likelihood = Bernoulli() if work.is_binary else Categorical()
        problem = Problem(work.network, likelihood, priors.normal(), data, None, NUM_TRAIN)
        settings = self.kind.settings_class(train_samples=work.samples)  # type: ignore[call-arg]
        self.method = self.kind(problem, settings).to(work.inputs.device)
        self.method.generator = torch.Generator(work.inputs.device).manual_seed(0)
        self.batch = Batch(work.inputs, work.targets)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> Any:
        """The method's own."""
        return self.method.configure_optimizers()

    def step(self) -> None:
        """Zero grad, `training_step`, backward, optimiser."""
        self.optimizer.zero_grad(set_to_none=True)
        result: Any = self.method.training_step(self.batch, 0)
        result["loss"].backward()
        self.optimizer.step()

    def predict(self, inputs: Tensor, samples: int) -> Tensor:
        """As a run predicts: log-probabilities, or log-odds."""
        made, _ = predict(self.method, inputs, samples, 1, 0, "benchmark", inputs.device)
        return next(iter(vars(made).values()))


class OurMFVI(Ours):
    """mfvi."""

    kind = MFVI


class OurRadial(Ours):
    """radial."""

    kind = Radial


class OurIVON(Ours):
    """ivon."""

    kind = IVON

    def make_optimizer(self) -> Any:
        """Without its schedule."""
        return self.method.configure_optimizers()["optimizer"]


OURS: dict[str, type[Ours]] = {"mfvi": OurMFVI, "radial": OurRadial, "ivon": OurIVON}


def why_not(package: str, errors: dict[str, str]) -> str | None:
    """Why a peer cannot be measured: it was not installed, or its import fails; None if it can."""
    if package in errors:
        return errors[package]
    tiny = Work(lambda: nn.Sequential(nn.Linear(2, 3)), torch.zeros(2, 2), torch.zeros(2).long(), 1)
    try:
        PEERS[package](tiny).step()
    except Exception as error:
        with suppress(ValueError):
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return type(error).__name__
    return None
