"""The operations of a decoder layer that differ by device: vectorised torch and numba on CPUs, Triton on CUDA.

Shapes: T tokens of the whole batch, flattened; B sequences; H query heads, G KV heads, D head dimension, all of this
tensor-parallel rank. What each operation must compute stands in torch in tests/rigs/reference.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from twostroke.model.batch import BatchLayout
from twostroke.model.config import Activation, Quantization, Routing

if TYPE_CHECKING:
    from twostroke.model.architectures.states import StateWeights
    from twostroke.model.checkpoint.quantization import QuantizedWeight
    from twostroke.model.parallel.tensor_parallel import ContextParts


@dataclass(frozen=True)
class LoadOptions:
    """Options for how each rank of an engine holds the model."""

    dtype: torch.dtype  # of activations, and of weights that are not quantised
    device: torch.device
    max_context: int  # tokens
    quantization: Quantization = "auto"
    kv_dtype: torch.dtype | None = None  # of the cache; None: that of activations
    spare_experts: int = 0  # slots of the rank, in each layer, for copies of other ranks' experts
    shares_contexts: bool = False  # the rank caches its part of each block's tokens


class Linear(Protocol):
    """A projection y = x W^T + b with its weights inside, laid out once for the device: there is no other copy."""

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, in] -> [T, out], in x's dtype unless `out_dtype` is given."""

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """Look up rows as Backend.embed does, with these weights as the table: for an embedding tied to the LM head."""


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms of each head's queries and of its keys."""

    q: Tensor  # fp32 [D], in the order of `parameters.head_order`
    k: Tensor  # fp32 [D]
    eps: float
    v: Tensor | None = None  # fp32 [D]: of its values, too


@dataclass(frozen=True)
class RowNorms:
    """RMSNorms of all queries of a token together, and of all its keys, of this rank and the others.

    A tensor-parallel rank knows the sums of squares of its own. Where ranks hold copies of KV heads, each head counts
    as often as any other.
    """

    q: Tensor  # fp32 [H D], in the order of `parameters.head_order`
    k: Tensor  # fp32 [G D]
    ranks: int
    eps: float


@dataclass(frozen=True)
class GroupNorm:
    """RMSNorm of each group of neighbours in a row, of which other ranks may have a part: then this rank has a part of
    one group, and sums of squares have a column for each group of all ranks."""

    weight: Tensor  # fp32 [width], of this rank
    size: int  # numbers of a group, on all ranks
    eps: float
    shared_groups: int = 0  # of all ranks, where they share groups; 0: this rank's groups are whole
    first: int = 0  # which of those this rank's is; 0 where they are whole

    @property
    def own_groups(self) -> int:
        """Number of groups that this rank has, or has a part of."""
        return 1 if self.shared_groups else len(self.weight) // self.size

    @property
    def columns(self) -> int:
        """Number of groups whose sums of squares make up a row."""
        return self.shared_groups or self.own_groups


@dataclass(frozen=True)
class KVScales:
    """Divisors of a layer's keys and values before they are rounded to an FP8 cache, and factors when they are loaded.
    1 for any other cache."""

    key: float = 1.0
    value: float = 1.0


AS_THEY_ARE = KVScales()
FP8_LIMIT = 448.0
"""The largest number of e4m3 (Micikevicius et al. 2022)."""


@dataclass(frozen=True)
class AttentionForm:
    """Terms of a layer's attention: how a query's scores become weights of its context's values."""

    scale: float
    window: int = 0  # the last positions that a query attends to, its own included; 0: all; a chunk: -size
    soft_cap: float = 0.0  # c: a scaled score s becomes c tanh(s / c); 0: none
    sinks: Tensor | None = None  # fp32 [H]: the score of one more key, which has no value (Xiao et al. 2024)
    kv_scales: KVScales = AS_THEY_ARE

    @property
    def cached_scale(self) -> float:
        """Scale of the scores of keys as they lie in the cache."""
        return self.scale * self.kv_scales.key


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016)."""

    weight: Tensor  # fp32 [width]
    bias: Tensor  # fp32 [width]
    eps: float


@dataclass(frozen=True)
class MLAHeads:
    """Weights that turn latents into a layer's heads (model/config.py's MLASizes). R is the size of a latent, P the
    rotated part, N and V the sizes of a head's key and value."""

    keys: Tensor  # [H, N, R]
    values: Tensor  # [H, R, V]
    scale: float  # of scores


class MLAAttention(Protocol):
    """MLA with its weights inside, laid out for the device."""

    def __call__(
        self, q: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout, chosen: Tensor | None = None
    ) -> Tensor:
        """Rotate queries [T, H (N + P)], of each head the rotary part last, and attend causally. Returns [T, H V].

        cos_sin and kv_layer as to Backend.write_latents. `chosen` as ContextIndex.choose returns; None: all tokens.
        """


