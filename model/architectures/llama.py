"""Llama: pre-norm layers of grouped-query attention and a gated MLP with SiLU (Touvron et al. 2023)."""

from twostroke.model.architectures.family import ConfigFields, Family, read_decoder
from twostroke.model.config import DecoderSpec, LayerSpec, ModelConfig, Projection


def read_config(fields: ConfigFields) -> ModelConfig:
    """Raises ConfigError."""
    activation = fields.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", f"{activation!r} is not supported, only 'silu' is")
    attention_bias = fields.boolean("attention_bias", default=False)
    mlp_bias = fields.boolean("mlp_bias", default=False)
    return read_decoder(fields, decoder_spec(attention_bias=attention_bias, mlp_bias=mlp_bias))


def decoder_spec(*, attention_bias: bool = False, mlp_bias: bool = False) -> DecoderSpec:
    """With biases on all projections of the attention, or of the MLP, or on none."""
    layer = LayerSpec(
        input_norm="input_layernorm",
        q=Projection("self_attn.q_proj", attention_bias),
        k=Projection("self_attn.k_proj", attention_bias),
        v=Projection("self_attn.v_proj", attention_bias),
        output=Projection("self_attn.o_proj", attention_bias),
        mlp_norm="post_attention_layernorm",
        gate=Projection("mlp.gate_proj", mlp_bias),
        up=Projection("mlp.up_proj", mlp_bias),
        down=Projection("mlp.down_proj", mlp_bias),
    )
    return DecoderSpec("Llama", "model.embed_tokens", "model.layers", layer, "model.norm", "lm_head")


LLAMA = Family("LlamaForCausalLM", model_type="llama", read_config=read_config)
