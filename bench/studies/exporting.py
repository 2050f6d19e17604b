"""A fitted posterior as a file of ONNX, which predicts without this suite, without torch and without draws.

The draws of the weights are constants. A `Scan` goes over them with the network as its body, so that the file
has the network once, and any number of inputs.

    raw inputs [B, ...] -> `before` -> inputs of the network -> outputs [S, B, K] -> `after` -> what is told

What is told is what the predictor of the run tells: of classes `probabilities` and `mutual_information`, of a
number `mean`, `sd`, `low` and `high`. Everything but the network is in float64. What is written was compared
with the predictor before it got its name.

Shapes: S weight samples, B inputs, K outputs of the network, C classes.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor, nn
from torch.func import functional_call

from bench import encoding, likelihoods
from bench.contract import Method
from bench.errors import UsageError
from bench.studies import predictive
from bench.system import files
from bench.text import one_line
from bench.weights import draws, forward

NEEDED = ("onnx", "onnxscript", "onnxruntime")
_LARGEST = 1_900_000_000
"""Bytes of constants, at most: the format ends at 2 GiB."""
_OPSET = 20
_HALVINGS = 35
"""Of the bracket of a quantile, whose width they bring to 3e-11 of what it was."""
_NEAR = 1e-4
"""By how much of a target's standard deviation, or of 1, the file may differ from the predictor."""


@dataclass(frozen=True)
class Told:
    """A predictor as it is to be written.

    Attributes:
        method: Fitted.
        target: Its `mean` and `scale`, or its `classes`.
        num_samples: S, of each member of an ensemble.
        level: Probability inside the interval of a number.
        before: Turns raw inputs `[B, ...]` into those of the network, and into `[B]` zeros, or NaN where
            nothing is to be said of an input.
        probe: Raw inputs, at least two, on which the file is compared with the predictor.
        words: What else the file is to say, by name.
    """

    method: Method
    target: Any
    num_samples: int
    level: float
    before: nn.Module
    probe: Tensor
    words: Mapping[str, str]


@dataclass(frozen=True)
class _Drawn:
    """A network under draws: state `[S, *shape]` by name; standard deviations `[S, 1]` of a known noise."""

    network: nn.Module
    state: dict[str, Tensor]
    sigma: Tensor | None


def write(told: Told, path: Path) -> None:
    """Writes a predictor as ONNX, in one step.

    Raises:
        UsageError: If a package is missing, or the predictor cannot be written so; one line.
        OutputError: If the file cannot be written.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise UsageError(f"{', '.join(missing)} cannot be imported: pip install 'posterior-bench[onnx]'")
    if not told.target.classes and not 0 < told.level < 1:
        raise UsageError(f"--level {told.level:g}: must be a probability above 0 and below 1, such as 0.9")
    with torch.no_grad():
        inputs, _ = told.before(told.probe)
        drawn = _drawn(told, inputs)
        after = _after(told, drawn)
        expected = _expected(told, inputs)
        _must_agree(after, _outputs(drawn, inputs), expected, told)
        content = _assembled(told, drawn, after, inputs, list(expected))
    for rows in (len(told.probe), 1):
        _must_say(content, told.probe[:rows].numpy(), {n: v[:rows] for n, v in expected.items()}, told)
    files.write(path, content)


# ------------------------------------------------------------------------------------------- raw inputs


class Encoded(nn.Module):
    """Rows as `Encoder.encode_rows` gives them, `[B, D]` in float64; NaN is told of one that it refuses."""

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs `[B, D]` in float32, and what is added to the answers `[B]`."""
        is_one = (rows.abs() <= encoding.FARTHEST).all(1)
        return rows.float(), torch.where(is_one, 0.0, math.nan).double()