@dataclass(frozen=True)
class Chosen:
    """The experts that each token takes, the one that was chosen first in front."""

    experts: Tensor  # int32 [T, top_k], all different
    weights: Tensor  # fp32 [T, top_k], of their results


@dataclass(frozen=True)
class ExpertPlaces:
    """Ranks that hold each of a layer's experts, copies included. Row r of a step takes, of an expert's n holders,
    number r mod n, so each rank knows its part alone. Steps load the table as they run."""

    slots: Tensor  # int32 [experts, 1 + ranks], on the device: n, then each holder's slot, if that is this rank
    number: int  # of this rank's slots; in `slots`: a holder elsewhere


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of this rank's experts of a layer, or of its part of each, stacked; inputs are in order."""

    number: int
    gate_up: "Tensor | QuantizedWeight"  # [number * 2 I, hidden], an expert's gate before its up; [number * I, hidden]
    down: "Tensor | QuantizedWeight"  # [number * hidden, I]
    gate_up_bias: Tensor | None  # [number, 2 I]
    down_bias: Tensor | None  # [number, hidden]
    first: int = 0  # which of the layer's the first one is
    of_layer: int | None = None  # how many the layer has, here and on other ranks; None: these are all
    places: ExpertPlaces | None = None  # None: experts are where `first` says; else the last ones are slots for copies

    @property
    def layer_number(self) -> int:
        """Number of experts of the layer, on all ranks together."""
        return self.number if self.of_layer is None else self.of_layer

    def of_each(self, which: Literal["gate_up", "down"]) -> "Iterator[tuple[Tensor | QuantizedWeight, Tensor | None]]":
        """Weight and bias of one expert after the other."""
        weight: Tensor | QuantizedWeight = getattr(self, which)
        bias: Tensor | None = getattr(self, f"{which}_bias")
        rows = len(weight if isinstance(weight, Tensor) else weight.values) // self.number
        for index in range(self.number):
            part = slice(index * rows, (index + 1) * rows)
            found = weight[part] if isinstance(weight, Tensor) else weight.rows(part)
            yield found, None if bias is None else bias[index]


class Experts(Protocol):
    """A layer's experts with their weights inside, laid out once for the device: there is no other copy."""

    hits: Tensor  # int64 [experts of the layer], on the device: how often each was chosen so far
    places: ExpertPlaces | None  # as ExpertWeights.places

    def __call__(self, x: Tensor, chosen: Chosen) -> Tensor:
        """x [T, hidden] -> the weighted sum of what each token's experts make of it, in x's dtype.

        Of those that this rank holds: `chosen` counts all of the layer's, and others add nothing.
        An expert e is down_e(gate(gate_up_e(x))). Sums over experts are fp32, rounded once.
        """

    def slot_memory(self, slot: int) -> list[Tensor]:
        """Return the memory of one slot as contiguous tensors: the same shapes for each slot."""


class StateKernels(Protocol):
    """A device's kernels for layers that keep a state (model/architectures/states.py)."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for results, which a recorded step may keep."""

    def step(
        self, weights: "StateWeights", products: Sequence[Tensor], kv_layer: Tensor, layout: BatchLayout, out: Tensor
    ) -> None:
        """Compute the sequences that bring one token each, the first ones of the step, into the first rows of `out`.

        Writes their states. Arguments are those of StateMixer's methods.
        """


