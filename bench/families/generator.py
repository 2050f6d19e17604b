"""Generative replay: pairs of inputs and labels that stand in for the examples of earlier fits.

A variational autoencoder (Kingma and Welling 2014) learns the inputs of a fit together with generated inputs
that stand for those of earlier fits; the model of the earlier fits labels them (Shin et al. 2017). Its
settings are those of van de Ven and Tolias 2018: symmetric, 2 x 400 hidden units, 100 latent variables, Adam
1e-3, 2000 steps per fit, 128 new and 128 generated inputs a step, hard labels. That paper is on replay
without Bayes: taking its generator for variational generative replay is our choice, since the settings of
that method's own generator could not be found.

Two more choices are ours: both halves of a step are weighted by the number of examples that they stand for,
and generated pixels are means, not draws from the decoder.

Shapes: S weight samples, B inputs, D pixels of an input, L latent variables.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Size, Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import TensorDataset

from bench import likelihoods, networks
from bench.contract import Batch, Likelihood, Problem
from bench.energy import likelihood_term
from bench.errors import UsageError
from bench.weights import Weights, forward

_LEARNING_RATE = 1e-3
_BATCH = 128
"""New inputs in a training step, and as many generated ones."""


class VAE(nn.Module):
    """A variational autoencoder of inputs in [0, 1]: standard normal latent variables, Bernoulli pixels.

    Args:
        shape: Of one input, D numbers.
        hidden: Units in each of two hidden layers of the encoder, and of the decoder.
        latent: L.
    """

    def __init__(self, shape: Size, hidden: int, latent: int) -> None:
        super().__init__()
        self.shape, self.latent = shape, latent
        self.encoder = networks.mlp(shape.numel(), 2 * latent, (hidden, hidden))
        self.decoder = networks.mlp(latent, shape.numel(), (hidden, hidden))

    def posterior(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance `[B, L]` of the latent variables of inputs `[B, ...]`."""
        mean, log_variance = self.encoder(inputs).chunk(2, 1)
        return mean, log_variance

    def bound(self, inputs: Tensor, noise: Tensor) -> Tensor:
        """Lower bound on log p(input), `[B]`, in nats, from one draw of standard normal noise `[B, L]`.

        A grey value counts as the probability of a pixel that is on or off.
        """
        mean, log_variance = self.posterior(inputs)
        logits = self.decoder(torch.addcmul(mean, (0.5 * log_variance).exp(), noise))
        nll = functional.binary_cross_entropy_with_logits(logits, inputs.flatten(1), reduction="none").sum(1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1)
        return -nll - divergence

    def noise(self, size: int, generator: torch.Generator) -> Tensor:
        """Standard normal `[size, L]`, in the type of the weights and on their device."""
        like = next(self.parameters())
        return torch.randn(size, self.latent, generator=generator, device=like.device, dtype=like.dtype)

    def sample(self, size: int, generator: torch.Generator) -> Tensor:
        """Generated inputs `[size, ...]`: the pixels' probabilities at drawn latent variables."""
        return self.decoder(self.noise(size, generator)).sigmoid().view(size, *self.shape)


