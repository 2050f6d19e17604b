"""STUB: replaced when main's is merged."""

from torch import Tensor

NUM_UNIFORMS = 8


def augment(images: Tensor, uniforms: Tensor | None, mean: Tensor, std: Tensor) -> Tensor:
    """STUB."""
    return (images.float() - mean[:, None, None]) / std[:, None, None]
