"""Laplace: a normal at the mode of the posterior, its precision the curvature there.

Approximates the posterior by N(w*, P^-1): w* maximises it, P is the Hessian of the negative log joint of the
full training set at w*, the prior's precision included.

Source: Farquhar 2022, thesis "Understanding Approximation" (docs/sources.md), section 2.2 ("given by the
diagonal term" there should read: by the inverse of the diagonal); MacKay 1992; Kronecker factors, Ritter et
al. 2018 and, for layers that share their weights over positions, "KFAC-expand", Eschenhagen et al. 2023;
sequential, Farquhar 2022, section 5.1.
Deviations: the Hessian of the likelihood is the generalised Gauss-Newton matrix J^T H J (J the outputs'
Jacobian, H the likelihood's Hessian with respect to the outputs), which is never negative. Predictions are of
the network linearised at w*, because J^T H J is the Hessian of that network. Where the data leave many
weights to a wide prior, draws predict far better under it than through the network itself (Immer et al. 2021;
setting `predictive`). With `last_layer` all other weights are a point mass, and their next prior is the prior
given. Kronecker: A (x) G plus a prior that is no multiple of the identity in a layer has no common
eigenbasis; the sum's diagonal in the eigenbasis of its two partial traces is kept, which is exact for a
first, isotropic prior. One prior precision may be chosen in a run's first fit, with w* held fixed: `tuned`
maximises the Laplace evidence, `validation` takes of a grid the one of least NLL on the validation examples
(Daxberger et al. 2021, "Laplace Redux"). `laplace_last_layer` is the full covariance of the last layer.
Cost: as maximum a posteriori; after the fit one backward pass per output and example (diagonal and full on
networks of other layers than linear and convolutional: a Jacobian per example); `full` takes O(d^3) time,
`validation` 750 predictions of each validation example.
Stored per weight: 2 numbers (diagonal), about 4 (Kronecker, square layers), d + 2 (full).
Valid for: every differentiable network and twice differentiable likelihood under a normal prior; Kronecker
for networks of plain linear and convolutional layers that share no weight. Parameters of a likelihood are
point estimates.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, MultivariateNormal

from bench import optimizers, priors
from bench.batches import OnDevice, batches, few, most_rows
from bench.contract import JOINT, Batch, Budget, Method, Noise, Prior, Problem
from bench.divergence import log_prob
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.families import curvature
from bench.families.blocks import Block, Blocks, Product, Rotated, Term, as_vectors
from bench.families.last_layer import last_linear, names_of
from bench.predictions import BadPrediction
from bench.priors import is_normal, joined_normals, normal_tensor
from bench.settings import Positive, settings
from bench.text import one_line
from bench.weights import forward, linearised, linearises, ravel, unravel

NAMES: dict[str, dict[str, object]] = {
    "laplace": {},
    "laplace_last_layer": {"weights": "last_layer", "curvature": "full"},
}
SEARCH = {
    "learning_rate": (1e-4, 1.0, "log"),
    "curvature": ["diagonal", "kronecker", "full"],
    "prior_precision": ["task", "tuned", "validation"],
}
PRECISIONS = [10 ** (k / 2) for k in range(-8, 17)]
"""What `validation` tries, 1e-4 to 1e8, ascending: under the last the normal is as good as a point."""
DRAWS = 30
"""Weight samples behind the NLL of each."""


@settings
class Settings:
    """Settings of Laplace's approximation."""

    learning_rate: Positive = 1e-3
    """Step size of the optimiser, above 0."""
    optimizer: optimizers.Name = "adam"
    """adam, amsgrad, or sgd with Nesterov momentum 0.9."""
    curvature: Literal["diagonal", "kronecker", "full"] = "diagonal"
    """What of the Hessian is kept: its diagonal, a Kronecker product per layer, or all of it."""
    weights: Literal["all", "last_layer"] = "all"
    """Weights that get a covariance; the others are a point mass."""
    predictive: Literal["linearised", "network"] = "linearised"
    """What a draw of the weights predicts by: the network linearised at the mode, or the network itself."""
    prior_precision: Literal["task", "tuned", "validation"] = "task"
    """The task's prior, or one precision by evidence or validation NLL after a first fit, for N(0, s^2)'s."""