def train(vae: VAE, inputs: Tensor, num_past: int, steps: int, generator: torch.Generator) -> None:
    """Trains on new inputs and on generated ones, which stand for `num_past` examples of earlier fits.

    Args:
        vae: Trained in place; its parameters get no gradients afterwards.
        inputs: All new examples `[N, ...]`.
        num_past: Examples that it has learned before; 0 if it is new.
        steps: Optimiser steps.
        generator: Source of rows, noise and generated inputs.
    """
    past = copy.deepcopy(vae)
    vae.requires_grad_(True)
    optimizer = optim.Adam(vae.parameters(), _LEARNING_RATE, fused=True)
    share = len(inputs) / (len(inputs) + num_past)
    for _ in range(steps):
        rows = torch.randint(len(inputs), (_BATCH,), generator=generator, device=inputs.device)
        batch = inputs[rows]
        if num_past:
            with torch.no_grad():
                batch = torch.cat([batch, past.sample(_BATCH, generator)])
        new, *old = vae.bound(batch, vae.noise(len(batch), generator)).split(_BATCH)
        loss = -share * new.mean()
        if old:
            loss = loss - (1 - share) * old[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    vae.requires_grad_(False)


class Replay(nn.Module):
    """Replayed pairs in a method's loss, and the generator that they come from.

    During a fit the generator is that of the fits before; `learn` then adds the examples of this fit. Its
    parameters are part of the state dictionary and are trained by `learn` alone. The weights that label are
    not in the state dictionary: a fit takes them from the one that it goes on from.

    Args:
        problem: Of this fit.
        hidden: See `VAE`.
        latent: See `VAE`.
        name: Of the method, for messages.

    Raises:
        UsageError: If inputs are not in [0, 1] or targets are not classes.
    """

    num_learned: Tensor

    def __init__(self, problem: Problem, hidden: int, latent: int, name: str) -> None:
        super().__init__()
        if not isinstance(problem.likelihood, likelihoods.Categorical | likelihoods.Bernoulli):
            raise UsageError(f"{name} labels what it replays by class; take a method without replay")
        self.name, self.num_new, self.num_past = name, problem.num_train, 0
        train = problem.train
        self._check(train.tensors[0] if isinstance(train, TensorDataset) else train[0][0])
        self.vae = VAE(problem.train[0][0].shape, hidden, latent).requires_grad_(False)
        self.register_buffer("num_learned", torch.zeros((), dtype=torch.long))
        self._teacher: list[str] = []

    def _check(self, inputs: Tensor) -> None:
        if inputs.min() < 0 or inputs.max() > 1:
            raise UsageError(f"{self.name} generates inputs in [0, 1], these are not; rescale them")

    def follow(self, start: Replay, weights: Weights) -> None:
        """Goes on from an earlier fit.

        Args:
            start: Of the earlier fit, after `learn`.
            weights: Its draws `[S, *shape]`, whose averaged prediction labels what is replayed.
        """
        self.load_state_dict(start.state_dict())
        self.num_past = int(start.num_learned)
        self._teacher = list(weights)
        for i, w in enumerate(weights.values()):
            self.register_buffer(f"teacher{i}", w.detach().clone(), persistent=False)

    def seeds(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """The noise of `likelihood_term`: one seed for all S samples, `[S]`; none in a run's first fit."""
        if not self.num_past:
            return {}
        seed = torch.randint(2**62, (1,), generator=generator, device=generator.device)
        return {"replay": seed.expand(num_samples)}

    @torch.no_grad()
    def pairs(self, network: nn.Module, likelihood: Likelihood, size: int, seed: int) -> Batch:
        """Generated inputs `[size, ...]` with the most probable class of each.

        Args:
            network: Gives the architecture; its own parameters are not used.
            likelihood: Of the targets.
            size: Number of pairs.
            seed: Decides the pairs.
        """
        generator = torch.Generator(self.num_learned.device).manual_seed(seed)
        weights = {name: self.get_buffer(f"teacher{i}") for i, name in enumerate(self._teacher)}
        with torch.autocast(self.num_learned.device.type, enabled=False):  # as predictions are everywhere
            inputs = self.vae.sample(size, generator)
            prediction = likelihood.predict(forward(network, weights, inputs))
        return Batch(inputs, prediction.average().argmax(-1))

    def likelihood_term(
        self,
        network: nn.Module,
        likelihood: Likelihood,
        weights: Weights,
        batch: Batch,
        seeds: Tensor | None,
    ) -> Tensor:
        """Negative log likelihood of this fit's examples and of the earlier ones, in nats.

        The batch `[B, ...]` is scaled to the number of this fit's examples, B replayed pairs to the number
        of the earlier ones (`bench.energy.likelihood_term`).
        """
        if seeds is None:
            return likelihood_term(likelihood, forward(network, weights, batch.inputs), batch, self.num_new)
        size = len(batch.inputs)
        past = self.pairs(network, likelihood, size, int(seeds[0]))
        outputs = forward(network, weights, torch.cat([batch.inputs, past.inputs]))
        new = likelihood_term(likelihood, outputs[:, :size], batch, self.num_new)
        return new + likelihood_term(likelihood, outputs[:, size:], past, self.num_past)

    def learn(self, loader: Iterable[Batch], steps: int, generator: torch.Generator) -> None:
        """Trains the generator on this fit's examples beside those that it knows.

        Args:
            loader: All training examples once.
            steps: Optimiser steps.
            generator: Source of all randomness.
        """
        inputs = torch.cat([batch.inputs for batch in loader])
        self._check(inputs)
        train(self.vae, inputs, self.num_past, steps, generator)
        self.num_learned.fill_(self.num_past + self.num_new)
