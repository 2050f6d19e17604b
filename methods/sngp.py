"""SNGP: a network of bounded layers under a Gaussian process, which random Fourier features stand in for.

Approximates by a mode all weights but the last, and by a normal those of the head that takes the place of the
last linear layer: outputs g_k(h) = phi(h)^T beta_k, where phi(h) = a sqrt(2 / D) cos(b - W h) has D fixed
features of the hidden units h, so that phi(h)^T phi(h') is near a^2 exp(-|h - h'|^2 / (2 l^2)). Far from all
training examples the outputs go back to the prior's.

Source: Liu et al. 2020, "Simple and Principled Uncertainty Estimation with Deterministic Deep Learning via
Distance Awareness", NeurIPS, section 3 and algorithm 1; Liu et al. 2022, "A Simple Approach to Improve
Single-Model Deep Uncertainty via Distance-Awareness", JMLR; the authors' public code.
Target: the mode of the negative log joint, in which beta is N(0, I) in place of the task's prior on the last
layer, all other weights have the task's prior, and the largest singular value of every other linear and
convolutional layer, as the map that it is of one input, stays at c or below. Then per output k the
covariance of beta_k is the inverse of I + the sum over the examples of H_kk phi phi^T, H the Hessian of the
negative log likelihood in the outputs: p_k (1 - p_k) of a softmax, 1 / sigma^2 of a normal.
Deviations: the covariance is of one pass over all examples after training, not a moving average. Predictions
are S draws of beta, not the mean-field formula for a softmax. The public code takes H = 1 for several
classes; on images it normalises hidden units and projects them to fewer, which undoes distances, and leaves
the factor of the features out. As published, H is used per output, without what couples outputs.
Cost: as maximum a posteriori, n D more operations per example for n hidden units, and per step one product
with every bounded layer and its transpose at one input; after training a pass and K inverses of D x D for K
outputs, K D^2 stored numbers. A prediction is one forward pass, whatever S.
Valid for: networks that end in a linear layer, under priors that are independent over tensors; capabilities
over weights are missing, since these are not the posed network's (`bench.contract.OF_WEIGHTS`). Frozen
layers stay as they are, whatever their norm. The bound
keeps hidden distances from growing. That they do not vanish takes residual connections around maps of norm
below 1: the suite's stacks (MLP, LeNet, small_cnn, VGG) have none, so that far inputs may collapse onto near
ones. Its residual networks normalise by the response of a filter, which has no bound near maps of zeros.
Where training is sure of its classes H vanishes and beta keeps the prior's variance: predictions are less
sure than the mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from bench import optimizers
from bench.batches import few
from bench.contract import JOINT, Batch, Method, Noise, Prediction, Problem, WeightDistribution
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families import curvature, last_layer
from bench.priors import normal_tensor
from bench.settings import Count, Positive, settings
from bench.weights import blocks, forward

NAMES: dict[str, dict[str, object]] = {"sngp": {}}
PRESETS = {"smoke": {"features": 64}}
SEARCH = {
    "learning_rate": (1e-4, 1e-1, "log"),
    "amplitude": (0.3, 10.0, "log"),
    "length_scale": (0.3, 10.0, "log"),
    "norm_bound": (0.9, 9.0, "log"),
}

_ITERATIONS = 30
"""Power iterations before and after training; one follows every step, which may lag behind large steps."""
_BOUNDED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NO_HEAD = "sngp needs a network whose outputs are those of a linear layer at its end"


@settings
class Settings:
    """Settings of SNGP."""

    features: Count = 1024
    """D, random features, at least 1."""
    amplitude: Positive = 1.0
    """a of the kernel, the standard deviation of the prior's outputs, above 0."""
    length_scale: Positive = 2.0
    """l of the kernel, in units of the hidden units, above 0."""
    norm_bound: Positive = 6.0
    """c, the largest singular value that a hidden layer may have, above 0."""
    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""


class Head(nn.Module):
    """Outputs that are linear in D random features of hidden units.

    Args:
        inputs: Hidden units n.
        outputs: K.
        own: D, the amplitude and the length scale of the kernel.
        generator: Draws the directions `[D, n]` and the phases `[D]`.
    """

    directions: Tensor
    phases: Tensor

    def __init__(self, inputs: int, outputs: int, own: Settings, generator: torch.Generator) -> None:
        super().__init__()
        self.scale = own.amplitude * math.sqrt(2 / own.features)
        directions = torch.randn(own.features, inputs, generator=generator) / own.length_scale
        self.register_buffer("directions", directions)
        self.register_buffer("phases", 2 * math.pi * torch.rand(own.features, generator=generator))
        self.weight = nn.Parameter(torch.zeros(outputs, own.features))  # beta

    def features(self, hidden: Tensor) -> Tensor:
        """Features phi `[B, D]` of hidden units `[B, n]`."""
        return self.scale * (self.phases - hidden @ self.directions.T).cos()

    def forward(self, hidden: Tensor) -> Tensor:
        """Outputs `[B, K]` of hidden units `[B, n]`."""
        return functional.linear(self.features(hidden), self.weight)


