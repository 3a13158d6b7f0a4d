"""Single tokens of layers that keep a state, on CUDA (model/cuda/kernels/states/)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.model.architectures.delta_net import DeltaWeights
from twostroke.model.architectures.mamba import MambaWeights
from twostroke.model.architectures.short_convolution import ConvolutionWeights
from twostroke.model.architectures.states import StateWeights
from twostroke.model.batch import BatchLayout
from twostroke.model.cuda.kernels.states import delta_net, mamba, short_convolution


class CudaStates:
    """Implements model.backend.StateKernels; prompts are torch's."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Implement StateKernels.empty."""
        return torch.empty(shape, dtype=dtype, device=device)

    def step(
        self, weights: StateWeights, products: Sequence[Tensor], kv_layer: Tensor, layout: BatchLayout, out: Tensor
    ) -> None:
        """Implement StateKernels.step."""
        where = kv_layer, layout, out
        match weights:
            case DeltaWeights():
                delta_net.delta_step(products, weights, *where)
            case MambaWeights():
                mamba.mamba_step(products, weights, *where)
            case ConvolutionWeights():
                short_convolution.convolution_step(products, weights, *where)
