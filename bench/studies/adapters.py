"""The last layers of a pretrained transformer, frozen, with low-rank adapters, and a head.

What is inferred are the adapters and the head: the pretrained weights are buffers, so that no posterior is of
them and no step moves them. A query or value projection W x + b becomes W x + b + (alpha / r) B A x, with A
`[r, H]` and B `[H, r]`. B starts at zero, so that a fit starts at the pretrained network.

Source: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models" (adapters on queries and values,
their start, their scale, dropout on what A reads). Devlin et al. 2019, "BERT", is the network. Attention is
written out: the fused one has no second derivative, which a linearised network needs.

Shapes: B texts of L tokens, of H numbers each; r is the rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from bench.bert import Layers
from bench.networks import Dropout

_UNSEEN = -3e4
"""Added to the score of what is no token: its exponential is 0 in every type of number."""


class Frozen(nn.Module):
    """A pretrained weight and bias that no fit moves; checkpoints do not hold them.

    Args:
        weights: By name.
        name: Of the layer that they are of.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weights: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        for kind in ("weight", "bias"):
            self.register_buffer(kind, weights[f"{name}.{kind}"], persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """W x + b."""
        return functional.linear(inputs, self.weight, self.bias)


class Adapted(Frozen):
    """A frozen linear layer and what a low-rank adapter adds to it.

    Args:
        weights: By name.
        name: Of the layer that is adapted.
        rank: r.
        scale: alpha / r.
        dropout: Rate of dropout of what A reads.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], name: str, rank: int, scale: float, dropout: float
    ) -> None:
        super().__init__(weights, name)
        outputs, inputs = self.weight.shape
        self.scale, self.dropout = scale, Dropout(dropout)
        self.down = nn.Linear(inputs, rank, bias=False)  # A
        self.up = nn.Linear(rank, outputs, bias=False)  # B
        nn.init.normal_(self.down.weight, std=inputs**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """W x + b + (alpha / r) B A x."""
        return super().forward(inputs) + self.scale * self.up(self.down(self.dropout(inputs)))


class Layer(nn.Module):
    """A layer of BERT whose queries and values are adapted.

    Args:
        weights: Its pretrained ones, by name.
        heads: Of attention.
        epsilon: Added to the variance of a layer norm.
        rank: r.
        scale: alpha / r.
        dropout: Rate of dropout of what A reads.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        heads: int,
        epsilon: float,
        rank: int,
        scale: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.heads, self.epsilon = heads, epsilon
        self.query, self.value = (
            Adapted(weights, f"attention.self.{name}", rank, scale, dropout) for name in ("query", "value")
        )
        self.key = Frozen(weights, "attention.self.key")
        self.mixed, self.first = (
            Frozen(weights, f"attention.output.{name}") for name in ("dense", "LayerNorm")
        )
        self.inner = Frozen(weights, "intermediate.dense")
        self.outer, self.second = (Frozen(weights, f"output.{name}") for name in ("dense", "LayerNorm"))

    def forward(self, hidden: Tensor, is_token: Tensor) -> Tensor:
        """The next hidden states `[B, L, H]`; `is_token` `[B, L]` is 1 at tokens, else 0."""
        query, key, value = (
            part(hidden).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = query @ key.mT * query.shape[-1] ** -0.5 + _UNSEEN * (1 - is_token[:, None, None])
        mixed = self.mixed((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        hidden = self._norm(self.first, hidden + mixed)
        return self._norm(self.second, hidden + self.outer(functional.gelu(self.inner(hidden))))

    def _norm(self, norm: Frozen, inputs: Tensor) -> Tensor:
        return functional.layer_norm(inputs, inputs.shape[-1:], norm.weight, norm.bias, self.epsilon)


class Reader(nn.Module):
    """Adapted layers, the mean over tokens, and a linear head.

    The head reads the vector of a text at length sqrt(H), so that each of its numbers has mean square 1.

    Args:
        layers: The last ones of an encoder.
        outputs: Of the head.
        rank: r of the adapters, at least 1.
        alpha: Their scale times r.
        dropout: Rate of dropout of what A reads.
    """

    def __init__(self, layers: Layers, outputs: int, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        own = layers.heads, layers.epsilon, rank, alpha / rank, dropout
        self.layers = nn.ModuleList(Layer(weights, *own) for weights in layers.weights)
        width = len(layers.weights[0]["output.dense.bias"])
        self.head = nn.Linear(width, outputs)
        nn.init.kaiming_normal_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def vectors(self, inputs: Tensor) -> Tensor:
        """The mean over the tokens of what the last layer says of them, of length 1, `[B, H]`.

        Args:
            inputs: What the layers below say of the tokens, `[B, L, H]`, then rows of zeros, which no token
                has.
        """
        is_token = (inputs != 0).any(-1).to(inputs.dtype)
        hidden = inputs
        for layer in self.layers:
            hidden = layer(hidden, is_token) * is_token[..., None]  # zeros, which no curvature counts
        return functional.normalize(hidden.sum(1), dim=1)  # of this length the mean and the sum are one

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits `[B, C]` of texts `[B, L, H]`."""
        vectors = self.vectors(inputs)
        outputs: Tensor = self.head(vectors * vectors.shape[1] ** 0.5)
        return outputs