class Backend(Protocol):
    """One device's way to do a decoder layer's operations: model/cpu/backend.py, model/cuda/backend.py."""

    def make_linear(
        self,
        weight: "Tensor | QuantizedWeight",
        bias: Tensor | None,
        quantization: Quantization,
        dtype: torch.dtype,
    ) -> Linear:
        """weight [out, in] and bias [out], which are copied: packed, and quantised where asked for.

        For activations of `dtype`, which is the weight's own; a quantised weight is held as it is.
        """

    def embed(self, token_ids: Tensor, table: "Tensor | Linear", first: int, dtype: torch.dtype) -> Tensor:
        """Return rows of a table whose first row is token `first`'s; zeros for tokens of other ranks.

        token_ids int64 [T]; table [rows, hidden]. Returns `dtype` [T, hidden].
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, hidden], weight fp32 [hidden] -> x / sqrt(mean(x^2) + eps) * weight, rounded once.

        Statistics are fp32 (Zhang & Sennrich 2019).
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); may write into its inputs."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The sum, both [T, hidden]; may be written into either."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x [T, hidden] times a factor; may be written into x."""

    def scale_by_position(self, x: Tensor, scales: Tensor, positions: Tensor) -> Tensor:
        """x [T, width], each row times the entry of fp32 `scales` [max_position] of its position; may be written into
        x."""

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        """fp32 [N, vocab] -> cap tanh(logits / cap); may be written into them."""

    def square_sums(self, qkv: Tensor, norms: RowNorms) -> Tensor:
        """fp32 [T, 2]: of a token's queries and of its keys, of this rank. qkv [T, (H + 2 G) D]."""

    def norm_rows(self, qkv: Tensor, square_sums: Tensor, norms: RowNorms) -> Tensor:
        """qkv with its queries and keys normalised by the sums over all ranks; may be written into qkv."""

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        layout: BatchLayout,
        norms: HeadNorms | None = None,
        kv_scales: KVScales = AS_THEY_ARE,
        query_scales: Tensor | None = None,
    ) -> Tensor:
        """Normalise Q, K and V where there are norms, rotate Q and K, and write K and V into the cache; may write into
        qkv.

        qkv [T, (H + 2 G) D]; cos_sin fp32 [max_position, D]: cos of the D/2 frequencies, then sin; rotation in the
        half-split form of Llama checkpoints. kv_layer [num_blocks, 2, G, block_size, D], of qkv's dtype or
        float8_e4m3fn, is written at `layout.slots`: in FP8 as `reference.to_fp8` rounds, straight from fp32. Returns
        the rotated Q, [T, H, D], multiplied by `query_scales`, fp32 [max_position], of its positions. G may be 0.
        """

    def attention(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm) -> Tensor:
        """Causal attention of each query over its sequence's cached KV. Returns [T, H * D].

        Blocks that lie before the windows of all of a sequence's queries are never read: its table may name any there.
        """

    def write_latents(
        self, rows: Tensor, norm: Tensor, eps: float, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout
    ) -> None:
        """Normalise latents, rotate the rotary part of the keys, and write both into the cache at `layout.slots`.

        rows [T, R + P]; norm fp32 [R]; cos_sin fp32 [max_position, P]; kv_layer [num_blocks, 1, 1, block_size, W],
        where W is R + P, or more: what lies behind stays as it is.
        """

    def write_index_keys(
        self, keys: Tensor, norm: LayerNorm, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout
    ) -> None:
        """Normalise keys of an index, rotate the last P numbers of each, and write them to the ends of the cache's rows
        at `layout.slots`, none of which is negative.

        keys [T, width]; cos_sin and kv_layer as to `write_latents`.
        """

    @property
    def state_kernels(self) -> StateKernels | None:
        """Kernels of layers that keep a state; None: torch computes them."""

    def group_square_sums(self, x: Tensor, norm: GroupNorm) -> Tensor:
        """fp32 [T, norm.columns]: of each group of fp32 rows [T, width], of this rank; 0 for groups of others."""

    def norm_groups(self, x: Tensor, square_sums: Tensor, norm: GroupNorm, dtype: torch.dtype) -> Tensor:
        """Return fp32 rows [T, width] normalised by the sums over all ranks, in `dtype`."""

    def gate_rows(self, x: Tensor, gates: Tensor) -> Tensor:
        """x [T, columns] times the sigmoids of gates [T, columns]; may be written into x."""

    def make_mla(self, heads: MLAHeads, parts: "ContextParts | None" = None) -> MLAAttention:
        """A layer's MLA, over these weights, which are copied. `parts`: the cache that it will be
        given has this rank's tokens of each block, and layouts say which these are; all ranks call it together."""

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation) -> Tensor:
        """Return activation(gate) * up, [T, I], of the products [T, 2 I] of x and `gate_up`, gate first; or relu^2 of
        products [T, I] that have no gate."""

    def feed_forward(self, x: Tensor, gate_up: Linear, down: Linear, activation: Activation) -> Tensor:
        """Return `down` of what `gated` makes of x."""

    def make_experts(
        self, weights: ExpertWeights, activation: Activation, quantization: Quantization, dtype: torch.dtype
    ) -> Experts:
        """Pack all experts of a layer as `make_linear` does one weight."""

    def gate_columns(self, gates: Tensor, x: Tensor, first: int, activation: Activation) -> Tensor:
        """Return activation(gates) * x[:, first : first + N], [T, N], of gates [T, N] and x [T, columns]."""

    def route(
        self, logits: Tensor, correction: Tensor | None, routing: Routing, scales: Tensor | None = None
    ) -> Chosen:
        """The experts for a router's logits, fp32 [T, experts]. `correction` fp32 [experts] is added to the scores by
        which they are chosen, and their weights are multiplied by `scales` fp32 [experts]. Whatever the logits are, NaN
        too, those chosen are experts."""

    def gate_by_sigmoid(self, x: Tensor, logits: Tensor) -> Tensor:
        """x [T, hidden] times the sigmoid of each row's highest logit, fp32 [T, N]; may be written into x."""
