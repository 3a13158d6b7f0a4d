"""A decoder's weights on one rank: cut, fused, packed and quantised as they are loaded, one projection at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.model.architectures.decoder import (
    DecoderWeights,
    EndWeights,
    LatentWeights,
    LayerWeights,
    MlpWeights,
    RoutedWeights,
)
from twostroke.model.architectures.rope import cos_sin_table, head_order
from twostroke.model.backend import (
    AS_THEY_ARE,
    AttentionForm,
    Backend,
    ExpertWeights,
    HeadNorms,
    KVScales,
    LatentHeads,
    Linear,
    LoadOptions,
    RowNorms,
)
from twostroke.model.checkpoint.quantization import QuantizedWeight, one_below_the_other
from twostroke.model.checkpoint.tensor_file import WHOLE
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.config import (
    ExpertsSpec,
    LatentSizes,
    LatentSpec,
    MlpSpec,
    ModelConfig,
    Projection,
    Quantization,
)
from twostroke.model.costs.sizes import head_name, of_expert, of_lm_head
from twostroke.model.parallel.context_parts import ContextParts
from twostroke.model.parallel.expert_slots import make_places
from twostroke.model.parallel.form import ONLY_STAGE, WHOLE_MODEL, Shard, Stage

_Weight = Tensor | QuantizedWeight


def load_decoder_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: LoadOptions,
    backend: Backend,
    shard: Shard = WHOLE_MODEL,
    stage: Stage = ONLY_STAGE,
    context_parts: ContextParts | None = None,
) -> DecoderWeights:
    """Those of one rank of a stage, of which it reads its slices alone. Raises ConfigError.

    `context_parts` as to Backend.make_latent_attention.
    """
    dtype, device, quantization = options.dtype, options.device, options.quantization

    def weight(name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor | QuantizedWeight:
        """In the checkpoint's form, or as the setting asks for another."""
        found = checkpoint.weight(name, rows, columns)
        if isinstance(found, Tensor):
            return found.to(device=device, dtype=dtype).contiguous()
        return found.to(device) if quantization == "auto" else found.dequantized(dtype).to(device)

    def kept(name: str, rows: slice = WHOLE) -> Tensor:
        """A tensor that is used as it is: copied, or one view would keep the whole file mapped."""
        return checkpoint.tensor(name, rows).to(device=device, dtype=dtype, copy=True)

    def rows_within(part: Projection, rows: slice) -> slice:
        return slice(part.first_row + rows.start, part.first_row + rows.stop)

    def rows_of(prefix: str, part: Projection, rows: slice) -> Tensor | QuantizedWeight:
        """This rank's, those that kernels turn in the order in which they do."""
        found = weight(f"{prefix}{part.name}.weight", rows_within(part, rows))
        if part not in orders:
            return found
        places = in_order(torch.arange(rows.stop - rows.start), orders[part])
        return found[places] if isinstance(found, Tensor) else found.rows(places)

    def bias_of(prefix: str, part: Projection, rows: slice) -> Tensor:
        return in_order(kept(f"{prefix}{part.name}.bias", rows_within(part, rows)), orders.get(part))

    def in_order(rows: Tensor, of_head: list[int] | None) -> Tensor:
        """Rows of heads, each head's in this order."""
        return rows if of_head is None else rows.view(-1, len(of_head), *rows.shape[1:])[:, of_head].reshape(rows.shape)

    def linear(weight: Tensor | QuantizedWeight, bias: Tensor | None, held: Quantization = quantization) -> Linear:
        return backend.make_linear(weight, bias, held, dtype)

    def by_rows(prefix: str, parts: dict[Projection, slice]) -> Linear:
        """One projection that computes all of these, each for its rows: all have a bias, or none."""
        weights = [rows_of(prefix, part, rows) for part, rows in parts.items()]
        biases = [bias_of(prefix, part, rows) for part, rows in parts.items() if part.has_bias]
        quantized = [found for found in weights if isinstance(found, QuantizedWeight)]
        together = one_below_the_other(quantized) if len(quantized) == len(weights) else None
        if together is None:
            plain = [found if isinstance(found, Tensor) else found.dequantized(dtype) for found in weights]
            return linear(torch.cat(plain), torch.cat(biases) if biases else None)
        return linear(together, torch.cat(biases) if biases else None)

    def norm(name: str, rows: slice = WHOLE) -> Tensor:
        weight = checkpoint.tensor(f"{name}.weight", rows).to(device=device, dtype=torch.float32, copy=True)
        return weight.add_(1) if spec.norms_add_one else weight

    def norm_if_any(prefix: str, name: str | None) -> Tensor | None:
        return None if name is None else norm(f"{prefix}{name}")

    def by_columns(prefix: str, projection: Projection, columns: slice) -> Linear:
        """This rank's summand; the bias counts once among them."""
        name = f"{prefix}{projection.name}"
        bias = kept(f"{name}.bias") if projection.has_bias and shard.rank == 0 else None
        return linear(weight(f"{name}.weight", columns=columns), bias)

    heads, groups = shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads)
    query_rows, kv_rows = (of_heads(part, config.head_dim) for part in (heads, groups))
    vocabulary = shard.vocabulary(config.vocab_size)
    spec, parts = config.spec, config.spec.layer
    order = head_order(config.rope, config.rotary_dim)
    orders = {} if order is None else _orders(config, order)
    layers = stage.layers(config.num_layers)
    tables = {
        rope: cos_sin_table(rope, config.rotary_dim, options.max_context).to(device)
        for rope in {config.rope_of(index) for index in layers}
    }

    def head_norms(prefix: str) -> HeadNorms | None:
        if parts.q_norm is None:
            return None
        q, k = (in_order(norm(f"{prefix}{name}"), order) for name in (parts.q_norm, parts.k_norm))
        return HeadNorms(q, k, config.rms_norm_eps)

    def row_norms(prefix: str) -> RowNorms | None:
        if parts.q_row_norm is None or parts.k_row_norm is None:
            return None
        named = ((parts.q_row_norm, query_rows), (parts.k_row_norm, kv_rows))
        q, k = (in_order(norm(f"{prefix}{name}", rows), order) for name, rows in named)
        return RowNorms(q, k, shard.size, config.rms_norm_eps)

    def table(name: str) -> Tensor | Linear:
        found = checkpoint.weight(name, vocabulary)
        if isinstance(found, Tensor):
            return kept(name, vocabulary)
        return linear(found.to(device), None) if quantization == "auto" else found.dequantized(dtype).to(device)

    scale = config.attention_scale or config.head_dim**-0.5

    def latent_weights(prefix: str, latent: LatentSpec, sizes: LatentSizes) -> LatentWeights:
        down, query_down = latent.down, latent.query_down
        up = weight(f"{prefix}{parts.k.name}.weight", of_heads(heads, sizes.key + sizes.value))
        both = (up if isinstance(up, Tensor) else up.dequantized(dtype)).view(-1, sizes.key + sizes.value, sizes.rank)
        keys, values = both[:, : sizes.key], both[:, parts.v.first_row :].transpose(1, 2)
        return LatentWeights(
            down=by_rows(prefix, {down: slice(0, sizes.rank + sizes.rotary)}),
            norm=norm(f"{prefix}{latent.norm}"),
            query_down=None if query_down is None else by_rows(prefix, {query_down: slice(0, sizes.query_rank)}),
            query_norm=norm_if_any(prefix, latent.query_norm),
            query=by_rows(prefix, {parts.q: of_heads(heads, sizes.query)}),
            eps=latent.norm_eps,
            attention=backend.make_latent_attention(LatentHeads(keys, values, config.attention_scale), context_parts),
        )

    def fp32(name: str, rows: slice = WHOLE) -> Tensor:
        return checkpoint.tensor(name, rows).to(device=device, dtype=torch.float32, copy=True)

    def sinks(prefix: str) -> Tensor | None:
        return None if parts.sinks is None else fp32(f"{prefix}{parts.sinks}", shard.part(config.num_heads))

    def kv_scales(index: int) -> KVScales:
        return KVScales(*checkpoint.kv_scales(index)) if options.kv_dtype == torch.float8_e4m3fn else AS_THEY_ARE

    def mlp(prefix: str, spec: MlpSpec | None) -> MlpWeights | None:
        if spec is None:
            return None
        inner = shard.part(spec.size)
        return MlpWeights(by_rows(prefix, {spec.gate: inner, spec.up: inner}), by_columns(prefix, spec.down, inner))

    def routed(prefix: str, spec: ExpertsSpec | None) -> RoutedWeights | None:
        if spec is None:
            return None
        weights = experts.weights(prefix, spec)

        def whole(part: Projection) -> Linear:
            """What is small, and must not be wrong."""
            bias = kept(f"{prefix}{part.name}.bias") if part.has_bias else None
            return linear(weight(f"{prefix}{part.name}.weight"), bias, "none")

        return RoutedWeights(
            router=whole(spec.router),
            correction=None if spec.correction is None else fp32(f"{prefix}{spec.correction}"),
            routing=spec.routing,
            experts=backend.make_experts(weights, config.activation, quantization, dtype),
            shared_gate=None if spec.shared_gate is None else whole(spec.shared_gate),
        )

    experts = _ExpertsReader(checkpoint, options, shard)

    def layer(index: int) -> LayerWeights:
        prefix = f"{spec.layers}.{index}."
        if parts.latent is None or config.latent is None:
            qkv: Linear | LatentWeights = by_rows(prefix, {parts.q: query_rows, parts.k: kv_rows, parts.v: kv_rows})
            mixed = query_rows
        else:
            qkv, mixed = latent_weights(prefix, parts.latent, config.latent), of_heads(heads, config.latent.value)
        return LayerWeights(
            input_norm=norm_if_any(prefix, parts.input_norm),
            qkv=qkv,
            output=by_columns(prefix, parts.output, mixed),
            mlp_norm=norm_if_any(prefix, parts.mlp_norm),
            mlp=mlp(prefix, config.mlp_of(index)),
            routed=routed(prefix, config.experts_of(index)),
            cos_sin=tables[config.rope_of(index)],
            head_norms=head_norms(prefix),
            row_norms=row_norms(prefix),
            attention=AttentionForm(scale, config.window(index), config.soft_cap, sinks(prefix), kv_scales(index)),
            attention_norm=norm_if_any(prefix, parts.attention_norm),
            output_norm=norm_if_any(prefix, parts.output_norm),
        )

    def ends() -> EndWeights:
        lm_head = linear(weight(head_name(config), vocabulary), None, of_lm_head(quantization))
        embedding_scale = config.embedding_scale
        if config.rounds_embedding_scale:
            embedding_scale = torch.tensor(embedding_scale).to(dtype).item()
        return EndWeights(
            embedding=lm_head if config.tie_word_embeddings else table(f"{spec.embedding}.weight"),
            embedding_scale=embedding_scale,
            first_token=vocabulary.start,
            final_norm=norm(spec.final_norm) * config.logits_scale,
            lm_head=lm_head,
        )

    return DecoderWeights(dtype, tuple(map(layer, layers)), ends() if stage.is_first else None)


