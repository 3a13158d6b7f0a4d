"""The decoder of all families, over loaded weights: layers of grouped-query attention, of MLA, or with a state
(states.py), and an MLP, or experts, with norms before each of them, or behind, or both.

Tokens of all sequences of a step are flattened into one [T, hidden] tensor; where they stand is in the BatchLayout.
Weights and activations share one dtype, which is the cache's, too, unless that is FP8; norms, rotation and attention
accumulate in fp32 inside the backend, and norms' weights are fp32, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twostroke.model.architectures.context_index import ContextIndex, IndexQueries
from twostroke.model.architectures.states import StateMixer
from twostroke.model.backend import (
    AttentionForm,
    Backend,
    Experts,
    GroupNorm,
    HeadNorms,
    Linear,
    MLAAttention,
    RowNorms,
)
from twostroke.model.batch import BatchLayout, Drawing, StepInput
from twostroke.model.config import KVHeads, ModelConfig, Routing
from twostroke.model.costs.sizes import num_active_parameters
from twostroke.model.parallel.tensor_parallel import TensorParallel
from twostroke.model.step import OnLayer


@dataclass(frozen=True)
class MLAWeights:
    """Weights of a layer of MLA: the projections to latents, whole on each rank, and this rank's heads
    of the queries. Norms are fp32."""

    down: Linear  # hidden -> latent, and the rotary part of the keys
    norm: Tensor  # of the latent
    query_down: Linear | None  # hidden -> the queries' own latent; None: `query` is of the layer's input
    query_norm: Tensor | None  # of the queries' latent
    query: Linear
    eps: float
    attention: MLAAttention
    index: ContextIndex | None  # None: all tokens are attended to, or those that the layer before attends to


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
    scales: Tensor | None = None  # fp32 [experts]: of the chosen ones' weights
    norms: "NormsBeside | None" = None


@dataclass(frozen=True)
class NormsBeside:
    """Norms of experts that stand beside an MLP (config.py's ExpertNorms), fp32 [hidden] each."""

    router: Tensor
    input: Tensor
    output: Tensor
    beside: Tensor


@dataclass(frozen=True)
class EmbeddingGate:
    """Weights that add its tokens' embeddings to a layer (config.py's LayerEmbeddingSpec), whole on each rank."""

    gate: Linear  # hidden -> size
    output: Linear  # size -> hidden
    norm: Tensor  # fp32 [hidden]


Mixer = Linear | MLAWeights | StateMixer[Any]
"""Part of a layer that mixes tokens: projections to queries, keys and values, or to latents, or what keeps a state."""


@dataclass(frozen=True)
class LayerNorms:
    """Norms around the parts of a layer (config.py's LayerSpec), fp32 [hidden] each; None: none."""

    input: Tensor | None = None
    mlp: Tensor | None = None
    attention: Tensor | None = None
    output: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; q, k, v are fused by rows."""

    norms: LayerNorms
    qkv: Mixer  # hidden -> (H + 2 G) D of this rank
    output: Linear  # H D -> hidden: this rank's summand
    mlp: MlpWeights | None  # None: experts alone, or nothing follows
    routed: RoutedWeights | None
    cos_sin: Tensor  # fp32 [max_context, D], shared by the layers with the same rotation
    head_norms: HeadNorms | None
    row_norms: RowNorms | None
    attention: AttentionForm
    output_gate: Linear | None = None  # hidden -> H D, whose sigmoid the attention's result is multiplied by
    query_scales: Tensor | None = None  # fp32 [max_context], shared likewise
    kv_heads: KVHeads | None = None  # this rank's; None: as in the cache's shape
    embedding_gate: EmbeddingGate | None = None
    output_scale: float = 1.0  # of the residual behind the layer


@dataclass(frozen=True)
class LayerEmbedding:
    """Embeddings of each token for each layer, in the numbers of config.py's LayerEmbeddingSpec."""

    table: Tensor | Linear  # [this rank's vocabulary, layers * size]
    scale: float  # of the table
    projection: Linear  # hidden -> layers * size, whole on each rank
    norm: Tensor  # fp32 [size]
    size: int


@dataclass(frozen=True)
class EndWeights:
    """Embedding, final norm and LM head, which the first stage holds."""

    embedding: Tensor | Linear  # [this rank's vocabulary, hidden]; tied ones are the LM head
    embedding_scale: float
    first_token: int  # of this rank's vocabulary
    final_norm: Tensor  # fp32 [hidden]
    lm_head: Linear  # hidden -> this rank's vocabulary
    layer_embedding: LayerEmbedding | None = None


@dataclass(frozen=True)
class MtpWeights:
    """Weights of an MTP head. Its projection is two, whose results are added: both are whole on each rank."""

    embedding_norm: Tensor  # fp32 [hidden]
    hidden_norm: Tensor  # fp32 [hidden]
    of_embedding: Linear  # hidden -> hidden
    of_hidden: Linear  # hidden -> hidden
    layer: LayerWeights
    final_norm: Tensor  # fp32 [hidden]


@dataclass(frozen=True)
class DecoderWeights:
    """Weights of one rank's layers, and of the ends on the first stage, on its device."""

    dtype: torch.dtype  # of activations
    layers: tuple[LayerWeights, ...]  # of the rank's stage
    ends: EndWeights | None  # None: the stage is not the first
    mtp: MtpWeights | None = None


@dataclass(frozen=True)
class _KVPlace:
    """The place of the keys and values that a layer attends to."""

    table: int  # of KVGroups.tables
    tensor: int  # of the cache
    own: range  # KV layers that this layer writes, with the model's numbers

    @classmethod
    def of(cls, config: ModelConfig, layers: range, layer: int) -> "_KVPlace":
        """Return the place of one of a stage's layers."""
        groups, owner = config.groups_of(layers), config.kv_owner(layer)
        index = config.kv_layers_of(layers).index((owner, 0))
        first = config.kv_layers.index((owner, 0))
        own = range(first, first + config.num_parts(owner)) if owner == layer else range(0)
        return cls(groups.table_of_layer[index], groups.tensor_of_layer[index], own)


@dataclass(frozen=True)
class _LayerRun:
    """Layers that run one after the other, and where each has its keys and values."""

    layers: tuple[LayerWeights, ...]
    places: Sequence[_KVPlace]

    @property
    def last_writer(self) -> int:
        """Return the last layer with keys and values of its own: those behind it only compute rows that are needed."""
        return max(index for index, place in enumerate(self.places) if place.own)


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
        layers = self.stage.layers(config.num_layers)
        places = [_KVPlace.of(config, layers, layer) for layer in layers]
        self._main = _LayerRun(weights.layers, places[: len(weights.layers)])
        self._mtp = None if weights.mtp is None else _LayerRun((weights.mtp.layer,), places[len(weights.layers) :])

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
    def has_mtp(self) -> bool:
        """True if there is an MTP head, so that `mtp_logits` may be asked for."""
        return self._mtp is not None

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
        hidden, ends = self.embed(step.token_ids), self._ends
        embedded = None
        if ends.layer_embedding is not None:
            embedded = self._embed_for_layers(step.token_ids, hidden, ends.layer_embedding)
        x = self._run_layers(
            self._main, hidden, step.layouts, step.kv_tensors, needed, ends.final_norm, on_layer, embedded=embedded
        )
        if x is None:
            return None
        if step.on_hidden is not None:
            step.on_hidden(x)
            if drawn.numel() == 0:
                return None
            x = x if drawn.numel() == len(x) else x[drawn]
        return self.logits(x)

    def mtp_logits(self, step: StepInput, hidden: Tensor, on_layer: OnLayer | None = None) -> Tensor | None:
        """Run the MTP head over tokens of which `forward` has computed `hidden` [T, hidden], as `on_hidden` got it.

        `token_ids` of `step` are the tokens that come *after* those of `forward`'s, as far as they are known. Returns
        this rank's logits fp32 [N, logits_width] of the tokens behind them, for the rows that draw; None where none
        does. Writes the head's keys and values, with `on_layer` as to `forward`.
        """
        mtp, run, backend, eps = self._weights.mtp, self._mtp, self._backend, self._config.rms_norm_eps
        if mtp is None or run is None:
            raise RuntimeError("the model has no MTP head")
        embedded = mtp.of_embedding(backend.rms_norm(self.embed(step.token_ids), mtp.embedding_norm, eps))
        x = backend.add(embedded, mtp.of_hidden(backend.rms_norm(hidden, mtp.hidden_norm, eps)))
        needed = step.drawing if step.drawing.rows.numel() < step.token_ids.numel() else None
        found = self._run_layers(run, x, step.layouts, step.kv_tensors, needed, mtp.final_norm, on_layer)
        return None if found is None else self.logits(found)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden] before the first layer; of the first stage."""
        ends = self._ends
        found = self._backend.embed(token_ids, ends.embedding, ends.first_token, self._weights.dtype)
        found = self._parallel.all_reduce(found)
        return found if ends.embedding_scale == 1 else self._backend.scale(found, ends.embedding_scale)

    def _embed_for_layers(self, token_ids: Tensor, hidden: Tensor, embedding: LayerEmbedding) -> Tensor:
        """int64 [T] and their embedding [T, hidden] -> [T, layers * size]."""
        backend, ends, size = self._backend, self._ends, embedding.size
        found = self._parallel.all_reduce(
            backend.embed(token_ids, embedding.table, ends.first_token, self._weights.dtype)
        )
        found = backend.scale(found, embedding.scale)
        made = backend.scale(embedding.projection(hidden), self._config.hidden_size**-0.5).view(-1, size)
        made = backend.rms_norm(made, embedding.norm, self._config.rms_norm_eps).view(found.shape)
        return backend.scale(backend.add(made, found), 2**-0.5)

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
        return self._run_layers(self._main, hidden, layouts, kv_tensors, needed, None, on_layer)

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
        run: _LayerRun,
        residual: Tensor,
        layouts: Sequence[BatchLayout],
        kv_tensors: Sequence[Tensor],
        needed: Drawing | None,
        final_norm: Tensor | None,
        on_layer: OnLayer | None,
        embedded: Tensor | None = None,
    ) -> Tensor | None:
        """Run layers as `run_layers` does, and normalise behind the last one where `final_norm` is given.

        `embedded`: the result of `_embed_for_layers`.
        """
        backend, layers = self._backend, run.layers
        first_norm = layers[0].norms.input
        x = residual if first_norm is None else backend.rms_norm(residual, first_norm, self._config.rms_norm_eps)
        chosen: Tensor | None = None  # the tokens that latents' queries attend to; None: all
        for index, layer in enumerate(layers):
            place = run.places[index]
            layout, kv_layer = layouts[place.table], kv_tensors[place.tensor]
            if layer.kv_heads is not None:
                kv_layer = kv_layer.view(*kv_layer.shape[:2], layer.kv_heads.number, -1, layer.kv_heads.dim)
            gate = None if layer.output_gate is None else layer.output_gate(x)
            asking: IndexQueries | None = None
            if isinstance(layer.qkv, StateMixer):
                q = layer.qkv(x, kv_layer, layout)
            elif isinstance(layer.qkv, MLAWeights):
                q, asking = self._write_latents(x, layer, layer.qkv, kv_layer, layout)
            else:
                q = self._write_kv(x, layer, layer.qkv, kv_layer if place.own else kv_layer[:, :, :0], layout)
            if on_layer is not None:  # on CUDA the write is launched
                for number in place.own:
                    on_layer(number)
            if index == run.last_writer and needed is not None:
                if needed.rows.numel() == 0:
                    return None
                q, residual = q[needed.rows], residual[needed.rows]
                gate = None if gate is None else gate[needed.rows]
                embedded = None if embedded is None else embedded[needed.rows]
                asking = None if asking is None else asking.of(needed.rows)
                chosen = None if chosen is None else chosen[needed.rows]
                read = {behind.table for behind in run.places[index:]}
                layouts = [one.of_last_tokens(needed) if table in read else one for table, one in enumerate(layouts)]
                layout = layouts[place.table]
            if isinstance(layer.qkv, StateMixer):
                x = q if layer.qkv.norm is None else self._norm_groups(q, layer.qkv.norm)
            elif isinstance(layer.qkv, MLAWeights):
                if asking is not None and layer.qkv.index is not None:
                    chosen = layer.qkv.index.choose(asking, kv_layer, layout)
                x = layer.qkv.attention(q, layer.cos_sin, kv_layer, layout, chosen)
            else:
                x = backend.attention(q, kv_layer, layout, layer.attention)
            if gate is not None:
                x = backend.gate_rows(x, gate)
            following = final_norm if index == len(layers) - 1 else layers[index + 1].norms.input
            if layer.mlp is None and layer.routed is None:
                x, residual = self._sum_and_norm(layer.output(x), residual, layer.norms.attention, following)
                continue
            x, residual = self._sum_and_norm(layer.output(x), residual, layer.norms.attention, layer.norms.mlp)
            x, is_whole = self._feed_forward(x, residual, layer)
            if layer.embedding_gate is None and layer.output_scale == 1:
                x, residual = self._sum_and_norm(x, residual, layer.norms.output, following, is_whole)
                continue
            _, residual = self._sum_and_norm(x, residual, layer.norms.output, None, is_whole)
            if layer.embedding_gate is not None and embedded is not None:
                residual = self._add_embedding(residual, embedded, index, layer.embedding_gate)
            x = residual = backend.scale(residual, layer.output_scale)
            if following is not None:
                x = backend.rms_norm(residual, following, self._config.rms_norm_eps)
        return x

    def _add_embedding(self, residual: Tensor, embedded: Tensor, index: int, parts: EmbeddingGate) -> Tensor:
        """Add what a layer makes of its part of `embedded` to the residual."""
        backend, gates = self._backend, parts.gate(residual)
        x = backend.gate_columns(gates, embedded, index * gates.shape[1], self._config.activation)
        x = backend.rms_norm(parts.output(x), parts.norm, self._config.rms_norm_eps)
        return backend.add(x, residual)

    def _write_latents(
        self, x: Tensor, layer: LayerWeights, latents: MLAWeights, kv_layer: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, IndexQueries | None]:
        """Write a layer's latents into the cache. Returns the queries, one row per token, and those of its index where
        some token is to choose."""
        backend, index, hidden = self._backend, latents.index, x
        backend.write_latents(latents.down(x), latents.norm, latents.eps, layer.cos_sin, kv_layer, layout)
        if latents.query_down is not None and latents.query_norm is not None:
            x = backend.rms_norm(latents.query_down(x), latents.query_norm, latents.eps)
        asking = None
        if index is not None:
            keys = index.weights.key(hidden)
            backend.write_index_keys(keys, index.weights.key_norm, layer.cos_sin, kv_layer, layout)
            asking = index.queries(hidden, x, layer.cos_sin, layout)
        q, scales = latents.query(x), layer.query_scales
        return q if scales is None else backend.scale_by_position(q, scales, layout.positions), asking

    def _write_kv(
        self, x: Tensor, layer: LayerWeights, projection: Linear, kv_layer: Tensor, layout: BatchLayout
    ) -> Tensor:
        """Write a layer's keys and values into the cache. Returns the queries, one row per token.

        A layer that attends to another's keys and values is given a cache without heads.
        """
        backend, parallel = self._backend, self._parallel
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

    def _feed_forward(self, x: Tensor, residual: Tensor, layer: LayerWeights) -> tuple[Tensor, bool]:
        """Return the output of MLP and experts, this rank's summand or, with True, the whole sum."""
        backend, mlp, routed = self._backend, layer.mlp, layer.routed
        activation = self._config.activation
        beside = None if mlp is None else backend.feed_forward(x, mlp.gate_up, mlp.down, activation)
        if routed is None:
            assert beside is not None
            return beside, False
        if routed.norms is not None and beside is not None:
            return self._beside_experts(beside, residual, routed, routed.norms), True
        logits = routed.router(x, out_dtype=torch.float32)
        chosen = backend.route(logits, routed.correction, routed.routing)
        if routed.scales_input:
            x = backend.gate_by_sigmoid(x, logits)
        y = routed.experts(x, chosen)
        if beside is None:
            return y, False
        if routed.shared_gate is not None:
            beside = backend.gate_by_sigmoid(beside, routed.shared_gate(x, out_dtype=torch.float32))
        return backend.add(beside, y), False

    def _beside_experts(self, beside: Tensor, residual: Tensor, routed: RoutedWeights, norms: NormsBeside) -> Tensor:
        """Return the sum of an MLP's output and of experts, each normalised for itself."""
        backend, eps = self._backend, self._config.rms_norm_eps
        logits = routed.router(backend.rms_norm(residual, norms.router, eps), out_dtype=torch.float32)
        chosen = backend.route(logits, routed.correction, routed.routing, routed.scales)
        y = routed.experts(backend.rms_norm(residual, norms.input, eps), chosen)
        beside = backend.rms_norm(self._parallel.all_reduce(beside), norms.beside, eps)
        return backend.add(backend.rms_norm(self._parallel.all_reduce(y), norms.output, eps), beside)

    def _sum_and_norm(
        self, x: Tensor, residual: Tensor, own_norm: Tensor | None, norm: Tensor | None, is_whole: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Add a sublayer's output to the residual and normalise. x is this rank's summand, or the whole sum. Returns
        the input of the next sublayer, and the new residual."""
        eps = self._config.rms_norm_eps
        x = x if is_whole else self._parallel.all_reduce(x)
        if own_norm is not None:
            x = self._backend.rms_norm(x, own_norm, eps)
        if norm is None:
            total = self._backend.add(x, residual)
            return total, total
        return self._backend.add_rms_norm(x, residual, norm, eps)
