"""Nemotron-H, and Nemotron 3: each of the checkpoint's blocks is Mamba-2, attention, an MLP or experts, without gates.

A layer here is a block of Mamba-2 or attention, and the MLP or experts that follow it, if any do. Nothing is rotated.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from twostroke.model.architectures.families.family import (
    ConfigFields,
    Defaults,
    Family,
    decoder_spec,
    read_decoder,
    with_experts,
)
from twostroke.model.architectures.families.glm import experts_by_groups
from twostroke.model.architectures.families.granite import ATTENDS, check_sizes, mamba_spec
from twostroke.model.config import DecoderSpec, MlpSpec, ModelConfig, Projection
from twostroke.model.state_sizes import MambaSizes
from twostroke.protocol.kv_layout import STATE_WINDOW

_OF_LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def read_nemotron_h_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    field, blocks = _read_blocks(fields)
    numbers = _number_layers(fields, field, blocks)
    attends = [ATTENDS[blocks[mixer]] for mixer, _ in numbers]
    if not any(attends):
        raise fields.error(field, "a model without any layer that attends is not supported")
    for name, known in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if (said := fields.text(name, default=known)) != known:
            raise fields.error(name, f"{said!r} is not supported, only {known!r} is")
    if fields.boolean("attention_bias", default=False):
        raise fields.error("attention_bias", "biases of attention are not supported for this family")
    fields = fields.over({"num_hidden_layers": len(blocks), "num_key_value_heads": 8})
    config = read_decoder(fields, _spec(fields), Defaults(head_dim=128, max_position=4096))
    if config.num_layers != len(blocks):
        raise fields.error("num_hidden_layers", f"{config.num_layers}, but {field} has {len(blocks)} blocks")
    config = replace(
        config,
        num_layers=len(numbers),
        numbers=tuple(numbers),
        unrotated_layers=frozenset(range(len(numbers))),
        activation="relu2",
        rms_norm_eps=fields.number("layer_norm_epsilon", default=1e-5),  # whatever `rms_norm_eps` says
    )
    if not all(attends):
        windows = tuple(0 if one else STATE_WINDOW for one in attends)
        config = replace(config, windows=windows, state=_read_sizes(fields, config.num_kv_heads))
    followed_by = [None if number is None else blocks[number] for _, number in numbers]
    if "moe" in followed_by:
        return _with_experts(fields, config, followed_by)
    for name in ("norm_topk_prob", "routed_scaling_factor"):
        fields.is_set(name)  # whatever they say: there is nothing to route
    return config


def _read_blocks(fields: ConfigFields) -> tuple[str, list[str]]:
    """Return the blocks' kinds, and the field that has them: files as published have a letter for each."""
    field = next((name for name in ("layers_block_type", "layer_types") if fields.is_set(name)), None)
    letters = fields.text("hybrid_override_pattern", default="")
    if field is None:
        field, kinds = "hybrid_override_pattern", [_OF_LETTERS.get(letter, letter) for letter in letters]
    else:
        kinds = fields.texts(field)
    known = (*ATTENDS, "mlp", "moe")
    if not kinds or any(kind not in known for kind in kinds):
        raise fields.error(field, f"expected one of {', '.join(known)} for each block")
    return field, kinds


def _number_layers(fields: ConfigFields, field: str, blocks: Sequence[str]) -> list[tuple[int, int | None]]:
    """Return ModelConfig.numbers."""
    numbers: list[tuple[int, int | None]] = []
    for block, kind in enumerate(blocks):
        if kind in ATTENDS:
            numbers.append((block, None))
        elif numbers and numbers[-1][1] is None:
            numbers[-1] = numbers[-1][0], block
        else:
            raise fields.error(field, f"block {block}, {kind}, has neither mamba nor attention just before it")
    return numbers


def _spec(fields: ConfigFields) -> DecoderSpec:
    bias, conv_bias = fields.boolean("mlp_bias", default=False), fields.boolean("use_conv_bias", default=True)
    # transformers bounds steps by this alone, whatever `time_step_limit` says.
    limits = fields.number("time_step_min", default=0.001), math.inf
    eps = fields.number("layer_norm_epsilon", default=1e-5)
    q, k, v, output = (Projection(f"mixer.{name}_proj") for name in "qkvo")
    spec = decoder_spec("Nemotron-H")
    layer = replace(
        spec.layer,
        input_norm="norm",
        q=q,
        k=k,
        v=v,
        output=output,
        mlp_norm="norm",
        gate=None,
        up=Projection("mixer.up_proj", bias),
        down=Projection("mixer.down_proj", bias),
        state=mamba_spec("mixer", eps, limits, conv_bias, fields.boolean("use_bias", default=False)),
    )
    return replace(
        spec,
        embedding="backbone.embeddings",
        layers="backbone.layers",
        layer=layer,
        final_norm="backbone.norm_f",
        ignored=("mtp.",),
    )


def _read_sizes(fields: ConfigFields, kv_heads: int) -> MambaSizes:
    sizes = MambaSizes(
        heads=fields.integer("mamba_num_heads", default=128),
        head=fields.integer("mamba_head_dim", default=64),
        state=fields.integer("ssm_state_size", default=128),
        groups=fields.integer("n_groups", default=8),
        taps=fields.integer("conv_kernel", default=4),
    )
    return check_sizes(fields, sizes, kv_heads, heads="mamba_num_heads", groups="n_groups")


def _with_experts(fields: ConfigFields, config: ModelConfig, followed_by: Sequence[str | None]) -> ModelConfig:
    if fields.is_set("moe_latent_size"):
        raise fields.error("moe_latent_size", "experts in a smaller space are not supported")
    size = fields.integer("moe_intermediate_size", default=7688)
    experts = experts_by_groups(fields, size, experts=8, top_k=2, groups=1, normalises=True)
    bias, shared_size = (
        config.spec.layer.up.has_bias,
        fields.integer("moe_shared_expert_intermediate_size", default=7688),
    )
    up, down = (Projection(f"mixer.shared_experts.{part}_proj", bias) for part in ("up", "down"))
    experts = replace(
        experts,
        router=Projection("mixer.gate"),
        gate=None,
        up=Projection("mixer.experts.*.up_proj"),
        down=Projection("mixer.experts.*.down_proj"),
        correction="mixer.gate.e_score_correction_bias",
        shared=MlpSpec(None, up, down, shared_size),
    )
    return with_experts(config, experts, [layer for layer, kind in enumerate(followed_by) if kind == "mlp"])


NEMOTRON_H = Family("NemotronHForCausalLM", model_type="nemotron_h", read_config=read_nemotron_h_config)