def of_heads(heads: slice, width: int) -> slice:
    """The rows, or columns, of these heads, each of which has `width`."""
    return slice(heads.start * width, heads.stop * width)


def _orders(config: ModelConfig, order: list[int]) -> dict[Projection, list[int]]:
    """Of the projections that are turned, the order of a head's rows in which `order` is that of those that turn."""
    layer, sizes = config.spec.layer, config.latent
    if sizes is None or layer.latent is None:
        return {layer.q: order, layer.k: order}

    def behind(still: int) -> list[int]:
        return [*range(still), *(still + place for place in order)]

    return {layer.q: behind(sizes.key), layer.latent.down: behind(sizes.rank)}


class _ExpertsReader:
    """A rank's part of a layer's experts, of which it reads nothing else."""

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions, shard: Shard):
        self._checkpoint = checkpoint
        self._options = options
        self._shard = shard

    def weights(self, prefix: str, spec: ExpertsSpec) -> ExpertWeights:
        """One below the other: of what is not quantised alike, in the dtype of activations."""
        total, shard = spec.routing.num_experts, self._shard
        held, inner = shard.experts(total), shard.inside_experts(spec.size)
        read = self._of_stack if spec.are_stacked else self._of_one
        parts = [read(prefix, spec, expert, inner) for expert in range(held.start, held.stop)]
        places, spare = None, self._options.redundant_experts
        if spare:  # nobody reads what lies there at first; it has the form of the others
            parts += parts[:1] * spare
            places = make_places(shard, total, spare, self._options.device)
        gate_up_bias = down_bias = None
        if spec.are_stacked:
            of_inner = torch.arange(2 * inner.start, 2 * inner.stop).view(-1, 2).T.reshape(-1)
            gate_up_bias = self._plain(f"{prefix}{spec.gate.name}_bias", held, spare)[:, of_inner]
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

    def _of_one(self, prefix: str, spec: ExpertsSpec, expert: int, inner: slice) -> tuple[list[_Weight], _Weight]:
        """Gate and up, and down, of tensors of their own."""
        gate, up, down = (f"{prefix}{of_expert(part, expert).name}.weight" for part in (spec.gate, spec.up, spec.down))
        of_down = self._checkpoint.weight(down, columns=inner)
        return [self._checkpoint.weight(name, inner) for name in (gate, up)], of_down

    def _of_stack(self, prefix: str, spec: ExpertsSpec, expert: int, inner: slice) -> tuple[list[_Weight], _Weight]:
        """As `_of_one`, out of tensors of all experts, in which gate and up take turns."""
        gate_up, down = (
            self._checkpoint.weight(f"{prefix}{part.name}", slice(expert, expert + 1))
            for part in (spec.gate, spec.down)
        )
        rows = torch.arange(2 * inner.start, 2 * inner.stop).view(-1, 2).T.reshape(-1)
        return (
            [gate_up[0].T[rows] if isinstance(gate_up, Tensor) else gate_up.rows(rows)],
            down[0].T[:, inner] if isinstance(down, Tensor) else down.columns(inner),
        )

    def _plain(self, name: str, rows: slice, spare: int) -> Tensor:
        """With as many rows more, for copies."""
        found = self._checkpoint.tensor(name, rows).to(device=self._options.device, dtype=self._options.dtype)
        return torch.cat([found, *[found[:1]] * spare])

    def _together(self, weights: Sequence[_Weight]) -> _Weight:
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