class Numbers(nn.Module):
    """Rows of a table of numbers alone, `[B, columns]` in float64, NaN where one is missing.

    Args:
        columns: What training rows teach of them, in their order.
    """

    def __init__(self, columns: Sequence[encoding.Numbers]) -> None:
        super().__init__()
        inputs = [(i, c, place) for i, c in enumerate(columns) for place in range(c.width)]
        self.column = torch.tensor([i for i, _, _ in inputs])
        self.says_missing = torch.tensor([place == 1 for _, _, place in inputs])
        self.constant = torch.tensor([c.constant and place == 0 for _, c, place in inputs])
        self.median, self.mean, self.scale = (
            torch.tensor(values, dtype=torch.float64)
            for values in zip(*((c.median, c.mean[at], c.scale[at]) for _, c, at in inputs), strict=True)
        )

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs `[B, D]` in float32, and what is added to the answers `[B]`."""
        given = rows[:, self.column]
        is_missing = given.isnan()
        values = torch.where(
            self.says_missing, is_missing.double(), torch.where(is_missing, self.median, given)
        )
        return Encoded()(torch.where(self.constant, 0.0, (values - self.mean) / self.scale))


class Pictures(nn.Module):
    """Pictures `[B, 3, H, W]` in uint8, as `bench.photographs.decoding` decodes them.

    Args:
        encode: Standardises their channels.
        features: Computes what the fit has seen of them.
    """

    def __init__(self, encode: Callable[[Tensor], Tensor], features: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encode, self.features = encode, features

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the network `[B, ...]`, and zeros `[B]`."""
        inputs = self.features(self.encode(pictures))
        return inputs, torch.zeros_like(inputs.flatten(1)[:, 0], dtype=torch.float64)


def names_of(encoder: encoding.Encoder) -> list[str]:
    """What each encoded input of a table's row is, `[D]`."""
    found = []
    for c in encoder.columns:
        if isinstance(c, encoding.Numbers):
            said = ["standardised", "missing, standardised"]
        elif isinstance(c, encoding.Categories):
            said = ["missing" if name is None else f"is {name}" for name in c.categories]
        elif isinstance(c, encoding.Dates):
            times = [f"{f} of the {what}" for what in ("year", "week", "day") for f in ("sine", "cosine")]
            said = ["year, standardised", *times[: 4 + 2 * c.has_time], "missing"]
        else:
            said = ["mean target of its category"]
        found += [f"{c.name}: {words}" for words in (said * c.width)[: c.width]]
    return found


# ------------------------------------------------------------------------------------------------ the draws


def _drawn(told: Told, inputs: Tensor) -> _Drawn:
    """The draws behind the predictor's answers."""
    if next(told.method.network.parameters(), None) is None:
        raise UsageError("this method has no network, which the file would hold")
    generator = torch.Generator().manual_seed(0)
    members: list[Method] = getattr(told.method, "members", [told.method])
    network, states, sigmas = members[0].network, list[dict[str, Tensor]](), list[Tensor]()
    for member in members:
        own = {name: weight.detach()[None] for name, weight in member.network.named_parameters()}
        if "weight_samples" in member.provides:
            parts = [*draws(member.network, member.sample_weights, told.num_samples, generator)]
            own = {name: torch.cat([part[name] for part in parts]) for name in own}
        number = len(next(iter(own.values())))
        others = {name: value.expand(number, *value.shape) for name, value in _differing(members, member)}
        states.append(own | others)
        if isinstance(member.likelihood, likelihoods.Gaussian):
            sigmas.append(member.likelihood.log_sigma.detach().double().exp().view(1, 1).expand(number, 1))
    state = {name: torch.cat([each[name] for each in states]) for name in states[0]}
    if sum(value.nbytes for value in state.values()) > _LARGEST:
        raise UsageError(
            f"{len(next(iter(state.values())))} draws of this network's weights exceed the 2 GB that a file "
            "of ONNX may have"
        )
    return _Drawn(network, state, torch.cat(sigmas) if sigmas else None)


def _differing(members: list[Method], member: Method) -> list[tuple[str, Tensor]]:
    """Buffers of a member's network in which members differ: frozen weights that each has drawn."""
    first = dict(members[0].network.named_buffers())
    names = [
        name
        for name, value in first.items()
        if any(not torch.equal(value, other.network.get_buffer(name)) for other in members)
    ]
    return [(name, member.network.get_buffer(name)) for name in names]


