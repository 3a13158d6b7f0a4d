"""The decoder of all families, over loaded weights: layers of grouped-query attention, of attention to latents, or with
a state (states.py), and an MLP, or experts, with norms before each of them, or behind, or both.

Tokens of all sequences of a step are flattened into one [T, hidden] tensor; where they stand is in the BatchLayout.
Weights and activations share one dtype, which is the cache's, too, unless that is FP8; norms, rotation and attention
accumulate in fp32 inside the backend, and norms' weights are fp32, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twostroke.model.architectures.states import StateMixer
from twostroke.model.backend import (
    AttentionForm,
    Backend,
    Experts,
    GroupNorm,
    HeadNorms,
    LatentAttention,
    Linear,
    RowNorms,
)
from twostroke.model.batch import BatchLayout, Drawing, StepInput
from twostroke.model.config import ModelConfig, Routing
from twostroke.model.costs.sizes import num_active_parameters
from twostroke.model.parallel import expert_sums
from twostroke.model.parallel.tensor_parallel import TensorParallel
from twostroke.model.step import OnLayer


@dataclass(frozen=True)
class LatentWeights:
    """Weights of a layer that attends to latents: the projections to latents, whole on each rank, and this rank's heads
    of the queries. Norms are fp32."""

    down: Linear  # hidden -> latent, and the keys' part that turns
    norm: Tensor  # of the latent
    query_down: Linear | None  # hidden -> the queries' own latent; None: `query` is of the layer's input
    query_norm: Tensor | None  # of the queries' latent
    query: Linear
    eps: float
    attention: LatentAttention


@dataclass(frozen=True)
class MlpWeights:
    """An MLP; gate and up are fused by rows."""

    gate_up: Linear  # hidden -> 2 I, or I where there is no gate
    down: Linear  # I -> hidden: this rank's summand


@dataclass(frozen=True)
class RoutedWeights:
    """A layer's experts, cut as an MLP is or divided whole, and what chooses among them, which every rank has whole."""

    router: Linear  # hidden -> experts
    correction: Tensor | None  # fp32 [experts]
    routing: Routing
    experts: Experts  # this rank's summand
    scales_input: bool  # as ExpertsSpec's
    shared_gate: Linear | None  # hidden -> 1: of the MLP beside


Mixer = Linear | LatentWeights | StateMixer[Any]
"""Part of a layer that mixes tokens: projections to queries, keys and values, or to latents, or what keeps a state."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; q, k, v are fused by rows. Norms are fp32."""

    input_norm: Tensor | None  # [hidden]; None: none
    qkv: Mixer  # hidden -> (H + 2 G) D of this rank
    output: Linear  # H D -> hidden: this rank's summand
    mlp_norm: Tensor | None  # [hidden]
    mlp: MlpWeights | None  # None: experts alone, or nothing follows
    routed: RoutedWeights | None
    cos_sin: Tensor  # fp32 [max_context, D], shared by the layers that turn alike
    head_norms: HeadNorms | None
    row_norms: RowNorms | None
    attention: AttentionForm
    attention_norm: Tensor | None  # [hidden]
    output_norm: Tensor | None  # [hidden]
    output_gate: Linear | None = None  # hidden -> H D, whose sigmoid the attention's result is multiplied by
    query_scales: Tensor | None = None  # fp32 [max_context], shared likewise


@dataclass(frozen=True)
class EndWeights:
    """Embedding, final norm and LM head, which the first stage holds."""

    embedding: Tensor | Linear  # [this rank's vocabulary, hidden]; tied ones are the LM head
    embedding_scale: float
    first_token: int  # of this rank's vocabulary
    final_norm: Tensor  # fp32 [hidden]
    lm_head: Linear  # hidden -> this rank's vocabulary


@dataclass(frozen=True)
class DecoderWeights:
    """Weights of one rank's layers, and of the ends on the first stage, on its device."""

    dtype: torch.dtype  # of activations
    layers: tuple[LayerWeights, ...]  # of the rank's stage
    ends: EndWeights | None  # None: the stage is not the first


