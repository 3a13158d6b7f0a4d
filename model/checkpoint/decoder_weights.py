"""A decoder's weights on one rank: cut, fused, packed and quantised as they are loaded, one projection at a time."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from twostroke.model.architectures.context_index import ContextIndex, IndexWeights
from twostroke.model.architectures.decoder import (
    DecoderWeights,
    EmbeddingGate,
    EndWeights,
    LatentWeights,
    LayerEmbedding,
    LayerWeights,
    Mixer,
    MlpWeights,
    MtpWeights,
    NormsBeside,
    RoutedWeights,
)
from twostroke.model.architectures.rope import cos_sin_table, head_order, query_scale_table
from twostroke.model.backend import (
    AS_THEY_ARE,
    AttentionForm,
    Backend,
    ExpertWeights,
    HeadNorms,
    KVScales,
    LatentHeads,
    LayerNorm,
    Linear,
    LoadOptions,
    RowNorms,
)
from twostroke.model.checkpoint.quantization import QuantizedWeight, one_below_the_other
from twostroke.model.checkpoint.state_weights import StateLoader
from twostroke.model.checkpoint.tensor_file import WHOLE
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.config import (
    ExpertNorms,
    ExpertsSpec,
    KVHeads,
    LatentSpec,
    LayerEmbeddingSpec,
    MlpSpec,
    ModelConfig,
    MtpSpec,
    Projection,
    Quantization,
)
from twostroke.model.costs.sizes import head_name, of_expert, of_lm_head
from twostroke.model.parallel.context_parts import ContextParts
from twostroke.model.parallel.expert_slots import make_places
from twostroke.model.parallel.form import ONLY_STAGE, WHOLE_MODEL, Shard, Stage, of_heads, shifted
from twostroke.model.shapes.latent_sizes import LatentSizes

Weight = Tensor | QuantizedWeight


def load_decoder_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: LoadOptions,
    backend: Backend,
    shard: Shard = WHOLE_MODEL,
    stage: Stage = ONLY_STAGE,
    context_parts: ContextParts | None = None,
) -> DecoderWeights:
    """Return the weights of one rank of a stage, which reads only its own slices. Raises ConfigError.

    `context_parts` as to Backend.make_latent_attention.
    """
    return _DecoderLoader(checkpoint, config, options, backend, shard, context_parts).load(stage)


class RankTensors:
    """Reads a checkpoint's tensors as one rank holds them: on its device, in its dtype, as projections."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions, backend: Backend, shard: Shard
    ):
        self.device, self.dtype, self.quantization = options.device, options.dtype, options.quantization
        self._checkpoint = checkpoint
        self._backend = backend
        self._shard = shard
        self._adds_one = config.spec.norms_add_one
        order = head_order(config.rope, config.rotary_dim(0))
        self.orders = {} if order is None else _orders(config, order)

    def weight(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> Weight:
        """Return a weight in the checkpoint's form, or dequantised where the setting asks for another form."""
        found = self._checkpoint.weight(name, rows, columns)
        if isinstance(found, Tensor):
            return found.to(device=self.device, dtype=self.dtype).contiguous()
        return found.to(self.device) if self.quantization == "auto" else self.plain(found).to(self.device)

    def plain(self, weight: Weight) -> Tensor:
        """Return a weight without quantisation."""
        return weight if isinstance(weight, Tensor) else weight.dequantized(self.dtype)

    def kept(self, name: str, rows: slice = WHOLE, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a tensor that is used as it is: one view would keep the whole file mapped."""
        return self._checkpoint.tensor(name, rows).to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def norm(self, name: str, rows: slice = WHOLE) -> Tensor:
        """Return the weight of an RMSNorm in fp32."""
        weight = self.kept(f"{name}.weight", rows, torch.float32)
        return weight.add_(1) if self._adds_one else weight

    def table(self, name: str, rows: slice) -> Tensor | Linear:
        """Return the embedding, quantised where the checkpoint's is."""
        found = self._checkpoint.weight(name, rows)
        if isinstance(found, Tensor):
            return self.kept(name, rows)
        held = found.to(self.device)
        return self.linear(held, None) if self.quantization == "auto" else self.plain(held)

    def linear(self, weight: Weight, bias: Tensor | None, quantization: Quantization | None = None) -> Linear:
        return self._backend.make_linear(weight, bias, quantization or self.quantization, self.dtype)

    def by_rows(self, prefix: str, parts: Sequence[tuple[Projection, slice]]) -> Linear:
        """Return one projection that computes all of these, each for its rows: all have a bias, or none."""
        weights = [self.rows(prefix, part, rows) for part, rows in parts]
        biases = [
            in_order(self.kept(f"{prefix}{part.name}.bias", _rows_within(part, rows)), self.orders.get(part))
            for part, rows in parts
            if part.has_bias
        ]
        return self.linear(self.together(weights), torch.cat(biases) if biases else None)

    def together(self, weights: Sequence[Weight]) -> Weight:
        """Return weights one below the other, quantised where their forms allow it."""
        quantized = [found for found in weights if isinstance(found, QuantizedWeight)]
        together = one_below_the_other(quantized) if len(quantized) == len(weights) else None
        return torch.cat([self.plain(found) for found in weights]) if together is None else together

    def by_columns(self, prefix: str, projection: Projection, columns: slice) -> Linear:
        """Return the projection of this rank's summand; the bias counts once among the ranks."""
        name = f"{prefix}{projection.name}"
        bias = self.kept(f"{name}.bias") if projection.has_bias and self._shard.rank == 0 else None
        return self.linear(self.weight(f"{name}.weight", columns=columns), bias)

    def whole(self, prefix: str, part: Projection) -> Linear:
        """Return a small projection that must stay exact: whole on each rank, and never quantised."""
        bias = self.kept(f"{prefix}{part.name}.bias") if part.has_bias else None
        return self.linear(self.weight(f"{prefix}{part.name}.weight"), bias, "none")

    def rows(self, prefix: str, part: Projection, rows: slice) -> Weight:
        """Return this rank's rows, in the order in which kernels rotate them."""
        if part not in self.orders:
            return self.weight(f"{prefix}{part.name}.weight", _rows_within(part, rows))
        return self.at_places(prefix, part, rows, in_order(torch.arange(rows.stop - rows.start), self.orders[part]))

    def at_places(self, prefix: str, part: Projection, rows: slice, places: Tensor) -> Weight:
        """Return the rows that are at these places among `rows`."""
        found = self.weight(f"{prefix}{part.name}.weight", _rows_within(part, rows))
        return found[places] if isinstance(found, Tensor) else found.rows(places)


class _DecoderLoader:
    """Builds one rank's layers and ends from its tensors."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        options: LoadOptions,
        backend: Backend,
        shard: Shard,
        context_parts: ContextParts | None,
    ):
        self._checkpoint = checkpoint
        self._config = config
        self._options = options
        self._backend = backend
        self._shard = shard
        self._context_parts = context_parts
        self._tensors = RankTensors(checkpoint, config, options, backend, shard)
        self._experts = _ExpertsLoader(checkpoint, options, shard)
        self._order = head_order(config.rope, config.rotary_dim(0))
        self._heads = shard.part(config.num_heads)
        scales = query_scale_table(config.query_scale, options.max_context)
        self._query_scales = None if scales is None else scales.to(options.device)

    def _query_rows(self, layer: int) -> slice:
        """Return this rank's rows of a layer's queries."""
        return of_heads(self._heads, self._config.heads(layer).dim)

    def _kv_rows(self, layer: int) -> slice:
        """Return this rank's rows of a layer's keys, and of its values."""
        heads = self._config.heads(layer)
        return of_heads(self._shard.kv_heads(heads.number), heads.dim)

    def load(self, stage: Stage) -> DecoderWeights:
        """Return the layers of `stage`, and the ends on the first one."""
        config, layers = self._config, stage.layers(self._config.num_layers)
        turned = {index: (config.rope_of(index), config.rotary_dim(index)) for index in layers}
        tables = {
            one: cos_sin_table(*one, self._options.max_context).to(self._options.device) for one in {*turned.values()}
        }
        loaded = tuple(self._layer(index, tables[turned[index]]) for index in layers)
        ends = self._ends() if stage.is_first else None
        if not config.has_mtp or config.spec.mtp is None:
            return DecoderWeights(self._options.dtype, loaded, ends)
        return DecoderWeights(self._options.dtype, loaded[:-1], ends, self._mtp(config.spec.mtp, loaded[-1]))

    def _mtp(self, spec: MtpSpec, layer: LayerWeights) -> MtpWeights:
        prefix, tensors, hidden = (
            self._config.prefixes(self._config.num_layers - 1)[0],
            self._tensors,
            self._config.hidden_size,
        )
        of_embedding, of_hidden = (
            tensors.linear(tensors.weight(f"{prefix}{spec.projection}.weight", columns=columns), None)
            for columns in (slice(0, hidden), slice(hidden, 2 * hidden))
        )
        norms = (spec.embedding_norm, spec.hidden_norm, spec.final_norm)
        embedding_norm, hidden_norm, final_norm = (tensors.norm(f"{prefix}{name}") for name in norms)
        return MtpWeights(embedding_norm, hidden_norm, of_embedding, of_hidden, layer, final_norm)

    def _layer(self, index: int, cos_sin: Tensor) -> LayerWeights:
        config, parts = self._config, self._config.spec.layer
        prefix, mlp_prefix = config.prefixes(index)
        qkv, output, output_gate = self._mixer(index, prefix)
        keeps_state = config.keeps_state(index)
        return LayerWeights(
            input_norm=self._norm_if_any(prefix, parts.input_norm),
            qkv=qkv,
            output=output,
            mlp_norm=self._norm_if_any(mlp_prefix, parts.mlp_norm),
            mlp=None if mlp_prefix is None else self._mlp(mlp_prefix, config.mlp_of(index)),
            routed=None if mlp_prefix is None else self._routed(mlp_prefix, config.experts_of(index)),
            cos_sin=cos_sin,
            head_norms=None if keeps_state else self._head_norms(prefix, index),
            row_norms=None if keeps_state else self._row_norms(prefix, index),
            attention=self._attention_form(prefix, index),
            attention_norm=self._norm_if_any(prefix, parts.attention_norm),
            output_norm=self._norm_if_any(mlp_prefix, parts.output_norm),
            output_gate=output_gate,
            query_scales=self._query_scales if index in config.scaled_layers else None,
            kv_heads=self._kv_heads(index),
            embedding_gate=self._embedding_gate(prefix, config.spec.layer_embedding),
            output_scale=self._output_scale(prefix, parts.output_scale),
        )

    def _kv_heads(self, index: int) -> KVHeads | None:
        if not self._config.layer_heads:
            return None
        heads = self._config.heads(index)
        found = self._shard.kv_heads(heads.number)
        return KVHeads(found.stop - found.start, heads.dim)

    def _embedding_gate(self, prefix: str, spec: LayerEmbeddingSpec | None) -> EmbeddingGate | None:
        if spec is None:
            return None
        gate, output = (self._tensors.whole(prefix, part) for part in (spec.gate, spec.output))
        return EmbeddingGate(gate, output, self._tensors.norm(f"{prefix}{spec.norm}"))

    def _output_scale(self, prefix: str, name: str | None) -> float:
        return 1.0 if name is None else float(self._tensors.kept(f"{prefix}{name}").item())

    def _mixer(self, index: int, prefix: str) -> tuple[Mixer, Linear, Linear | None]:
        """Return what mixes a layer's tokens, the projection of its result, and the gate of that result, if any."""
        config, parts, tensors = self._config, self._config.spec.layer, self._tensors
        if parts.state is not None and config.state is not None and config.keeps_state(index):
            loader = StateLoader(tensors, config.state, self._shard, self._backend.state_kernels)
            return *loader.mixer(prefix, parts.state, config.rms_norm_eps), None
        if parts.latent is not None and config.latent is not None:
            mixed = of_heads(self._heads, config.latent.value)
            return (
                self._latents(prefix, parts.latent, config.latent, self._index(index, prefix, parts.latent)),
                tensors.by_columns(prefix, parts.output, mixed),
                None,
            )
        query_rows, kv_rows = self._query_rows(index), self._kv_rows(index)
        output = tensors.by_columns(prefix, parts.output, query_rows)
        if parts.gates_output:
            qkv, gate = self._gated(prefix, kv_rows)
            return qkv, output, gate
        rows = [(parts.q, query_rows)]
        if config.kv_owner(index) == index:
            rows += [(parts.k, kv_rows), (config.value_projection(index), kv_rows)]
        return tensors.by_rows(prefix, rows), output, None

    def _gated(self, prefix: str, kv_rows: slice) -> tuple[Linear, Linear]:
        """Return queries, keys and values of attention with a gate, and that gate: each head's lies behind its
        queries."""
        parts, tensors, dim = self._config.spec.layer, self._tensors, self._config.head_dim
        rows = of_heads(self._heads, 2 * dim)
        of_head = torch.arange(rows.stop - rows.start).view(-1, 2, dim)
        queries, gates = in_order(of_head[:, 0].reshape(-1), self._order), of_head[:, 1].reshape(-1)
        q = tensors.at_places(prefix, parts.q, rows, queries)
        k, v = (tensors.rows(prefix, part, kv_rows) for part in (parts.k, parts.v))
        return tensors.linear(tensors.together([q, k, v]), None), tensors.linear(
            tensors.at_places(prefix, parts.q, rows, gates), None
        )

    def _ends(self) -> EndWeights:
        """Return the embedding, the final norm and the LM head, the tables for this rank's part of the vocabulary."""
        config, tensors = self._config, self._tensors
        vocabulary = self._shard.vocabulary(config.vocab_size)
        weight = tensors.weight(head_name(config), vocabulary)
        lm_head = tensors.linear(weight, None, of_lm_head(self._options.quantization))
        embedding: Tensor | Linear = lm_head
        if not config.tie_word_embeddings:
            embedding = tensors.table(f"{config.spec.embedding}.weight", vocabulary)
        layer_embedding = config.spec.layer_embedding
        return EndWeights(
            embedding=embedding,
            embedding_scale=self._embedding_scale(config.embedding_scale),
            first_token=vocabulary.start,
            final_norm=tensors.norm(config.spec.final_norm) * config.logits_scale,
            lm_head=lm_head,
            layer_embedding=None if layer_embedding is None else self._layer_embedding(layer_embedding, vocabulary),
        )

    def _embedding_scale(self, scale: float) -> float:
        return torch.tensor(scale).to(self._options.dtype).item() if self._config.rounds_embedding_scale else scale

    def _layer_embedding(self, spec: LayerEmbeddingSpec, vocabulary: slice) -> LayerEmbedding:
        return LayerEmbedding(
            table=self._tensors.table(f"{spec.table}.weight", vocabulary),
            scale=self._embedding_scale(math.sqrt(spec.size)),
            projection=self._tensors.whole("", spec.projection),
            norm=self._tensors.norm(spec.projection_norm),
            size=spec.size,
        )

    def _index(self, layer: int, prefix: str, latent: LatentSpec) -> ContextIndex | None:
        """Return a layer's index, where it has one: each rank has it whole."""
        sizes, spec, tensors = self._config.index, latent.index, self._tensors
        if sizes is None or spec is None or layer in sizes.sharing:
            return None
        weight, bias = (
            in_order(tensors.kept(f"{prefix}{spec.key_norm}.{part}", dtype=torch.float32), tensors.orders[spec.key])
            for part in ("weight", "bias")
        )
        weights = IndexWeights(
            query=tensors.by_rows(prefix, [(spec.query, slice(0, sizes.heads * sizes.key))]),
            key=tensors.by_rows(prefix, [(spec.key, slice(0, sizes.key))]),
            key_norm=LayerNorm(weight, bias, latent.norm_eps),
            weights=tensors.whole(prefix, spec.weights),
            sizes=sizes,
        )
        return ContextIndex(weights)

    def _latents(
        self, prefix: str, latent: LatentSpec, sizes: LatentSizes, index: ContextIndex | None
    ) -> LatentWeights:
        config, parts, tensors = self._config, self._config.spec.layer, self._tensors
        down, query_down = latent.down, latent.query_down
        up = tensors.weight(f"{prefix}{parts.k.name}.weight", of_heads(self._heads, sizes.key + sizes.value))
        both = tensors.plain(up).view(-1, sizes.key + sizes.value, sizes.rank)
        keys, values = both[:, : sizes.key], both[:, parts.v.first_row :].transpose(1, 2)
        heads = LatentHeads(keys, values, config.attention_scale)
        query_rows = slice(0, sizes.query_rank)
        return LatentWeights(
            down=tensors.by_rows(prefix, [(down, slice(0, sizes.rank + sizes.rotary))]),
            norm=tensors.norm(f"{prefix}{latent.norm}"),
            query_down=None if query_down is None else tensors.by_rows(prefix, [(query_down, query_rows)]),
            query_norm=self._norm_if_any(prefix, latent.query_norm),
            query=tensors.by_rows(prefix, [(parts.q, of_heads(self._heads, sizes.query))]),
            eps=latent.norm_eps,
            attention=self._backend.make_latent_attention(heads, self._context_parts),
            index=index,
        )

    def _mlp(self, prefix: str, spec: MlpSpec | None) -> MlpWeights | None:
        if spec is None:
            return None
        inner, tensors = self._shard.part(spec.size), self._tensors
        gate_up = tensors.by_rows(prefix, [(part, inner) for part in (spec.gate, spec.up) if part is not None])
        return MlpWeights(gate_up, tensors.by_columns(prefix, spec.down, inner))

    def _routed(self, prefix: str, spec: ExpertsSpec | None) -> RoutedWeights | None:
        if spec is None:
            return None
        weights, (dtype, held) = self._experts.weights(prefix, spec), (self._options.dtype, self._options.quantization)
        correction = None
        if spec.correction is not None:
            correction = self._tensors.kept(f"{prefix}{spec.correction}", dtype=torch.float32)
        return RoutedWeights(
            router=self._tensors.whole(prefix, spec.router),
            correction=correction,
            routing=spec.routing,
            experts=self._backend.make_experts(weights, self._config.activation, held, dtype),
            scales_input=spec.scales_input,
            shared_gate=None if spec.shared_gate is None else self._tensors.whole(prefix, spec.shared_gate),
            scales=None if spec.scales is None else self._tensors.kept(f"{prefix}{spec.scales}", dtype=torch.float32),
            norms=None if spec.norms is None else self._norms_beside(prefix, spec.norms),
        )

    def _norms_beside(self, prefix: str, names: ExpertNorms) -> NormsBeside:
        tensors = self._tensors
        router = tensors.kept(f"{prefix}{names.router}", dtype=torch.float32)
        others = (tensors.norm(f"{prefix}{name}") for name in (names.input, names.output, names.beside))
        return NormsBeside(router * self._config.hidden_size**-0.5, *others)

    def _attention_form(self, prefix: str, index: int) -> AttentionForm:
        config, sinks, scales = self._config, None, AS_THEY_ARE
        if (name := config.spec.layer.sinks) is not None:
            sinks = self._tensors.kept(f"{prefix}{name}", self._heads, torch.float32)
        if self._options.kv_dtype == torch.float8_e4m3fn:
            scales = KVScales(*self._checkpoint.kv_scales(index))
        scale = config.attention_scale or config.heads(index).dim ** -0.5
        return AttentionForm(scale, config.window(index), config.soft_cap, sinks, scales)

    def _norm_if_any(self, prefix: str | None, name: str | None) -> Tensor | None:
        return None if prefix is None or name is None else self._tensors.norm(f"{prefix}{name}")

    def _head_norms(self, prefix: str, index: int) -> HeadNorms | None:
        config, parts = self._config, self._config.spec.layer
        ones = torch.ones(config.heads(index).dim, device=self._options.device)
        if parts.normalises_rotated and config.rope_of(index) is not None:  # rotation changes no head's norm
            return HeadNorms(ones, ones, config.rms_norm_eps)
        if parts.q_norm is None:
            return None
        # A layer without keys of its own normalises none.
        names = (parts.q_norm, parts.k_norm if config.kv_owner(index) == index else parts.q_norm)
        q, k = (in_order(self._tensors.norm(f"{prefix}{name}"), self._order) for name in names)
        return HeadNorms(q, k, config.rms_norm_eps, ones if parts.normalises_values else None)

    def _row_norms(self, prefix: str, index: int) -> RowNorms | None:
        parts = self._config.spec.layer
        if parts.q_row_norm is None or parts.k_row_norm is None:
            return None
        named = ((parts.q_row_norm, self._query_rows(index)), (parts.k_row_norm, self._kv_rows(index)))
        q, k = (in_order(self._tensors.norm(f"{prefix}{name}", rows), self._order) for name, rows in named)
        return RowNorms(q, k, self._shard.size, self._config.rms_norm_eps)


def in_order(rows: Tensor, of_head: list[int] | None) -> Tensor:
    """Return rows of heads with those of each head in this order."""
    return rows if of_head is None else rows.view(-1, len(of_head), *rows.shape[1:])[:, of_head].reshape(rows.shape)


def _rows_within(part: Projection, rows: slice) -> slice:
    """Return the rows of a projection within the tensor that it may share with others."""
    return shifted(rows, part.first_row)


def _orders(config: ModelConfig, order: list[int]) -> dict[Projection, list[int]]:
    """Return, by rotated projection, the order of a head's rows that puts those that rotate in `order`."""
    layer, sizes = config.spec.layer, config.latent
    if sizes is None or layer.latent is None:
        return {layer.q: order, layer.k: order}

    def behind(still: int) -> list[int]:
        return [*range(still), *(still + place for place in order)]

    orders = {layer.q: behind(sizes.key), layer.latent.down: behind(sizes.rank)}
    if sizes.index is not None and (index := layer.latent.index) is not None:
        # What turns is the first in files, and the last here as it is in queries.
        turned = head_order(replace(config.rope, interleaves=index.interleaves), sizes.rotary)
        of_index = [*range(sizes.rotary, sizes.index.key), *(range(sizes.rotary) if turned is None else turned)]
        orders |= {index.query: of_index, index.key: of_index}
    return orders


def _columns(spec: ExpertsSpec, inner: slice) -> Tensor:
    """Return where stacked experts have these features: those of the gates, then those of the ups."""
    if spec.up.first_row:
        gates = torch.arange(inner.start, inner.stop)
        return torch.cat([gates, spec.up.first_row + gates])
    return torch.arange(2 * inner.start, 2 * inner.stop).view(-1, 2).T.reshape(-1)


class _ExpertsLoader:
    """Reads a rank's part of a layer's experts, and nothing else of them."""

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions, shard: Shard):
        self._checkpoint = checkpoint
        self._options = options
        self._shard = shard

    def weights(self, prefix: str, spec: ExpertsSpec) -> ExpertWeights:
        """Return the experts stacked; where their forms differ, in the dtype of activations."""
        total, shard = spec.routing.num_experts, self._shard
        held, inner = shard.experts(total), shard.inside_experts(spec.size)
        read = self._of_stack if spec.are_stacked else self._of_one
        parts = [read(prefix, spec, expert, inner) for expert in range(held.start, held.stop)]
        places, spare = None, self._options.spare_experts
        if spare:  # unused at first; the slots have the form of the other experts
            parts += parts[:1] * spare
            places = make_places(shard, total, spare, self._options.device)
        gate_up_bias = down_bias = None
        if spec.are_stacked and spec.gate is not None and spec.gate.has_bias:
            gate_up_bias = self._plain(f"{prefix}{spec.gate.name}_bias", held, spare)[:, _columns(spec, inner)]
            if shard.has_whole_experts or shard.rank == 0:  # counts once
                down_bias = self._plain(f"{prefix}{spec.down.name}_bias", held, spare)
        return ExpertWeights(
            len(parts),
            self._together([weight for gate_up, _ in parts for weight in gate_up]),
            self._together([down for _, down in parts]),
            gate_up_bias,
            down_bias,
            held.start,
            total,
            places,
        )

    def _of_one(self, prefix: str, spec: ExpertsSpec, expert: int, inner: slice) -> tuple[list[Weight], Weight]:
        """Gate and up, and down, of tensors of their own."""
        parts = [part for part in (spec.gate, spec.up, spec.down) if part is not None]
        *ups, down = (f"{prefix}{of_expert(part, expert).name}.weight" for part in parts)
        of_down = self._checkpoint.weight(down, columns=inner)
        return [self._checkpoint.weight(name, inner) for name in ups], of_down

    def _of_stack(self, prefix: str, spec: ExpertsSpec, expert: int, inner: slice) -> tuple[list[Weight], Weight]:
        """Return weights as `_of_one`, from tensors that stack all experts."""
        gate_up, down = (
            self._checkpoint.weight(f"{prefix}{part.name}", slice(expert, expert + 1))
            for part in (spec.up, spec.down)  # gates are in one tensor with ups
        )
        rows = _columns(spec, inner)
        if spec.stacks_rows and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            return [gate_up[0][rows]], down[0][:, inner]
        return (
            [gate_up[0].T[rows] if isinstance(gate_up, Tensor) else gate_up.rows(rows)],
            down[0].T[:, inner] if isinstance(down, Tensor) else down.columns(inner),
        )

    def _plain(self, name: str, rows: slice, spare: int) -> Tensor:
        """Return a plain tensor with `spare` more rows for copies."""
        found = self._checkpoint.tensor(name, rows).to(device=self._options.device, dtype=self._options.dtype)
        return torch.cat([found, *[found[:1]] * spare])

    def _together(self, weights: Sequence[Weight]) -> Weight:
        quantized = [found for found in weights if isinstance(found, QuantizedWeight)]
        if len(quantized) == len(weights) and self._options.quantization == "auto":
            together = one_below_the_other(quantized)
            if together is not None and together.order is None:  # which no kernel of experts knows
                return together.to(self._options.device)
        dtype, device = self._options.dtype, self._options.device
        return torch.cat(
            [
                (found if isinstance(found, Tensor) else found.dequantized(dtype)).to(device=device, dtype=dtype)
                for found in weights
            ]
        )
