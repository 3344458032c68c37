"""Muon's orthogonalisation in float32, for devices that emulate bf16: replaces timm's, which always iterates in bf16.

Without bf16 instructions timm's is many times as slow as in float32 (`bf16_is_emulated` has a measurement). This one
also iterates on the Gram matrix, which is small, instead of on the gradient: 1.5 times as fast for a (192, 1728)
convolution (benchmarks/results/LOG.md, "Muon instead of SGD").
"""

from __future__ import annotations

from collections.abc import Sequence

import timm.optim.muon
import torch

from resolute.train.devices.hardware import bf16_is_emulated

__all__ = ["orthogonalize", "replace_emulated_bf16"]

_EPS = 1e-7  # timm's
_timms = timm.optim.muon.zeropower_via_newtonschulz


def replace_emulated_bf16() -> None:
    """Make timm's Muon use `orthogonalize` for gradients on devices that emulate bf16; it has no setting for that."""
    timm.optim.muon.zeropower_via_newtonschulz = _on_any_device  # type: ignore[assignment]  # why: G is positional


def _on_any_device(
    gradient: torch.Tensor,
    steps: int,
    coefficients: list[tuple[float, float, float]],
    eps: float = _EPS,
    safety_factor: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    scale_eps: bool = False,
) -> torch.Tensor:
    if not bf16_is_emulated(gradient.device) or scale_eps:
        return _timms(gradient, steps, coefficients, eps, safety_factor, dtype, scale_eps)
    last = [coefficients[-1]] * (steps - len(coefficients))
    return orthogonalize(gradient, [*coefficients[:steps], *last], eps=eps, safety_factor=safety_factor)


def orthogonalize(
    gradient: torch.Tensor,
    coefficients: Sequence[tuple[float, float, float]],
    *,
    eps: float = _EPS,
    safety_factor: float = 1.0,
) -> torch.Tensor:
    """Approximately U V' of the gradient's singular value decomposition U S V', (..., m, n) float32.

    One Newton-Schulz iteration per (a, b, c): X <- (a + b X X' + c (X X')²) X, from the gradient divided by
    `safety_factor` times its Frobenius norm, or by `eps` if that is larger. All factors are polynomials of the first
    X X' and commute, so only their product is computed, and X itself is multiplied once. Rounding errors stay below
    1e-3 of the result, also for gradients of low rank. Source: Jordan, kellerjordan.github.io/posts/muon.
    """
    is_tall = gradient.size(-2) > gradient.size(-1)
    x = (gradient.mT if is_tall else gradient).float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * safety_factor).clamp(min=eps)
    gram = x @ x.mT
    product = torch.eye(gram.size(-1), device=gram.device)
    for number, (a, b, c) in enumerate(coefficients):
        factor = b * gram + c * gram @ gram
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor @ product
        if number + 1 < len(coefficients):
            gram = factor @ gram @ factor
    result = product @ x
    return result.mT if is_tall else result