def _outputs(drawn: _Drawn, inputs: Tensor) -> Tensor:
    return forward(drawn.network, drawn.state, inputs, "loop")


class _OneDraw(nn.Module):
    """Outputs `[B, K]` for inputs under one draw, whose tensors come in the order of their names."""

    def __init__(self, drawn: _Drawn) -> None:
        super().__init__()
        self.network, self.names = copy.deepcopy(drawn.network).requires_grad_(False), list(drawn.state)

    def forward(self, inputs: Tensor, *state: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self.network, dict(zip(self.names, state, strict=True)), (inputs,))
        return outputs


# ------------------------------------------------------------------------------------------- what is told


def _after(told: Told, drawn: _Drawn) -> nn.Module:
    likelihood = told.method.likelihood
    if type(likelihood) is likelihoods.Categorical and told.target.classes:
        return _Classes()
    if type(likelihood) in (likelihoods.Gaussian, likelihoods.Heteroscedastic):
        return _Number(told.target, drawn.sigma, told.level)
    raise UsageError(f"predictions under a {type(likelihood).__name__} are not written as ONNX")


class _Classes(nn.Module):
    """Mean probabilities `[B, C]`, and the mutual information of class and weights `[B]` in nats."""

    def forward(self, outputs: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        by_sample = outputs.double().softmax(-1)
        mean = by_sample.mean(0)
        information = _entropy(mean) - _entropy(by_sample).mean(0)
        return mean + shift[:, None], information.clamp(min=0) + shift


def _entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * probabilities.clamp(min=1e-300).log()).sum(-1)