class Decoder:
    """Runs a step's tokens through the layers, writing their KV into the cache on the way. Implements StepDecoder.

    Of several stages each has a decoder, and they compute a step together: model/parallel/pipeline.py.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, backend: Backend, parallel: TensorParallel):
        """`weights` are those of `parallel.shard` and `parallel.stage`."""
        self._config = config
        self._weights = weights
        self._backend = backend
        self._parallel = parallel
        self.stage = parallel.stage
        self._model_layers = self.stage.layers(config.num_layers)
        self._groups = config.groups_of(self._model_layers)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states."""
        return self._weights.dtype

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Implement StepDecoder.vocab_size."""
        return self._config.vocab_size

    @property
    def logits_width(self) -> int:
        """Implement StepDecoder.logits_width."""
        return self._parallel.shard.vocabulary_size(self._config.vocab_size)

    @property
    def parameters_a_layer(self) -> float:
        """Weights that a rank multiplies each token with, without embeddings and head, divided by the layers."""
        config = self._config
        outside = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        return (num_active_parameters(config) - outside) / config.num_layers / self._parallel.shard.size

    @property
    def experts(self) -> list[Experts | None]:
        """Experts of each layer of the stage; None where a layer has none."""
        return [None if layer.routed is None else layer.routed.experts for layer in self._weights.layers]

    def forward(self, step: StepInput, on_layer: OnLayer | None = None) -> Tensor | None:
        """Implement StepDecoder.forward for a model of one stage."""
        drawn = step.drawing.rows
        # Nobody reads what comes after the last layer's KV, but of the rows that draw.
        needed = step.drawing if step.on_hidden is None and drawn.numel() < step.token_ids.numel() else None
        x = self._run_layers(
            self.embed(step.token_ids), step.layouts, step.kv_tensors, needed, self._ends.final_norm, on_layer
        )
        if x is None:
            return None
        if step.on_hidden is not None:
            step.on_hidden(x)
            if drawn.numel() == 0:
                return None
            x = x[drawn]
        return self.logits(x)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden] before the first layer; of the first stage."""
        ends = self._ends
        found = self._backend.embed(token_ids, ends.embedding, ends.first_token, self._weights.dtype)
        found = self._parallel.all_reduce(found)
        return found if ends.embedding_scale == 1 else self._backend.scale(found, ends.embedding_scale)

    def run_layers(
        self,
        hidden: Tensor,
        layouts: Sequence[BatchLayout],
        kv_tensors: Sequence[Tensor],
        needed: Drawing | None,
        on_layer: OnLayer | None = None,
    ) -> Tensor | None:
        """Run the stage's layers over hidden states [T, hidden], which may be written into; the last layer ends without
        a norm.

        `needed` names the rows that are needed of the result, of which there are no others then; None: all of them.
        Returns None where none is. `on_layer` as to StepDecoder.forward, with the model's numbers.
        """
        return self._run_layers(hidden, layouts, kv_tensors, needed, None, on_layer)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """[N, hidden] behind the last layer -> what `logits` takes; of the first stage. May write into them."""
        return self._backend.rms_norm(hidden, self._ends.final_norm, self._config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement StepDecoder.logits, on the first stage."""
        logits = self._ends.lm_head(hidden, out_dtype=torch.float32)
        if self._config.logits_cap:
            logits = self._backend.soft_cap(logits, self._config.logits_cap)
        return logits

    @property
    def _ends(self) -> EndWeights:
        if self._weights.ends is None:
            raise RuntimeError("the embedding and the LM head are the first stage's")
        return self._weights.ends

    def _run_layers(
        self,
        residual: Tensor,
        layouts: Sequence[BatchLayout],
        kv_tensors: Sequence[Tensor],
        needed: Drawing | None,
        final_norm: Tensor | None,
        on_layer: OnLayer | None,
    ) -> Tensor | None:
        """Run the layers as `run_layers` does, and normalise behind the last one where `final_norm` is given."""
        backend, layers = self._backend, self._weights.layers
        first_norm = layers[0].input_norm
        x = residual if first_norm is None else backend.rms_norm(residual, first_norm, self._config.rms_norm_eps)
        for index, layer in enumerate(layers):
            layout = layouts[self._groups.of_layer[index]]
            kv_layer = kv_tensors[self._groups.tensor_of_layer[index]]
            gate = None if layer.output_gate is None else layer.output_gate(x)
            if isinstance(layer.qkv, StateMixer):
                q = layer.qkv(x, kv_layer, layout)
            else:
                q = self._write_kv(x, layer, layer.qkv, kv_layer, layout)
            if on_layer is not None:  # on CUDA the write is launched
                on_layer(self._model_layers[index])
            is_last = index == len(layers) - 1
            if is_last and needed is not None:
                if needed.rows.numel() == 0:
                    return None
                q, residual = q[needed.rows], residual[needed.rows]
                gate = None if gate is None else gate[needed.rows]
                layout = layout.of_last_tokens(needed)
            if isinstance(layer.qkv, StateMixer):
                x = q if layer.qkv.norm is None else self._norm_groups(q, layer.qkv.norm)
            elif isinstance(layer.qkv, LatentWeights):
                x = layer.qkv.attention(q, layer.cos_sin, kv_layer, layout)
            else:
                x = backend.attention(q, kv_layer, layout, layer.attention)
            if gate is not None:
                x = backend.gate_rows(x, gate)
            following = final_norm if is_last else layers[index + 1].input_norm
            if layer.mlp is None and layer.routed is None:
                x, residual = self._sum_and_norm(layer.output(x), residual, layer.attention_norm, following)
                continue
            x, residual = self._sum_and_norm(layer.output(x), residual, layer.attention_norm, layer.mlp_norm)
            x, is_whole = self._feed_forward(x, layer)
            x, residual = self._sum_and_norm(x, residual, layer.output_norm, following, is_whole)
        return x

    def _write_kv(
        self, x: Tensor, layer: LayerWeights, projection: Linear | LatentWeights, kv_layer: Tensor, layout: BatchLayout
    ) -> Tensor:
        """Write a layer's keys and values, or latents, into the cache. Returns the queries, one row per token."""
        backend, parallel = self._backend, self._parallel
        if isinstance(projection, LatentWeights):
            latents = projection
            backend.write_latents(latents.down(x), latents.norm, latents.eps, layer.cos_sin, kv_layer, layout)
            if latents.query_down is not None and latents.query_norm is not None:
                x = backend.rms_norm(latents.query_down(x), latents.query_norm, latents.eps)
            q, scales = latents.query(x), layer.query_scales
            return q if scales is None else backend.scale_by_position(q, scales, layout.positions)
        qkv = projection(x)
        if layer.row_norms is not None:
            square_sums = parallel.all_reduce(backend.square_sums(qkv, layer.row_norms))
            qkv = backend.norm_rows(qkv, square_sums, layer.row_norms)
        return backend.rope_and_write_kv(
            qkv, layer.cos_sin, kv_layer, layout, layer.head_norms, layer.attention.kv_scales, layer.query_scales
        )

    def _norm_groups(self, x: Tensor, norm: GroupNorm) -> Tensor:
        """Normalise groups of fp32 rows, of which the ranks may have parts."""
        square_sums = self._backend.group_square_sums(x, norm)
        if norm.shared_groups:
            square_sums = self._parallel.all_reduce(square_sums)
        return self._backend.norm_groups(x, square_sums, norm, self._weights.dtype)

    def _feed_forward(self, x: Tensor, layer: LayerWeights) -> tuple[Tensor, bool]:
        """Return the output of MLP and experts, this rank's summand or, with True, the whole sum."""
        backend, mlp, routed = self._backend, layer.mlp, layer.routed
        activation = self._config.activation
        beside = None if mlp is None else backend.feed_forward(x, mlp.gate_up, mlp.down, activation)
        if routed is None:
            assert beside is not None
            return beside, False
        logits = routed.router(x, out_dtype=torch.float32)
        chosen = backend.route(logits, routed.correction, routed.routing)
        if routed.scales_input:
            x = backend.gate_by_sigmoid(x, logits)
        y = routed.experts(x, chosen)
        if beside is None:  # else an all-reduce is needed anyway
            if not expert_sums.pays(y, routed.routing.top_k, self._parallel.shard):
                return y, False
            number, places = routed.routing.num_experts, routed.experts.places
            return expert_sums.sum_of_experts(y, chosen.experts, number, self._parallel, places), True
        if routed.shared_gate is not None:
            beside = backend.gate_by_sigmoid(beside, routed.shared_gate(x, out_dtype=torch.float32))
        return backend.add(beside, y), False

    def _sum_and_norm(
        self, x: Tensor, residual: Tensor, own_norm: Tensor | None, norm: Tensor | None, is_whole: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Add a sublayer's output to the residual and normalise. x is this rank's summand, or the whole sum. Returns
        the input of the next sublayer, and the new residual."""
        eps = self._config.rms_norm_eps
        if own_norm is None and norm is not None and not is_whole:
            fused = self._parallel.sum_add_norm(x, residual, norm, eps)
            if fused is not None:
                return fused
        x = x if is_whole else self._parallel.all_reduce(x)
        if own_norm is not None:
            x = self._backend.rms_norm(x, own_norm, eps)
        if norm is None:
            total = self._backend.add(x, residual)
            return total, total
        return self._backend.add_rms_norm(x, residual, norm, eps)
