"""The table of rotary position embeddings (Su et al. 2021), with the scalings that checkpoints may ask for.

Kernels rotate dimension i of a head with dimension i + D / 2, all of them. Where a family rotates other pairs, or only
some dimensions, the rows of its query and key projections are put into an order in which its pairs lie so (`head_order`
of parameters.py), which changes no product of a query and a key; what is not rotated has an angle of 0.
"""

import math

import torch
from torch import Tensor

from twostroke.model.config import QueryScale, RopeConfig


def cos_sin_table(rope: RopeConfig | None, head_dim: int, num_positions: int) -> Tensor:
    """fp32 [num_positions, head_dim]: cos of the head_dim / 2 frequencies, then sin. None rotates nothing."""
    cos, sin = torch.ones(num_positions, head_dim // 2), torch.zeros(num_positions, head_dim // 2)
    if rope is not None:
        rotated = rope.rotated or head_dim
        frequencies = inverse_frequencies(rope, head_dim if rope.type == "proportional" else rotated)[: rotated // 2]
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        cos[:, : rotated // 2] = angles.cos() * rope.attention_factor
        sin[:, : rotated // 2] = angles.sin() * rope.attention_factor
    return torch.cat((cos, sin), dim=-1)


def query_scale_table(scale: QueryScale | None, num_positions: int) -> Tensor | None:
    """fp32 [num_positions], in the order of operations of transformers."""
    if scale is None:
        return None
    positions = torch.arange(num_positions, dtype=torch.float32)
    return torch.log1p(torch.floor((positions + scale.shift) / scale.tokens)) * scale.factor + 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """fp32 [head_dim / 2]: radians a position.

    Computed in the same order of fp32 operations as transformers, so that far positions agree to the last bit.
    """
    inverse = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match rope.type:
        case "default" | "dynamic":
            return inverse
        case "linear" | "proportional":
            return inverse / rope.factor
        case "llama3":
            return _llama3(rope, inverse)
        case "yarn":
            return _yarn(rope, inverse, head_dim)
        case "longrope":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            return 1.0 / (torch.tensor(rope.factors) * rope.theta**exponents)


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / inverse
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * inverse / rope.factor + smooth * inverse
    scaled = torch.where(wavelength > shortest_stretched, inverse / rope.factor, inverse)
    return torch.where((wavelength >= longest_kept) & (wavelength <= shortest_stretched), between, scaled)


def _yarn(rope: RopeConfig, inverse: Tensor, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): interpolate the dimensions that turn less than `beta_slow` times over the
    original context, keep those that turn more than `beta_fast` times, ramp between."""

    def rotated_dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = rotated_dimension(rope.beta_fast), rotated_dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return inverse / rope.factor * (1 - kept) + inverse * kept
