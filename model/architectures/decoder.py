"""The decoder of all families, over loaded weights: layers of grouped-query attention, or of attention to latents, and
a gated MLP, or experts, with norms before each of them, or behind, or both.

Tokens of all sequences of a step are flattened into one [T, hidden] tensor; where they stand is in the BatchLayout.
Weights and activations share one dtype, which is the cache's, too, unless that is FP8; norms, rotation and attention
accumulate in fp32 inside the backend, and norms' weights are fp32, too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.model.backend import AttentionForm, Backend, Experts, HeadNorms, LatentAttention, Linear, RowNorms
from twostroke.model.batch import BatchLayout, StepInput
from twostroke.model.cache.kv_cache import layer_announcing
from twostroke.model.config import ModelConfig, Routing
from twostroke.model.parallel.tensor_parallel import TensorParallel
from twostroke.model.step import OnLayer


@dataclass(frozen=True)
class LatentWeights:
    """What makes latents, which all ranks hold, and queries of this rank's heads that attend to them. Norms are
    fp32."""

    down: Linear  # hidden -> latent, and the keys' part that turns
    norm: Tensor  # of the latent
    query_down: Linear | None  # hidden -> the queries' own latent; None: `query` is of the layer's input
    query_norm: Tensor | None  # of the queries' latent
    query: Linear
    eps: float
    attention: LatentAttention


@dataclass(frozen=True)
class MlpWeights:
    """A gated MLP; gate and up are fused by rows."""

    gate_up: Linear  # hidden -> 2 I
    down: Linear  # I -> hidden: this rank's summand


@dataclass(frozen=True)
class RoutedWeights:
    """A layer's experts, each cut as an MLP is, and what chooses among them, which every rank has whole."""

    router: Linear  # hidden -> experts
    correction: Tensor | None  # fp32 [experts]
    routing: Routing
    experts: Experts  # this rank's summand
    shared_gate: Linear | None  # hidden -> 1: of the MLP beside


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; q, k, v are fused by rows. Norms are fp32."""

    input_norm: Tensor | None  # [hidden]; None: none
    qkv: Linear | LatentWeights  # hidden -> (H + 2 G) D of this rank
    output: Linear  # H D -> hidden: this rank's summand
    mlp_norm: Tensor | None  # [hidden]
    mlp: MlpWeights | None  # None: experts alone
    routed: RoutedWeights | None
    cos_sin: Tensor  # fp32 [max_context, D], shared by the layers that turn alike
    head_norms: HeadNorms | None
    row_norms: RowNorms | None
    attention: AttentionForm
    attention_norm: Tensor | None  # [hidden]
    output_norm: Tensor | None  # [hidden]


@dataclass(frozen=True)
class DecoderWeights:
    """All of a decoder, of one rank, on its device."""

    dtype: torch.dtype  # of activations
    embedding: Tensor | Linear  # [this rank's vocabulary, hidden]; tied ones are the LM head
    embedding_scale: float
    first_token: int  # of this rank's vocabulary
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # fp32 [hidden]
    lm_head: Linear  # hidden -> this rank's vocabulary


class Decoder:
    """Runs a step's tokens through the layers, writing their KV into the cache on the way. Implements StepDecoder."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, backend: Backend, parallel: TensorParallel):
        """`weights` are those of `parallel.shard`."""
        self._config = config
        self._groups = config.kv_groups
        self._weights = weights
        self._backend = backend
        self._parallel = parallel

    @property
    def vocab_size(self) -> int:
        """Of the logits, on the rank that gathers them."""
        return self._config.vocab_size

    @property
    def expert_hits(self) -> list[Tensor | None]:
        """Of each layer, as Experts.hits; None where it has no experts."""
        return [None if layer.routed is None else layer.routed.experts.hits for layer in self._weights.layers]

    def forward(self, step: StepInput, on_layer: OnLayer | None = None) -> Tensor | None:
        """As StepDecoder.forward."""
        with layer_announcing(on_layer, step.kv_tensors[0].device) as announce:
            return self._forward(step, announce)

    def logits(self, hidden: Tensor) -> Tensor:
        """As StepDecoder.logits."""
        logits = self._weights.lm_head(hidden, out_dtype=torch.float32)
        if self._config.logits_cap:
            logits = self._backend.soft_cap(logits, self._config.logits_cap)
        return self._parallel.gather_logits(logits, self._config.vocab_size)

    def _forward(self, step: StepInput, on_layer: OnLayer | None) -> Tensor | None:
        """As `forward`; `on_layer(i)` is called once the write of layer i's KV is done, or on CUDA launched."""
        backend, weights, parallel = self._backend, self._weights, self._parallel
        eps, drawn = self._config.rms_norm_eps, step.drawing.rows
        residual = backend.embed(step.token_ids, weights.embedding, weights.first_token, weights.dtype)
        residual = parallel.all_reduce(residual)
        if weights.embedding_scale != 1:
            residual = backend.scale(residual, weights.embedding_scale)
        first_norm = weights.layers[0].input_norm
        x = residual if first_norm is None else backend.rms_norm(residual, first_norm, eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            layout = step.layouts[self._groups.of_layer[index]]
            kv_layer = step.kv_tensors[self._groups.tensor_of_layer[index]]
            q = self._write_kv(x, layer, kv_layer, layout)
            if on_layer is not None:
                on_layer(index)
            if index == last and step.on_hidden is None and drawn.numel() < step.token_ids.numel():
                # Nobody reads what comes after the last layer's KV, but of the rows that draw.
                if drawn.numel() == 0:
                    return None
                q, residual = q[drawn], residual[drawn]
                layout = layout.of_last_tokens(step.drawing)
            if isinstance(layer.qkv, LatentWeights):
                x = layer.qkv.attention(q, layer.cos_sin, kv_layer, layout)
            else:
                x = backend.attention(q, kv_layer, layout, layer.attention)
            x, residual = self._sum_and_norm(layer.output(x), residual, layer.attention_norm, layer.mlp_norm)
            following = weights.layers[index + 1].input_norm if index < last else weights.final_norm
            x, residual = self._sum_and_norm(self._feed_forward(x, layer), residual, layer.output_norm, following)
        if step.on_hidden is not None:
            step.on_hidden(x)
            if drawn.numel() == 0:
                return None
            x = x[drawn]
        return self.logits(x)

    def _write_kv(self, x: Tensor, layer: LayerWeights, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        """What of a layer's input goes into the cache. Returns the queries, a row a token."""
        backend, parallel = self._backend, self._parallel
        if isinstance(layer.qkv, LatentWeights):
            latents = layer.qkv
            backend.write_latents(latents.down(x), latents.norm, latents.eps, layer.cos_sin, kv_layer, layout)
            if latents.query_down is not None and latents.query_norm is not None:
                x = backend.rms_norm(latents.query_down(x), latents.query_norm, latents.eps)
            return latents.query(x)
        qkv = layer.qkv(x)
        if layer.row_norms is not None:
            square_sums = parallel.all_reduce(backend.square_sums(qkv, layer.row_norms))
            qkv = backend.norm_rows(qkv, square_sums, layer.row_norms)
        return backend.rope_and_write_kv(
            qkv, layer.cos_sin, kv_layer, layout, layer.head_norms, layer.attention.kv_scales
        )

    def _feed_forward(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """This rank's summand of what MLP and experts make of x."""
        backend, mlp, routed = self._backend, layer.mlp, layer.routed
        beside = None if mlp is None else mlp.down(backend.gated(x, mlp.gate_up, self._config.activation))
        if routed is None:
            assert beside is not None
            return beside
        logits = routed.router(x, out_dtype=torch.float32)
        y = routed.experts(x, backend.route(logits, routed.correction, routed.routing))
        if beside is None:
            return y
        if routed.shared_gate is not None:
            beside = backend.gate_by_sigmoid(beside, routed.shared_gate(x, out_dtype=torch.float32))
        return backend.add(beside, y)

    def _sum_and_norm(
        self, x: Tensor, residual: Tensor, own_norm: Tensor | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Of a sublayer's summand x of this rank: what goes into the next one, and the new residual."""
        eps = self._config.rms_norm_eps
        if own_norm is None and norm is not None:
            fused = self._parallel.sum_add_norm(x, residual, norm, eps)
            if fused is not None:
                return fused
        x = self._parallel.all_reduce(x)
        if own_norm is not None:
            x = self._backend.rms_norm(x, own_norm, eps)
        if norm is None:
            total = self._backend.add(x, residual)
            return total, total
        return self._backend.add_rms_norm(x, residual, norm, eps)
