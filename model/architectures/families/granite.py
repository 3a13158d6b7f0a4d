"""Granite 4 and Bamba: most layers are of Mamba-2, some attend. Granite's MLP may stand beside experts, and its smaller
models have layers that attend alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from twostroke.model.architectures.families.family import (
    MAX_CHANNELS,
    MAX_EXPERTS,
    ConfigFields,
    Defaults,
    Family,
    decoder_spec,
    read_decoder,
    read_routing,
    with_experts,
)
from twostroke.model.architectures.families.llama import with_multipliers
from twostroke.model.config import ExpertsSpec, MambaSpec, MlpSpec, ModelConfig, Projection
from twostroke.model.state_sizes import MambaSizes
from twostroke.protocol.kv_layout import STATE_WINDOW

ATTENDS: Mapping[str, bool] = {"full_attention": True, "attention": True, "linear_attention": False, "mamba": False}
"""Kinds of layers, as transformers 5 calls them and as others do."""


def mamba_spec(module: str, norm_eps: float, limits: tuple[float, float], conv_bias: bool, bias: bool) -> MambaSpec:
    """Return the parts of Mamba-2 within a module of a layer."""
    return MambaSpec(
        inputs=Projection(f"{module}.in_proj", bias),
        conv=f"{module}.conv1d.weight",
        conv_bias=f"{module}.conv1d.bias" if conv_bias else None,
        decay_log=f"{module}.A_log",
        skip=f"{module}.D",
        step_bias=f"{module}.dt_bias",
        norm=f"{module}.norm",
        output=Projection(f"{module}.out_proj", bias),
        norm_eps=norm_eps,
        step_limits=limits,
    )


def check_sizes(fields: ConfigFields, sizes: MambaSizes, kv_heads: int, *, heads: str, groups: str) -> MambaSizes:
    """Return the sizes, whose heads KV heads have to share, and whose fields are named. Raises ConfigError."""
    if sizes.heads % kv_heads:
        raise fields.error(heads, f"{sizes.heads} is no multiple of num_key_value_heads, which is {kv_heads}")
    if sizes.heads % sizes.groups:
        raise fields.error(groups, f"{sizes.groups} does not divide {heads}, which is {sizes.heads}")
    if sizes.groups % kv_heads and kv_heads % sizes.groups:
        raise fields.error(groups, f"{sizes.groups} and num_key_value_heads, {kv_heads}: one must divide the other")
    if sizes.head % 2 or sizes.taps < 2 or sizes.conv_width > MAX_CHANNELS:
        raise fields.error(
            heads, f"{sizes.heads} heads of {sizes.head} numbers and {sizes.taps} taps are not supported"
        )
    return sizes


def with_mamba(fields: ConfigFields, config: ModelConfig, kinds: list[str], field: str) -> ModelConfig:
    """Return the config with Mamba-2 in the layers that do not attend, by the kinds in a field. Raises ConfigError."""
    if len(kinds) != config.num_layers or any(kind not in ATTENDS for kind in kinds):
        raise fields.error(field, f"expected {config.num_layers} times one of {', '.join(ATTENDS)}")
    attends = [ATTENDS[kind] for kind in kinds]
    if not any(attends):
        raise fields.error(field, "a model without any layer that attends is not supported")
    proj_bias = fields.boolean("mamba_proj_bias", default=False)
    conv_bias, limits = fields.boolean("mamba_conv_bias", default=True), fields.limits("time_step_limit")
    spec = mamba_spec("mamba", config.rms_norm_eps, limits, conv_bias, proj_bias)
    sizes = _read_sizes(fields, config)
    if all(attends):
        return config
    if config.activation != "silu":  # which the convolution takes, too
        raise fields.error(
            "hidden_act", f"{fields.value('hidden_act')!r} is not supported with Mamba-2, only 'silu' is"
        )
    layer = replace(config.spec.layer, state=spec)
    windows = tuple(0 if one else STATE_WINDOW for one in attends)
    return replace(config, spec=replace(config.spec, layer=layer), windows=windows, state=sizes)


def _read_sizes(fields: ConfigFields, config: ModelConfig) -> MambaSizes:
    width = fields.integer("mamba_expand", default=2) * config.hidden_size
    heads = fields.integer("mamba_n_heads", default=128)
    each = max(1, width // heads)
    if fields.is_set("mamba_d_head") and fields.value("mamba_d_head") != "auto":
        each = fields.integer("mamba_d_head")
    if heads * each != width:
        raise fields.error("mamba_n_heads", f"{heads} heads of {each} are not mamba_expand times hidden_size: {width}")
    sizes = MambaSizes(
        heads=heads,
        head=each,
        state=fields.integer("mamba_d_state", default=256),
        groups=fields.integer("mamba_n_groups", default=1),
        taps=fields.integer("mamba_d_conv", default=4),
    )
    return check_sizes(fields, sizes, config.num_kv_heads, heads="mamba_n_heads", groups="mamba_n_groups")


def read_granite_hybrid_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    bias, shared = fields.boolean("attention_bias", default=False), _shared_mlp(fields)
    spec = decoder_spec("Granite 4", qkv_bias=bias, output_bias=bias)
    layer = replace(spec.layer, gate=shared.gate, up=shared.up, down=shared.down)
    config = read_decoder(fields, replace(spec, layer=layer), Defaults())
    kinds = fields.texts("layer_types", ["linear_attention"] * config.num_layers)
    config = with_multipliers(fields, with_mamba(fields, config, kinds, "layer_types"))
    size = config.intermediate_size
    config = replace(config, intermediate_size=shared.size, unrotated_layers=_unrotated(fields, config.num_layers))
    if not fields.count("num_local_experts", default=8, most=MAX_EXPERTS):
        fields.is_set("num_experts_per_tok")
        return config
    routing = read_routing(fields, "num_local_experts", experts=8, top_k=2, normalises=True)
    router = Projection("block_sparse_moe.router.layer")
    gate, down = (Projection(f"block_sparse_moe.{name}_linear.weight") for name in ("input", "output"))
    experts = ExpertsSpec(routing, size, router, gate, replace(gate, first_row=size), down, shared=shared)
    return with_experts(config, replace(experts, are_stacked=True, stacks_rows=True))


def _shared_mlp(fields: ConfigFields) -> MlpSpec:
    size, gate = fields.integer("shared_intermediate_size", default=1024), Projection("shared_mlp.input_linear")
    return MlpSpec(gate, replace(gate, first_row=size), Projection("shared_mlp.output_linear"), size)


def _unrotated(fields: ConfigFields, num_layers: int) -> frozenset[int]:
    kind = fields.text("position_embedding_type", default="nope")
    if kind not in ("rope", "nope"):
        raise fields.error("position_embedding_type", f"{kind!r} is not supported, only 'rope' and 'nope' are")
    return frozenset(range(num_layers) if kind == "nope" else ())


def read_bamba_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    bias, mlp_bias = fields.boolean("attention_bias", default=False), fields.boolean("mlp_bias", default=False)
    spec = decoder_spec("Bamba", qkv_bias=bias, output_bias=bias)
    gate, up, down = (Projection(f"feed_forward.{part}_proj", mlp_bias) for part in ("gate", "up", "down"))
    layer = replace(spec.layer, mlp_norm="pre_ff_layernorm", gate=gate, up=up, down=down)
    spec = replace(spec, layer=layer, final_norm="model.final_layernorm")
    defaults = Defaults(rms_norm_eps=1e-5, max_position=262_144, rotated_part=0.5)
    config = read_decoder(fields.over({"num_key_value_heads": 8}), spec, defaults)
    attending = fields.counts("attn_layer_indices")
    kinds = ["attention" if layer in attending else "mamba" for layer in range(config.num_layers)]
    return with_mamba(fields, config, kinds, "attn_layer_indices")


GRANITE_HYBRID = Family(
    "GraniteMoeHybridForCausalLM", model_type="granitemoehybrid", read_config=read_granite_hybrid_config
)
BAMBA = Family("BambaForCausalLM", model_type="bamba", read_config=read_bamba_config)