class _Number(nn.Module):
    """Mean and standard deviation of a mixture of S normals, `[B]` each, and what its quantiles start from.

    That is the normals' centres `[2, S, B]` and standard deviations `[S, B]`, and a bracket of both ends of
    the interval, low and high `[2, B]`: the least and the largest of the normals' quantiles. The upper end is
    the lower one of the mixture with its sign turned.
    """

    def __init__(self, target: Any, sigma: Tensor | None, level: float) -> None:
        super().__init__()
        self.mean, self.scale, self.sigma = target.mean, target.scale, sigma
        self.z = float(ndtri((1 - level) / 2))

    def forward(self, outputs: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        means = self.mean + self.scale * outputs[..., 0].double()
        if self.sigma is None:
            raw = nn.functional.softplus(outputs[..., 1])
            sigmas = self.scale * (likelihoods.Heteroscedastic.LEAST + raw).double()
        else:
            sigmas = self.scale * self.sigma + torch.zeros_like(means)
        mean = means.mean(0)
        sd = ((means - mean).square().mean(0) + sigmas.square().mean(0)).sqrt()
        centres = torch.stack([means, -means])
        each = centres + self.z * sigmas
        return mean + shift, sd + shift, centres, sigmas, each.amin(1), each.amax(1)


class _Halved(nn.Module):
    """The half of a bracket in which a mixture's quantile lies."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.probability = (1 - level) / 2

    def forward(self, low: Tensor, high: Tensor, centres: Tensor, sigmas: Tensor) -> tuple[Tensor, Tensor]:
        middle = (low + high) / 2
        is_below = _below((middle[:, None] - centres) / sigmas).mean(1) < self.probability
        return torch.where(is_below, middle, low), torch.where(is_below, high, middle)


_ERFC = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)
"""Press et al. 1992, "Numerical Recipes in C", section 6.2, erfcc: to 1.2e-7 of itself everywhere."""


def _below(z: Tensor) -> Tensor:
    """Probability of a standard normal below z, to 1.2e-7 of itself; ONNX has an erf of 32 bits alone."""
    x = z.abs() * 0.5**0.5
    t = 1 / (1 + 0.5 * x)
    power = torch.full_like(t, _ERFC[-1])
    for coefficient in _ERFC[-2::-1]:
        power = power * t + coefficient
    half = 0.5 * t * (power - x.square()).exp()
    return torch.where(z < 0, half, 1 - half)


def _expected(told: Told, inputs: Tensor) -> dict[str, np.ndarray]:
    """What the predictor says."""
    found = predictive.predicted(told.method, inputs, told.num_samples, 0, told.target)
    if isinstance(found, predictive.Classes):
        return {"probabilities": found.probabilities, "mutual_information": found.epistemic}
    low, high = found.interval(told.level)
    return {"mean": found.mean, "sd": np.sqrt(found.variance), "low": low, "high": high}


def _must_agree(after: nn.Module, outputs: Tensor, expected: dict[str, np.ndarray], told: Told) -> None:
    """Refuses a method that does not predict by the network under draws of its weights."""
    found = after(outputs, torch.zeros(outputs.shape[1], dtype=torch.float64))
    if not all(_near(a.numpy(), b, told) for a, b in zip(found[:2], expected.values(), strict=False)):
        raise UsageError(
            "this method predicts otherwise than by its network under draws of the weights, which the file "
            "would hold (of laplace --method.predictive network and laplace_last_layer do)"
        )


def _near(found: np.ndarray, expected: np.ndarray, told: Told) -> bool:
    if found.shape != expected.shape or not np.isfinite(found).all():
        return False
    bound = _NEAR * (told.target.scale if not told.target.classes else 1)
    return bool((np.abs(found - expected) <= bound + _NEAR * np.abs(expected)).all())


# ------------------------------------------------------------------------------------------------ the file


def _assembled(told: Told, drawn: _Drawn, after: nn.Module, inputs: Tensor, names: list[str]) -> bytes:
    """The bytes of the file."""
    from onnx import checker, helper

    outputs, one = _outputs(drawn, inputs), [value[0] for value in drawn.state.values()]
    shift = torch.zeros(len(inputs), dtype=torch.float64)
    file = _File()
    file.node("Identity", ["inputs"], ["before.inputs"])
    before = file.add("before", told.before, {"inputs": told.probe}, [0])
    draw = file.body(
        "draw", _OneDraw(drawn), {"inputs": inputs} | dict(zip(drawn.state, one, strict=True)), [0]
    )
    stacked = [file.constant(f"draws.{name}", value) for name, value in drawn.state.items()]
    file.node("Identity", before[:1], ["draw.inputs"])
    file.node("Scan", stacked, ["after.outputs"], body=draw, num_scan_inputs=len(stacked))
    file.node("Identity", before[1:], ["after.shift"])
    results = file.add("after", after, {"outputs": outputs, "shift": shift}, [1, 0])
    if len(results) > 2:
        _, _, centres, sigmas, low, high = after(outputs, shift)
        given = {"low": low, "high": high, "centres": centres, "sigmas": sigmas}
        halved = file.body("halved", _Halved(told.level), given, [1, 1, 2, 1], states=2)
        file.node("Identity", results[2:3], ["halved.centres"])
        file.node("Identity", results[3:4], ["halved.sigmas"])
        times = file.constant("times", torch.zeros(_HALVINGS))
        file.node("Scan", [*results[4:], times], ["ends", "ends.above"], body=halved, num_scan_inputs=1)
        axis = file.constant("axis", torch.tensor([0]))
        file.node("Split", ["ends"], ["lower", "upper"], axis=0, num_outputs=2)
        file.node("Squeeze", ["lower", axis], ["lower.end"])
        file.node("Squeeze", ["upper", axis], ["upper.turned"])
        file.node("Neg", ["upper.turned"], ["upper.end"])
        for end in ("lower", "upper"):
            file.node("Add", [f"{end}.end", "after.shift"], [f"{end}.told"])
        results = [*results[:2], "lower.told", "upper.told"]
    for result, name in zip(results, names, strict=True):
        file.node("Identity", [result], [name])
    shapes = [("batch", *value.shape[1:]) for value in _expected(told, inputs).values()]
    kinds = [helper.make_tensor_value_info(n, 11, shape) for n, shape in zip(names, shapes, strict=True)]
    model = file.model(kinds)
    of_number = {} if told.target.classes else {"level": f"{told.level:g}"}
    helper.set_model_props(model, {**told.words, "draws": str(len(outputs)), **of_number})
    checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


class _File:
    """The parts of a file while it grows."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._first: Any = None

    def node(self, kind: str, given: Sequence[str], made: Sequence[str], **attributes: Any) -> None:
        """Adds an operation on values, by their names."""
        from onnx import helper

        self._nodes.append(helper.make_node(kind, given, made, **attributes))

    def constant(self, name: str, value: Tensor) -> str:
        """Adds a constant; returns its name."""
        from onnx import numpy_helper

        self._constants.append(numpy_helper.from_array(value.contiguous().numpy(), name))
        return name

    def add(self, name: str, module: nn.Module, given: dict[str, Tensor], axes: list[int]) -> list[str]:
        """Adds a module's operations on `name.argument`; returns the names of its results."""
        graph = _exported(name, module, given, axes).graph
        self._first = self._first or graph.input[0]
        self._nodes += graph.node
        self._constants += graph.initializer
        return [value.name for value in graph.output]

    def body(
        self, name: str, module: nn.Module, given: dict[str, Tensor], axes: list[int], states: int = 0
    ) -> Any:
        """A module as the body of a `Scan`; what has an axis of inputs stays outside, but for the states."""
        from onnx import helper

        graph = _exported(name, module, given, axes).graph
        arguments = [*graph.input[:states], *graph.input[len(axes) :]]
        if states:
            arguments.append(helper.make_tensor_value_info(f"{name}.time", 1, []))
        return helper.make_graph(graph.node, name, arguments, graph.output, graph.initializer)

    def model(self, results: list[Any]) -> Any:
        """The whole, from the first module's argument to these results."""
        from onnx import helper

        self._first.name = "inputs"
        graph = helper.make_graph(self._nodes, "posterior", [self._first], results, self._constants)
        sets = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(graph, opset_imports=sets, ir_version=10, producer_name="posterior-bench")


def _exported(name: str, module: nn.Module, given: dict[str, Tensor], axes: list[int]) -> Any:
    """A module as a model of ONNX for any number of inputs, with `name.` before all names.

    Args:
        name: Of the module.
        module: Takes tensors by their places.
        given: By the names of arguments.
        axes: Which axis of the first arguments counts inputs; others have none.
    """
    from onnx import compose

    level = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            batch = torch.export.Dim("batch", min=1)
            sizes: list[Any] = [{axis: batch} for axis in axes]
            if len(given) > len(axes):  # what else there is stands behind a star
                sizes.append(tuple({} for _ in range(len(given) - len(axes))))
            program: Any = torch.onnx.export(
                module.eval(),
                tuple(given.values()),
                dynamo=True,
                input_names=list(given),
                dynamic_shapes=tuple(sizes),
                opset_version=_OPSET,
                verbose=False,
            )
            model = program.model_proto
    except Exception as error:  # of torch's exporter: whatever it cannot trace
        raise UsageError(f"the network cannot be written as ONNX: {one_line(error)[:200]}") from None
    finally:
        logging.disable(level)
    shape = model.graph.input[0].type.tensor_type.shape.dim
    if model.functions or not any(size.dim_param for size in shape):
        raise UsageError(
            "the network cannot be written as ONNX: what it does depends on how many inputs there are"
        )
    return compose.add_prefix(model, f"{name}.")


def _must_say(content: bytes, raw: np.ndarray, expected: dict[str, np.ndarray], told: Told) -> None:
    """Refuses a file that says something else than the predictor."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    found = dict(zip(expected, session.run(list(expected), {"inputs": raw}), strict=True))
    for name, value in expected.items():
        if not _near(found[name], value, told):
            raise UsageError(
                f"this network cannot be written as ONNX: {name} of the file differs from the predictor's by "
                f"{np.abs(found[name] - value).max():.2g}"
            )
