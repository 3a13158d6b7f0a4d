"""The table of rotary position embeddings (Su et al. 2021), with the scalings a Llama checkpoint may ask for."""

import math

import torch
from torch import Tensor

from twostroke.model.config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """fp32 [num_positions, head_dim]: cos of the head_dim / 2 frequencies, then sin."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """fp32 [head_dim / 2]: radians a position.

    Computed in the same order of fp32 operations as transformers, so that far positions agree to the last bit.
    """
    inverse = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match rope.type:
        case "default" | "dynamic":
            return inverse
        case "linear":
            return inverse / rope.factor
        case "llama3":
            return _llama3(rope, inverse)
        case "yarn":
            return _yarn(rope, inverse, head_dim)


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

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return inverse / rope.factor * (1 - kept) + inverse * kept
