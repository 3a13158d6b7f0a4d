"""A decoder's weights on one rank: modules of parameters.py, cut, fused, packed and quantised as they are loaded."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from twostroke.model.architectures.context_index import ContextIndex, IndexWeights
from twostroke.model.architectures.decoder import (
    DecoderWeights,
    EmbeddingGate,
    EndWeights,
    LayerEmbedding,
    LayerNorms,
    LayerWeights,
    Mixer,
    MLAWeights,
    MlpWeights,
    MtpWeights,
    NormsBeside,
    RoutedWeights,
)
from twostroke.model.architectures.delta_net import DeltaNet, DeltaWeights
from twostroke.model.architectures.mamba import Mamba, MambaWeights
from twostroke.model.architectures.rope import cos_sin_table, query_scale_table
from twostroke.model.architectures.states import ConvolutionWeights, ShortConvolution, StateMixer
from twostroke.model.backend import (
    AS_THEY_ARE,
    AttentionForm,
    Backend,
    ExpertWeights,
    GroupNorm,
    HeadNorms,
    KVScales,
    LayerNorm,
    Linear,
    LoadOptions,
    MLAHeads,
    RowNorms,
)
from twostroke.model.checkpoint.quantization import QuantizedWeight, one_below_the_other
from twostroke.model.checkpoint.tensor_file import WHOLE
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.config import KVHeads, MambaSpec, MLASpec, ModelConfig, Quantization
from twostroke.model.costs.sizes import head_quantization
from twostroke.model.parallel.experts import make_places
from twostroke.model.parallel.form import ONLY_STAGE, WHOLE_MODEL, Shard, Stage
from twostroke.model.parallel.tensor_parallel import ContextParts
from twostroke.model.parameters import Module, Part, end_modules, expert_name, layer_modules, mtp_modules
from twostroke.model.state_sizes import ConvolutionSizes, DeltaSizes, MambaSizes

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

    `context_parts` as to Backend.make_mla.
    """
    layers = stage.layers(config.num_layers)
    rotated = {index: (config.rope_of(index), config.rotary_dim(index)) for index in layers}
    device = options.device
    tables = {one: cos_sin_table(*one, options.max_context).to(device) for one in {*rotated.values()}}
    scales = query_scale_table(config.query_scale, options.max_context)
    query_scales = None if scales is None else scales.to(device)
    loader = _ModuleLoader(checkpoint, config, options, backend, shard)
    loaded = tuple(
        _LayerLoader(loader, index, tables[rotated[index]], query_scales, context_parts).load() for index in layers
    )
    ends = _ends(loader, config) if stage.is_first else None
    if not config.has_mtp or config.spec.mtp is None:
        return DecoderWeights(options.dtype, loaded, ends)
    return DecoderWeights(options.dtype, loaded[:-1], ends, _mtp(loader, config, loaded[-1]))


