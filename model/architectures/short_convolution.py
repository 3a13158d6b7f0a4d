"""Gated short convolutions (LFM2, Liquid AI 2025): a token's output is C conv(B x), of its own gates B and C.

The state is the last inputs B x of the convolution alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from twostroke.model.architectures.states import StateMixer
from twostroke.model.backend import Linear
from twostroke.model.shapes.state_sizes import ConvolutionSizes


@dataclass(frozen=True)
class ConvolutionWeights:
    """Weights of one rank's channels. All but the projection are fp32."""

    inputs: Linear  # hidden -> B, C, x
    conv: Tensor  # [channels, taps]
    conv_bias: Tensor | None  # [channels]
    sizes: ConvolutionSizes  # this rank's channels


class ShortConvolution(StateMixer[ConvolutionWeights]):
    """One rank's channels of a layer's short convolution, over loaded weights."""

    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.weights.inputs(x),)

    def conv_inputs(self, products: Sequence[Tensor]) -> Tensor:
        gate, _, x = products[0].float().chunk(3, dim=1)
        return gate * x

    def scan(self, convolved: Tensor, products: Sequence[Tensor], matrix: Tensor) -> tuple[Tensor, Tensor]:
        return convolved * products[0].chunk(3, dim=1)[1].float(), matrix

    def step(self, convolved: Tensor, products: Sequence[Tensor], matrix: Tensor) -> tuple[Tensor, Tensor]:
        return self.scan(convolved, products, matrix)