class SNGP(Method):
    """A bounded network with a normal over the weights of its head; before `finish_fit` a point mass."""

    settings_class = Settings
    approximates = "a Gaussian process on a network's hidden units by random features, their weights normal"
    declares = "none"
    provides = frozenset({"weighted", "loss_terms"})
    validation_samples = 1
    largest = 200_000_000
    """Numbers of the covariances up to which a head is accepted."""
    settings: Settings
    factors: Tensor  # [K, D, D], F of the covariance F F^T of beta_k

    def __init__(self, problem: Problem, settings: Settings, start: SNGP | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()
        path, size = last_layer.last_linear(self.network), settings.features
        if path is None:
            raise UsageError(_NO_HEAD)
        self.head_name, last = path, self.network.get_submodule(path)
        assert isinstance(last, nn.Linear)
        if last.out_features * size**2 > self.largest:
            raise UsageError(
                f"sngp: {last.out_features} covariances of {size} features have more than {self.largest:,} "
                "numbers: lower --method.features"
            )
        head = Head(last.in_features, last.out_features, settings, self.generator)
        if self.head_name:
            self.network.set_submodule(self.head_name, head)
        else:
            self.network = head
        self.register_buffer("factors", torch.zeros(last.out_features, size, size))
        if JOINT in self.problem.prior(dict(self.network.named_parameters())):
            raise UsageError(
                "sngp: the prior couples all weights, and its head has others: pose another prior"
            )
        # Of every bounded layer, by name, a direction of its input that it lengthens most, of length 1.
        self.bounded = self._find_bounded(problem.train[0][0])
        if start is not None:
            self.network.load_state_dict(start.network.state_dict())
            self.likelihood.load_state_dict(start.likelihood.state_dict())
        self.bound_norms(_ITERATIONS)

    @property
    def head(self) -> Head:
        """What stands in place of the network's last linear layer."""
        head = self.network.get_submodule(self.head_name)
        assert isinstance(head, Head)
        return head

    def make_prior(self, parameters: Mapping[str, Tensor]) -> WeightDistribution:
        """The task's prior, and N(0, I) of the head."""
        name = f"{self.head_name}.weight".removeprefix(".")
        beta = parameters[name]
        given = self.problem.prior(parameters)
        own = {name: normal_tensor(torch.zeros_like(beta), torch.ones_like(beta))}
        return {n: given[n] for n in parameters if n != name} | own

    # ---- the bound

    def _find_bounded(self, example: Tensor) -> list[str]:
        """Names of the linear and convolutional layers below the head; of each a direction of input is drawn.

        Raises:
            UsageError: If what the head gives is not what the network gives.
        """
        shapes: dict[str, torch.Size] = {}
        ends: list[Tensor] = []

        def keep(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
            if isinstance(layer, Head):
                ends.append(output)
            else:
                shape = next(iter((*given, *named.values()))).shape
                shapes[names[layer]] = shape[-1:] if isinstance(layer, nn.Linear) else shape[1:]

        names: dict[nn.Module, str] = {
            m: name
            for name, m in self.network.named_modules()
            if isinstance(m, Head) or (isinstance(m, _BOUNDED) and m._parameters.get("weight") is not None)
        }
        handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in names]
        with torch.no_grad():
            outputs = self.network(example[None])
        for handle in handles:
            handle.remove()
        if len(ends) != 1 or ends[0] is not outputs:
            raise UsageError(_NO_HEAD)
        if (odd := self._unbounded(shapes)) is not None:
            raise UsageError(
                f"sngp: the norm of {odd} cannot be bounded: a matrix of weights must be that of a linear or "
                "convolutional layer, act in its own calls alone, and as it is"
            )
        for number, shape in enumerate(shapes.values()):
            direction = torch.randn(shape, generator=self.generator)
            self.register_buffer(f"direction_{number}", direction / direction.norm())
        return list(shapes)

    def _unbounded(self, shapes: Mapping[str, torch.Size]) -> str | None:
        """The first trained matrix of weights on whose norm scaling a layer's weight has no hold.

        Args:
            shapes: Of the inputs of the bounded layers, by name.
        """
        weights = {name: w for name, w in self.network.named_parameters() if w is not self.head.weight}
        examples = few(self.problem.train)
        outputs = self.network(examples).sum()
        for name, weight in weights.items():
            path = name.rpartition(".")[0]
            layer = self.network.get_submodule(path)
            if sum(size > 1 for size in weight.shape) < 2:
                continue
            if path not in shapes or layer.weight is not weight:
                if torch.autograd.grad(outputs, weight, retain_graph=True, allow_unused=True)[0] is not None:
                    return name
            elif not _is_linear_in_its_weight(layer, shapes[path]):
                return name
        plain = {id(w) for layer in curvature.owners(self.network, [*weights]) for w in layer.parameters()}
        return curvature.odd_weight(
            self.network, [name for name, w in weights.items() if id(w) in plain], examples
        )

    @torch.no_grad()
    def bound_norms(self, iterations: int = 1) -> None:
        """Scales down every layer whose norm is above the bound, as far as power iterations can tell."""
        for layer, direction in self._directions():
            norm, new = _power_iterations(layer, direction, iterations)
            direction.copy_(new)
            layer.weight *= (self.settings.norm_bound / norm).clamp(max=1)

    def _directions(self) -> Iterator[tuple[Any, Tensor]]:
        """Every bounded layer, and the direction that its power iterations have come to."""
        for number, name in enumerate(self.bounded):
            yield self.network.get_submodule(name), self.get_buffer(f"direction_{number}")

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        """Bounds the layers after every step, before any checkpoint of it."""
        super().optimizer_step(*arguments, **named)
        self.bound_norms()

    def diagnostics(self, inputs: Tensor | None = None) -> dict[str, float]:
        """The largest norm of a bounded layer, if there is one: how far the bound is kept."""
        if inputs is not None or not self.bounded:
            return {}
        norms = [_power_iterations(layer, direction, 100)[0] for layer, direction in self._directions()]
        return {"largest_norm": torch.stack(norms).max().item()}

    # ---- the head

    def _features(self, inputs: Tensor) -> Tensor:
        """Features phi `[B, D]` of inputs `[B, ...]`, without gradients."""
        with torch.no_grad():
            hidden, _ = last_layer.features(self.network, self.head_name, inputs)
            return self.head.features(hidden)

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """The bound once more, and the covariance of beta from one pass over all examples, in float64."""
        self.bound_norms(_ITERATIONS)
        beta = self.head.weight.detach()
        outputs, size = beta.shape
        curvatures = torch.zeros(outputs, size, size, dtype=torch.float64, device=beta.device)
        rows = 0
        for batch in loader:
            for piece in curvature.pieces(batch):
                phi = self._features(piece.inputs)
                roots = curvature.output_roots(self.likelihood, phi @ beta.T, piece)  # [B, K, K]
                phi = phi.double()  # in float32 rounding exceeds the identity where the noise is small
                for total, h in zip(curvatures, roots.square().sum(2).T, strict=True):
                    total += (h[:, None] * phi).T @ phi
                rows += len(phi)
        identity = torch.eye(size, dtype=torch.float64, device=beta.device)
        for factor, total in zip(self.factors, curvatures, strict=True):
            triangle = torch.linalg.cholesky(identity + self.problem.num_train / rows * total)
            factor.copy_(torch.linalg.solve_triangular(triangle.mT, identity, upper=True))

    def covariance(self) -> Tensor:
        """Of beta, output by output, `[K, D, D]`."""
        return self.factors @ self.factors.mT

    def predict(self, inputs: Tensor, num_samples: int, generator: torch.Generator) -> Prediction:
        """Predictions under `num_samples` draws of beta."""
        with torch.no_grad():
            beta = self.head.weight
            kind: dict[str, Any] = {"device": beta.device, "dtype": beta.dtype}
            noise = torch.randn(*beta.shape, num_samples, generator=generator, **kind)
            draws = beta[..., None] + self.factors @ noise  # [K, D, S]
            outputs = [torch.einsum("bd,kds->sbk", self._features(b), draws) for b in blocks(inputs)]
            return self.likelihood.predict(torch.cat(outputs, 1))

    # ---- loss

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood and negative log prior of the weights, in nats."""
        weights = {name: p[None] for name, p in self.network.named_parameters()}
        outputs = forward(self.network, weights, batch.inputs)
        prior_term = -log_prob(self.prior, weights).sum()
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), prior_term


def _is_linear_in_its_weight(layer: nn.Module, shape: torch.Size) -> bool:
    """Whether the layer without its bias gives twice as much for one input `shape` of twice the weight."""
    example = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    bias = getattr(layer, "bias", None)
    weights = {} if bias is None else {"bias": torch.zeros_like(bias)}
    with torch.no_grad():
        once, twice = (
            functional_call(layer, {**weights, "weight": factor * layer.get_parameter("weight")}, (example,))
            for factor in (1, 2)
        )
    return torch.allclose(twice, 2 * once, rtol=1e-3, atol=1e-5)


def _power_iterations(layer: nn.Module, direction: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A bound from below of the largest singular value of A, and the direction v of length 1 come to.

    A is the layer without its bias, as a map of one whole input: for a convolution it has its padding and
    stride, and depends on the size of the images. An iteration is v <- A^T A v / |A^T A v|.

    Args:
        layer: Linear in its input but for a bias.
        direction: The v to start from.
        count: At least 1.
    """
    bias = getattr(layer, "bias", None)
    no_bias = {} if bias is None else {"bias": torch.zeros_like(bias)}
    smallest = torch.finfo(direction.dtype).tiny
    for _ in range(count):
        with torch.enable_grad():
            v = direction.detach().requires_grad_()
            image = functional_call(layer, no_bias, (v[None],))
            (back,) = torch.autograd.grad(image, v, image.detach())  # A^T A v
        length, norm = image.detach().norm(), back.norm()
        direction = torch.where(norm > 0, back / norm.clamp(min=smallest), direction)  # a layer of zeros
    return norm / length.clamp(min=smallest), direction