class _ModuleLoader:
    """Makes modules as one rank holds them: on its device, in its dtype."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions, backend: Backend, shard: Shard
    ):
        self.checkpoint = checkpoint
        self.config = config
        self.options = options
        self.backend = backend
        self.shard = shard

    def weight(self, module: Module) -> Weight:
        """Return this rank's rows of a module: in the checkpoint's form, or dequantised where the setting asks for
        another form or the parts' forms differ."""
        return self._together(self._weights(module.parts))

    def _weights(self, parts: Iterable[Part], expert: int = 0) -> list[Weight]:
        """Return this rank's rows of parts, of experts those of one, which read nothing of the others."""
        found: list[Weight] = []
        # Neighbours that choose among the same rows read them once.
        for (tensor, rows, columns), chosen in groupby(parts, key=lambda part: (part.tensor, part.rows, part.columns)):
            same = list(chosen)
            cut, inputs = rows.on(self.shard), WHOLE if columns is None else columns.on(self.shard)
            order = None
            if len(same) > 1 or same[0].order is not None:
                order = torch.cat([_places(part, cut.stop - cut.start) for part in same])
            if same[0].is_stacked:
                stack = self.checkpoint.weight(tensor, slice(expert, expert + 1))
                if isinstance(stack, Tensor):
                    weight: Weight = (stack[0] if same[0].layout == "stack" else stack[0].T)[cut, inputs]
                else:
                    weight = stack.rows(cut).columns(inputs)
            else:
                weight = self.checkpoint.weight(expert_name(tensor, expert), cut, inputs)
            if order is not None:
                weight = weight[order] if isinstance(weight, Tensor) else weight.rows(order)
            found.append(weight)
        return found

    def _together(self, weights: Sequence[Weight], is_of_experts: bool = False) -> Weight:
        """Return weights one below the other, quantised where the setting and their forms allow it."""
        dtype, device = self.options.dtype, self.options.device
        quantized = [found for found in weights if isinstance(found, QuantizedWeight)]
        if len(quantized) == len(weights) and self.options.quantization == "auto":
            together = one_below_the_other(quantized)
            if together is not None and not (is_of_experts and together.order is not None):  # no kernel knows theirs
                return together.to(device)
        plain = [self.plain(found).to(device=device, dtype=dtype) for found in weights]
        return plain[0].contiguous() if len(plain) == 1 else torch.cat(plain)

    def plain(self, weight: Weight) -> Tensor:
        """Return a weight without quantisation."""
        return weight if isinstance(weight, Tensor) else weight.dequantized(self.options.dtype)

    def kept(self, tensor: str, rows: slice = WHOLE, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a tensor that is used as it is: one view would keep the whole file mapped."""
        found = self.checkpoint.tensor(tensor, rows)
        return found.to(device=self.options.device, dtype=dtype or self.options.dtype, copy=True)

    def vector(self, module: Module) -> Tensor:
        """Return a norm's weight, or another vector or convolution, in fp32."""
        parts = []
        for part in module.parts:
            rows = self.kept(part.tensor, part.rows.on(self.shard), torch.float32)
            parts.append(rows if part.order is None else rows[_places(part, len(rows))])
        found = torch.cat(parts) if len(parts) > 1 else parts[0]
        return found.add_(1) if module.kind == "norm" and self.config.spec.norms_add_one else found

    def table(self, module: Module) -> Tensor | Linear:
        """Return an embedding, quantised where the checkpoint's is."""
        (part,) = module.parts
        rows = part.rows.on(self.shard)
        found = self.checkpoint.weight(part.tensor, rows)
        if isinstance(found, Tensor):
            return self.kept(part.tensor, rows)
        held = found.to(self.options.device)
        return self._made(held, None, "auto") if self.options.quantization == "auto" else self.plain(held)

    def linear(self, module: Module) -> Linear:
        """Return a projection. Of one that is cut by columns the bias counts once among the ranks."""
        weight, quantization = self.weight(module), self.options.quantization
        if module.kind == "exact":
            weight, quantization = self.plain(weight), "none"
        elif module.kind == "head":
            quantization = head_quantization(quantization)
        biases = []
        for part in module.parts:
            is_summand = part.columns is not None and part.columns.cut != "whole"
            if part.bias is not None and not (is_summand and self.shard.rank):
                rows = self.kept(part.bias, part.rows.on(self.shard))
                biases.append(rows if part.order is None else rows[_places(part, len(rows))])
        return self._made(weight, torch.cat(biases) if biases else None, quantization)

    def _made(self, weight: Weight, bias: Tensor | None, quantization: Quantization) -> Linear:
        return self.backend.make_linear(weight, bias, quantization, self.options.dtype)

    def experts(self, module: Module) -> ExpertWeights:
        """Return this rank's part of a layer's experts, stacked; where their forms differ, in the dtype of
        activations."""
        shard, total, spare = self.shard, module.experts, self.options.spare_experts
        held, (*ups, down) = shard.experts(total), module.parts
        # Slots for copies are unused at first, and have the form of the other experts.
        slots, places = [*range(held.start, held.stop), *[held.start] * spare], None
        if spare:
            places = make_places(shard, total, spare, self.options.device)
        gate_up_bias = down_bias = None
        if ups[0].bias is not None:
            gate_up_bias = self.kept(ups[0].bias)[slots][:, torch.cat([_rows(part, shard) for part in ups])]
        if down.bias is not None and (shard.has_whole_experts or shard.rank == 0):  # counts once
            down_bias = self.kept(down.bias)[slots]
        return ExpertWeights(
            len(slots),
            self._together([weight for slot in slots for weight in self._weights(ups, slot)], is_of_experts=True),
            self._together([weight for slot in slots for weight in self._weights([down], slot)], is_of_experts=True),
            gate_up_bias,
            down_bias,
            held.start,
            total,
            places,
        )


class _Modules:
    """Modules of one place, by their roles, made as they are asked for."""

    def __init__(self, loader: _ModuleLoader, modules: Iterable[Module]):
        self._loader = loader
        self._modules: Mapping[str, Module] = {module.role: module for module in modules}

    def __contains__(self, role: str) -> bool:
        return role in self._modules

    def __getitem__(self, role: str) -> Module:
        return self._modules[role]

    def linear(self, role: str) -> Linear:
        return self._loader.linear(self._modules[role])

    def linear_or_none(self, role: str) -> Linear | None:
        return self.linear(role) if role in self else None

    def vector(self, role: str) -> Tensor:
        return self._loader.vector(self._modules[role])

    def vector_or_none(self, role: str) -> Tensor | None:
        return self.vector(role) if role in self else None

    def vectors(self, group: str) -> dict[str, Tensor]:
        """Return all vectors whose roles begin with a group's name, by what follows."""
        return {role.removeprefix(group): self.vector(role) for role in self._modules if role.startswith(group)}


class _LayerLoader:
    """Builds one layer from its modules."""

    def __init__(
        self,
        loader: _ModuleLoader,
        index: int,
        cos_sin: Tensor,
        query_scales: Tensor | None,
        context_parts: ContextParts | None,
    ):
        self._loader = loader
        self._config = loader.config
        self._options = loader.options
        self._index = index
        self._cos_sin = cos_sin
        self._query_scales = query_scales
        self._context_parts = context_parts
        self._modules = _Modules(loader, layer_modules(loader.config, index))

    def load(self) -> LayerWeights:
        config, modules, index = self._config, self._modules, self._index
        keeps_state, gate = config.keeps_state(index), "embedding_gate."
        return LayerWeights(
            norms=LayerNorms(**modules.vectors("norms.")),
            qkv=self._mixer(),
            output=modules.linear("output"),
            mlp=self._mlp() if "mlp.down" in modules else None,
            routed=self._routed() if "experts" in modules else None,
            cos_sin=self._cos_sin,
            head_norms=None if keeps_state else self._head_norms(),
            row_norms=self._row_norms() if "q_row_norm" in modules else None,
            attention=self._attention_form(),
            output_gate=modules.linear_or_none("output_gate"),
            query_scales=self._query_scales if index in config.scaled_layers else None,
            kv_heads=self._kv_heads() if config.layer_heads else None,
            embedding_gate=self._embedding_gate() if f"{gate}gate" in modules else None,
            output_scale=self._output_scale() if "output_scale" in modules else 1.0,
        )

    def _mixer(self) -> Mixer:
        """Return what mixes the layer's tokens."""
        spec = self._config.spec.layer
        if self._config.keeps_state(self._index):
            return self._state_mixer()
        return self._modules.linear("qkv") if spec.latent is None else self._latents(spec.latent)

    def _kv_heads(self) -> KVHeads:
        heads = self._config.heads(self._index)
        found = self._loader.shard.kv_heads(heads.number)
        return KVHeads(found.stop - found.start, heads.dim)

    def _embedding_gate(self) -> EmbeddingGate:
        modules = self._modules
        gate, output = modules.linear("embedding_gate.gate"), modules.linear("embedding_gate.output")
        return EmbeddingGate(gate, output, modules.vector("embedding_gate.norm"))

    def _output_scale(self) -> float:
        return float(self._modules.vector("output_scale").to(self._options.dtype).item())

    def _mlp(self) -> MlpWeights:
        return MlpWeights(self._modules.linear("mlp.gate_up"), self._modules.linear("mlp.down"))

    def _attention_form(self) -> AttentionForm:
        config, index, scales = self._config, self._index, AS_THEY_ARE
        if self._options.kv_dtype == torch.float8_e4m3fn:
            scales = KVScales(*self._loader.checkpoint.kv_scales(index))
        scale, sinks = config.attention_scale or config.heads(index).dim ** -0.5, self._modules.vector_or_none("sinks")
        return AttentionForm(scale, config.window(index), config.soft_cap, sinks, scales)

    def _head_norms(self) -> HeadNorms | None:
        config, parts, modules = self._config, self._config.spec.layer, self._modules
        ones = torch.ones(config.heads(self._index).dim, device=self._options.device)
        if parts.normalises_rotated and config.rope_of(self._index) is not None:  # rotation changes no head's norm
            return HeadNorms(ones, ones, config.rms_norm_eps)
        if "q_norm" not in modules:
            return None
        # A layer without keys of its own normalises none.
        q, k = modules.vector("q_norm"), modules.vector("k_norm" if "k_norm" in modules else "q_norm")
        return HeadNorms(q, k, config.rms_norm_eps, ones if parts.normalises_values else None)

    def _row_norms(self) -> RowNorms:
        q, k = self._modules.vector("q_row_norm"), self._modules.vector("k_row_norm")
        return RowNorms(q, k, self._loader.shard.size, self._config.rms_norm_eps)

    def _latents(self, latent: MLASpec) -> MLAWeights:
        modules, config, sizes = self._modules, self._config, self._config.latent
        if sizes is None:
            raise TypeError(f"{latent} has no sizes")
        up = self._loader.plain(self._loader.weight(modules["latent.up"]))
        both = up.view(-1, sizes.key + sizes.value, sizes.rank)
        keys, values = both[:, : sizes.key], both[:, sizes.key :].transpose(1, 2)
        heads = MLAHeads(keys, values, config.attention_scale)
        return MLAWeights(
            down=modules.linear("latent.down"),
            norm=modules.vector("latent.norm"),
            query_down=modules.linear_or_none("latent.query_down"),
            query_norm=modules.vector_or_none("latent.query_norm"),
            query=modules.linear("latent.query"),
            eps=latent.norm_eps,
            attention=self._loader.backend.make_mla(heads, self._context_parts),
            index=self._context_index(latent.norm_eps) if "index.key" in modules else None,
        )

    def _context_index(self, eps: float) -> ContextIndex:
        modules, sizes = self._modules, self._config.index
        if sizes is None:
            raise TypeError("an index has no sizes")
        weights = IndexWeights(
            query=modules.linear("index.query"),
            key=modules.linear("index.key"),
            key_norm=LayerNorm(modules.vector("index.norm_weight"), modules.vector("index.norm_bias"), eps),
            weights=modules.linear("index.weights"),
            sizes=sizes,
        )
        return ContextIndex(weights)

    def _state_mixer(self) -> StateMixer[Any]:
        """Return a layer that keeps a state."""
        shard, spec, whole = self._loader.shard, self._config.spec.layer.state, self._config.state
        modules, kernels = self._modules, self._loader.backend.state_kernels
        inputs, conv = modules.linear("state.inputs"), modules.vector("state.conv")[:, 0]
        conv_bias = modules.vector_or_none("state.conv_bias")
        match whole:
            case DeltaSizes():
                return DeltaNet(
                    DeltaWeights(
                        inputs=inputs,
                        strengths=modules.linear("state.strengths"),
                        conv=conv,
                        decay=modules.vector("state.decay").exp(),
                        decay_bias=modules.vector("state.decay_bias"),
                        norm=modules.vector("state.norm"),
                        eps=self._config.rms_norm_eps,
                        sizes=whole.of_rank(shard.size),
                    ),
                    kernels,
                )
            case MambaSizes():
                if not isinstance(spec, MambaSpec):
                    raise TypeError(f"{spec} has no {whole}")
                first, size = shard.rank * whole.groups // shard.size, whole.output_width // whole.groups
                shared = (whole.groups, first) if whole.groups < shard.size else (0, 0)
                return Mamba(
                    MambaWeights(
                        inputs=inputs,
                        time_steps=modules.linear("state.time_steps"),
                        conv=conv,
                        conv_bias=conv_bias,
                        decay=modules.vector("state.decay").exp(),
                        skip=modules.vector("state.skip"),
                        step_bias=modules.vector("state.step_bias"),
                        step_limits=spec.step_limits,
                        norm=GroupNorm(modules.vector("state.norm"), size, spec.norm_eps, *shared),
                        sizes=whole.of_rank(shard.size),
                    ),
                    kernels,
                )
            case ConvolutionSizes():
                return ShortConvolution(ConvolutionWeights(inputs, conv, conv_bias, whole.of_rank(shard.size)), kernels)
            case _:
                raise TypeError(f"{spec} has no {whole}")

    def _routed(self) -> RoutedWeights:
        spec, modules, options = self._config.experts_of(self._index), self._modules, self._options
        if spec is None:
            raise TypeError("a layer with experts has no spec of them")
        weights = self._loader.experts(modules["experts"])
        return RoutedWeights(
            router=modules.linear("experts.router"),
            correction=modules.vector_or_none("experts.correction"),
            routing=spec.routing,
            experts=self._loader.backend.make_experts(
                weights, self._config.activation, options.quantization, options.dtype
            ),
            scales_input=spec.scales_input,
            shared_gate=modules.linear_or_none("experts.shared_gate"),
            scales=modules.vector_or_none("experts.scales"),
            norms=None if spec.norms is None else self._norms_beside(),
        )

    def _norms_beside(self) -> NormsBeside:
        found = self._modules.vectors("experts.norms.")
        found["router"] *= self._config.hidden_size**-0.5
        return NormsBeside(**found)


def _ends(loader: _ModuleLoader, config: ModelConfig) -> EndWeights:
    """Return the embedding, the final norm and the LM head, the tables for this rank's part of the vocabulary."""
    modules = _Modules(loader, end_modules(config))

    def rounded(scale: float) -> float:
        return torch.tensor(scale).to(loader.options.dtype).item() if config.rounds_embedding_scale else scale

    lm_head = modules.linear("lm_head")
    layer_embedding = None
    if (spec := config.spec.layer_embedding) is not None:
        layer_embedding = LayerEmbedding(
            table=loader.table(modules["layer_embedding.table"]),
            scale=rounded(math.sqrt(spec.size)),
            projection=modules.linear("layer_embedding.projection"),
            norm=modules.vector("layer_embedding.norm"),
            size=spec.size,
        )
    return EndWeights(
        embedding=loader.table(modules["embedding"]) if "embedding" in modules else lm_head,
        embedding_scale=rounded(config.embedding_scale),
        first_token=loader.shard.vocabulary(config.vocab_size).start,
        final_norm=modules.vector("final_norm") * config.logits_scale,
        lm_head=lm_head,
        layer_embedding=layer_embedding,
    )


def _mtp(loader: _ModuleLoader, config: ModelConfig, layer: LayerWeights) -> MtpWeights:
    modules = _Modules(loader, mtp_modules(config))
    return MtpWeights(
        embedding_norm=modules.vector("mtp.embedding_norm"),
        hidden_norm=modules.vector("mtp.hidden_norm"),
        of_embedding=modules.linear("mtp.of_embedding"),
        of_hidden=modules.linear("mtp.of_hidden"),
        layer=layer,
        final_norm=modules.vector("mtp.final_norm"),
    )


def _places(part: Part, rows: int) -> Tensor:
    """Return the places of a module's rows among `rows` of a tensor, in the module's order."""
    places = torch.arange(rows)
    return places if part.order is None else places.view(-1, part.head)[:, list(part.order)].reshape(-1)


def _rows(part: Part, shard: Shard) -> Tensor:
    """Return the rows of a tensor that a module has on one rank, in the module's order."""
    rows = part.rows.on(shard)
    return _places(part, rows.stop - rows.start).add_(rows.start)