class Laplace(Method):
    """A normal at the mode; before `finish_fit` a point mass at the weights."""

    settings_class = Settings
    approximates = "the posterior by a normal at its mode with the curvature there"
    declares = "mode and curvature exact", {"learning_rate": 0.05, "curvature": "full"}
    provides = frozenset({"weight_samples", "moments", "sequential", "weighted", "loss_terms"})
    stacks = True
    validation_samples = 1
    largest_full = 5000
    """Weights up to which `full` is accepted: 1 GB in float64 while the matrix is decomposed."""
    settings: Settings
    tuned_precision: Tensor

    def __init__(self, problem: Problem, settings: Settings, start: Laplace | None = None) -> None:
        super().__init__(problem, settings, start)
        self.network = problem.network()  # its parameters are the mode
        if start is not None:
            self.network.load_state_dict(start.network.state_dict())
            self.likelihood.load_state_dict(start.likelihood.state_dict())
        self.register_buffer("tuned_precision", torch.zeros(()))
        self.tunes = settings.prior_precision != "task" and start is None
        self.names = self._chosen()
        self.layers = self._plain_layers()
        self.size = sum(self.network.get_parameter(name).numel() for name in self.names)
        self.covariance = nn.ModuleList(self._make_blocks())
        self._check_prior()
        self._check_derivatives()

    @property
    def blocks(self) -> list[Block]:
        """The covariance: one block, or one per layer (Kronecker)."""
        return [block for block in self.covariance if isinstance(block, Block)]

    def _chosen(self) -> list[str]:
        """Names of the weights that get a covariance: the last ones of the ravelled vector."""
        if self.settings.weights == "all":
            return [name for name, _ in self.network.named_parameters()]
        path = last_linear(self.network)
        if path is None:
            raise UsageError("laplace: weights last_layer needs a linear layer at the end; take weights all")
        return names_of(self.network, path)

    def _plain_layers(self) -> list[nn.Linear | nn.Conv2d] | None:
        """Layers whose calls give the curvature; None where Jacobians have to."""
        if self.settings.curvature == "full":
            return None
        return curvature.plain_layers(self.network, self.names, few(self.problem.train))

    def _make_blocks(self) -> list[Block]:
        """Standard deviations and bases of fixed shapes, for curvature that can be afforded here."""
        if self.settings.curvature == "diagonal":
            return [Block(1, self.size)]
        if self.settings.curvature == "full":
            if self.size > self.largest_full:
                raise UsageError(
                    f"laplace: curvature full of {self.size} weights needs {40 * self.size**2 / 1e9:.1f} GB; "
                    f"it is limited to {self.largest_full}, take kronecker, diagonal or weights last_layer"
                )
            return [Block(1, self.size, rotated=True)]
        if self.layers is None:
            odd = curvature.odd_weight(self.network, self.names, few(self.problem.train))
            raise UsageError(
                "laplace: curvature kronecker needs plain Linear or Conv2d layers alone, each weight read by "
                f"its own layer's calls alone, which {odd} is not; take full or diagonal"
            )
        shapes = [(len(m.weight), m.weight[0].numel(), m.bias is not None) for m in self.layers]
        return [Block(out, n + bias, bias, rotated=True) for out, n, bias in shapes]

    def _check_prior(self) -> None:
        """Refuses a prior whose precision cannot be added, or tuned."""
        prior = self.make_prior(dict(self.network.named_parameters()))  # not kept: the precision may change
        joint = prior.get(JOINT)
        if isinstance(joint, Blocks):
            tail = joint.blocks[-len(self.blocks) :]
            shapes = [[(b.std.shape, b.rotated) for b in blocks] for blocks in (tail, self.blocks)]
            known = shapes[0] == shapes[1]
        elif isinstance(joint, MultivariateNormal):
            known = self.settings.curvature == "full" and self.settings.weights == "all"
        else:
            known = all(is_normal(p) for p in prior.values())
        if not known:
            raise UsageError(
                "laplace: the prior must be independent normals, or a posterior of these settings"
            )
        if self.tunes:
            normals = joined_normals(prior)
            if normals is None or normals[0].any() or (normals[1] != normals[1][0]).any():
                chosen = f"prior_precision {self.settings.prior_precision}"
                raise UsageError(
                    f"laplace: {chosen} needs a prior N(0, s^2), one s for all weights; take task"
                )

    def spends(self, budget: Budget) -> Budget:
        """The budget as it is; refuses a fit that lacks validation examples, which one that is loaded may."""
        if self.tunes and self.settings.prior_precision == "validation" and self.problem.val is None:
            raise UsageError(
                "laplace: prior_precision validation needs validation examples, and none are set aside: give "
                "--task.validation 0.2 if the task has it (own_table does), or take task or tuned"
            )
        return super().spends(budget)

    def _check_derivatives(self) -> None:
        """Refuses a network that lacks a derivative that is needed after training."""
        examples = few(self.problem.train)
        reason, how = "", ""
        try:
            with torch.no_grad():
                outputs = self.network(examples)
            if self.layers is None:
                roots = torch.eye(outputs.shape[1]).expand(len(outputs), -1, -1).to(outputs)
                curvature.jacobians(self.network, self.names, examples, roots)
            if self.settings.predictive == "linearised":
                how = "; take predictive network"
                if not linearises(self.network, examples):
                    reason = "an operation has no second one"
        except (RuntimeError, NotImplementedError) as error:
            reason = one_line(error, 100)
        if reason:
            raise UsageError(f"laplace: the network lacks a derivative that is needed ({reason}){how}")

    # ---- after training

    def finish_fit(self, loader: Iterable[Batch]) -> None:
        """Sums the curvature over all examples once, adds the prior's precision, and inverts."""
        own = self._curvature(loader)
        if self.tunes:
            choose = self._tune if self.settings.prior_precision == "tuned" else self._validate
            tuned = choose(own)
            self.tuned_precision.fill_(tuned)
            self._settle(own, self._isotropic(tuned))
        else:
            self._settle(own, self._prior_terms())

    def _settle(self, own: Sequence[Term], before: Sequence[Term]) -> None:
        for block, term, given in zip(self.blocks, own, before, strict=True):
            block.settle(term, given)

    def _isotropic(self, precision: float) -> list[Rotated]:
        return [Rotated(torch.full_like(b.std, precision, dtype=torch.float64)) for b in self.blocks]

    def _curvature(self, loader: Iterable[Batch]) -> list[Term]:
        """The Gauss-Newton matrix of the full training set, block by block, in float64."""
        rows, sums = 0, list[Tensor]()
        for batch in loader:
            for piece in curvature.pieces(batch):
                rows += len(piece.inputs)
                terms = self._sums(piece)
                sums = sums or [torch.zeros_like(t, dtype=torch.float64) for t in terms]
                for total, term in zip(sums, terms, strict=True):
                    total += term
        factor = self.problem.num_train / rows
        if self.settings.curvature == "diagonal":
            return [Rotated(factor * sums[0][None])]
        if self.settings.curvature == "full":
            return [Product(factor * sums[0].new_ones(1, 1), sums[0])]
        triples = zip(sums[::3], sums[1::3], sums[2::3], strict=True)
        return [Product(factor * g, a / count.clamp(min=1e-30)) for g, a, count in triples]

    def _sums(self, piece: Batch) -> list[Tensor]:
        """What of some examples is added up: the diagonal, the matrix, or G, A and A's count per layer."""
        if self.settings.curvature == "full":
            matrices = (j.flatten(0, 1) for j in self._jacobians(piece))
            return [reduce(torch.add, (j.T @ j for j in matrices))]
        if self.layers is None:
            return [reduce(torch.add, (j.square().sum((0, 1)) for j in self._jacobians(piece)))]
        gradients = curvature.layer_gradients(self.network, self.layers, self.likelihood, piece)
        if self.settings.curvature == "diagonal":
            squares = zip(self.layers, (curvature.squares(a, g) for a, g in gradients), strict=True)
            return [torch.cat([as_vectors(s, layer.bias is not None) for layer, s in squares])]
        sums = []
        weights = piece.weights if piece.weights is not None else piece.inputs.new_ones(len(piece.inputs))
        for a, g in gradients:
            flat = g.flatten(0, 2)
            sums += [flat.T @ flat, torch.einsum("b,bti,btj->ij", weights, a, a), weights.sum() * a.shape[1]]
        return sums

    def _jacobians(self, piece: Batch) -> Iterator[Tensor]:
        """Rows `[B, C, k]` whose outer products add up to the Gauss-Newton matrix, in chunks."""
        with torch.no_grad():
            at_mode = self.network(piece.inputs)
        roots = curvature.output_roots(self.likelihood, at_mode, piece)
        chunk = max(1, curvature.LARGEST // (at_mode.shape[1] * self.size))
        for examples, some in zip(piece.inputs.split(chunk), roots.split(chunk), strict=True):
            yield curvature.jacobians(self.network, self.names, examples, some)

    def _prior_terms(self) -> list[Term]:
        """Precision of the prior, block by block, in float64."""
        joint = self.prior.get(JOINT)
        if isinstance(joint, MultivariateNormal):
            precision = torch.cholesky_inverse(joint.scale_tril.double())
            return [Product(precision.new_ones(1, 1), precision)]
        if isinstance(joint, Blocks):
            return [block.term() for block in joint.blocks[-len(self.blocks) :]]
        stds = torch.cat([self.prior[name].stddev.flatten() for name in self.names])
        precisions = stds.double().square().reciprocal()
        parts = precisions.split([b.size for b in self.blocks])
        return [Rotated(b.matrix(part)) for b, part in zip(self.blocks, parts, strict=True)]

    def _tune(self, own: Sequence[Term]) -> float:
        """The precision t that maximises the evidence, log N(w* | 0, 1/t) - (1/2) log det (curvature + t).

        Its slope vanishes where the sum of h / (t (h + t)) over the curvature's eigenvalues h is |w*|^2; the
        sum falls with t.
        """
        eigenvalues = torch.cat([term.eigenvalues() for term in own])
        squares = sum(self.network.get_parameter(name).detach().square().sum() for name in self.names)
        low, high = math.log(1e-8), math.log(1e8)
        for _ in range(60):
            t = math.exp((low + high) / 2)
            if (eigenvalues / (t * (eigenvalues + t))).sum() > squares:
                low = math.log(t)
            else:
                high = math.log(t)
        return math.exp((low + high) / 2)

    def _validate(self, own: Sequence[Term]) -> float:
        """The one of `PRECISIONS` with the least validation NLL, all under the same noise.

        An isotropic prior leaves the bases as they are: what it gains is added to every eigenvalue.
        """
        self._settle(own, self._isotropic(PRECISIONS[0]))
        least = [b.std.double().square().reciprocal() for b in self.blocks]
        seed = int(torch.randint(2**62, (), generator=self.generator, device=self.generator.device))
        nlls = dict[float, float]()
        for t in PRECISIONS:
            for block, precision in zip(self.blocks, least, strict=True):
                block.std.copy_((precision + (t - PRECISIONS[0])).rsqrt())
            nlls[t] = self._validation_nll(seed)
        return min(nlls, key=nlls.__getitem__)

    def _validation_nll(self, seed: int) -> float:
        """Of all validation examples together, in nats; without end where a prediction is not finite."""
        val, device, total = self.problem.val, self.blocks[0].std.device, 0.0
        assert val is not None
        for batch in OnDevice(batches(val, most_rows(val, 50 * DRAWS), None, device=device), device):
            try:
                prediction = self.predict(batch.inputs, DRAWS, torch.Generator(device).manual_seed(seed))
            except BadPrediction:  # the widest normals can make a deep network overflow
                return math.inf
            total -= float(prediction.log_score(batch.targets).double().sum())
        return total

    def diagnostics(self, inputs: Tensor | None = None) -> dict[str, float]:
        """The prior precision that was chosen, if one was."""
        if inputs is not None or not self.tunes:
            return {}
        return {"prior_precision": float(self.tuned_precision)}

    # ---- the distribution

    def sample_weights(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws from the normal, stacked `[S, *shape]`; the s-th does not depend on how many follow it."""
        with torch.no_grad():
            like = dict(self.network.named_parameters())
            draws = ravel({name: p[None] for name, p in like.items()}).repeat(num_samples, 1)
            # One call per sample: a single call for all would fill them in an order that depends on S.
            empty = draws.new_empty(self.size)
            noise = torch.stack([empty.normal_(generator=generator).clone() for _ in range(num_samples)])
            parts = noise.split([b.size for b in self.blocks], 1)
            deviations = [b.colour(part) for b, part in zip(self.blocks, parts, strict=True)]
            draws[:, -self.size :] += torch.cat(deviations, 1)
            return unravel(draws, like)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean and variance of every weight; a variance of 0 outside the chosen weights."""
        means = {name: p.detach() for name, p in self.network.named_parameters()}
        variances = {name: torch.zeros_like(m) for name, m in means.items()}
        return means, variances | self._per_tensor(torch.cat([b.variance() for b in self.blocks]))

    def _per_tensor(self, vector: Tensor) -> dict[str, Tensor]:
        like = {name: self.network.get_parameter(name) for name in self.names}
        return {name: w[0] for name, w in unravel(vector[None], like).items()}

    def as_prior(self) -> Prior:
        """The normal as it is now: independent normals, one over all weights (full), or `Blocks`."""
        given, modes = self.prior, dict(self.network.named_parameters())
        if self.settings.curvature == "diagonal":
            stds = self._per_tensor(self.blocks[0].std.flatten())
            own = {name: (modes[name], std) for name, std in stds.items()}
            others = {name: (given[name].mean, given[name].stddev) for name in modes if name not in own}
            return priors.frozen({name: (others | own)[name] for name in modes}, normal_tensor)
        mode = torch.cat([modes[name].detach().flatten() for name in self.names])
        blocks = self.blocks
        joint = given.get(JOINT)
        if isinstance(joint, Blocks):
            mode = torch.cat([joint.loc[: -self.size], mode])
            blocks = joint.blocks[: -len(blocks)] + blocks
        elif self.settings.weights == "last_layer":
            rest = [given[name] for name in modes if name not in self.names]
            mode = torch.cat([*(p.mean.flatten() for p in rest), mode])
            blocks = [_independent_block(p.stddev) for p in rest] + blocks
        elif self.settings.curvature == "full":
            return _frozen_normal(mode, blocks[0])
        return _frozen_blocks(mode, blocks)

    # ---- loss and prediction

    def loss_terms(self, batch: Batch, noise: Noise) -> tuple[Tensor, Tensor]:
        """Negative log likelihood and negative log prior of the weights, in nats."""
        weights = {name: p[None] for name, p in self.network.named_parameters()}
        outputs = forward(self.network, weights, batch.inputs)
        prior_term = -log_prob(self.prior, weights).sum()
        return likelihood_term(self.likelihood, outputs, batch, self.problem.num_train), prior_term

    def outputs(self, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Of the network linearised at the mode, or of the network itself (`predictive`)."""
        run = linearised if self.settings.predictive == "linearised" else forward
        return run(self.network, weights, inputs)


# ------------------------------------------------------------------------------------------------ helpers


def _independent_block(std: Tensor) -> Block:
    block = Block(1, std.numel())
    block.std = std.detach().reshape(1, -1)
    return block


def _frozen_blocks(loc: Tensor, blocks: list[Block]) -> Prior:
    loc, blocks = loc.clone(), copy.deepcopy(blocks)

    def prior(parameters: Mapping[str, Tensor]) -> dict[str, Distribution]:
        like = next(iter(parameters.values()))
        return {JOINT: Blocks(loc.to(like), [copy.deepcopy(b).to(like.device, like.dtype) for b in blocks])}

    return prior


def _frozen_normal(loc: Tensor, block: Block) -> Prior:
    loc, root = loc.clone(), (block.right * block.std).double()
    scale_tril = torch.linalg.cholesky(root @ root.T)

    def prior(parameters: Mapping[str, Tensor]) -> dict[str, Distribution]:
        like = next(iter(parameters.values()))
        return {JOINT: MultivariateNormal(loc.to(like), scale_tril=scale_tril.to(like), validate_args=False)}

    return prior
