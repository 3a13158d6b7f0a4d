"""A decoder's weights on one rank: cut, fused, packed and quantised as they are loaded, one projection at a time."""

import torch
from torch import Tensor

from twostroke.model.architectures.decoder import DecoderWeights, LayerWeights
from twostroke.model.architectures.rope import cos_sin_table, head_order
from twostroke.model.backend import AttentionForm, Backend, HeadNorms, Linear, RowNorms
from twostroke.model.checkpoint.quantization import of_lm_head, tensor_bytes
from twostroke.model.checkpoint.weights import WHOLE, Checkpoint, expected_shapes
from twostroke.model.config import ModelConfig, Projection, Quantization
from twostroke.model.parallel.tensor_parallel import WHOLE_MODEL, Shard


def load_decoder_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int,
    backend: Backend,
    quantization: Quantization = "none",
    shard: Shard = WHOLE_MODEL,
) -> DecoderWeights:
    """Those of one rank, of which it reads its slices alone. Raises ConfigError."""

    def tensor(name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        return checkpoint.tensor(name, rows, columns).to(device=device, dtype=dtype).contiguous()

    def kept(name: str, rows: slice = WHOLE) -> Tensor:
        """A tensor that is used as it is: copied, or one view would keep the whole file mapped."""
        return checkpoint.tensor(name, rows).to(device=device, dtype=dtype, copy=True)

    def rows_of(prefix: str, part: Projection, kind: str, rows: slice) -> Tensor:
        """This rank's, those of queries and keys in the order that kernels turn."""
        within = slice(part.first_row + rows.start, part.first_row + rows.stop)
        found = tensor(f"{prefix}{part.name}.{kind}", within)
        return in_order(found) if part in (parts.q, parts.k) else found

    def in_order(rows: Tensor) -> Tensor:
        return rows if order is None else rows.view(-1, config.head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)

    def by_rows(prefix: str, parts: dict[Projection, slice]) -> Linear:
        """One projection that computes all of these, each for its rows: all have a bias, or none."""
        weights = [rows_of(prefix, part, "weight", rows) for part, rows in parts.items()]
        biases = [rows_of(prefix, part, "bias", rows) for part, rows in parts.items() if part.has_bias]
        return backend.make_linear(torch.cat(weights), torch.cat(biases) if biases else None, quantization)

    def norm(name: str, rows: slice = WHOLE) -> Tensor:
        weight = checkpoint.tensor(f"{name}.weight", rows).to(device=device, dtype=torch.float32, copy=True)
        return weight.add_(1) if spec.norms_add_one else weight

    def norm_if_any(prefix: str, name: str | None) -> Tensor | None:
        return None if name is None else norm(f"{prefix}{name}")

    def by_columns(prefix: str, projection: Projection, columns: slice) -> Linear:
        """This rank's summand; the bias counts once among them."""
        name = f"{prefix}{projection.name}"
        bias = tensor(f"{name}.bias") if projection.has_bias and shard.rank == 0 else None
        return backend.make_linear(tensor(f"{name}.weight", columns=columns), bias, quantization)

    query_rows, kv_rows = (
        slice(heads.start * config.head_dim, heads.stop * config.head_dim)
        for heads in (shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads))
    )
    inner, vocabulary = shard.part(config.intermediate_size), shard.vocabulary(config.vocab_size)
    spec, parts = config.spec, config.spec.layer
    order = head_order(config.rope, config.head_dim)
    tables = {
        rope: cos_sin_table(rope, config.head_dim, max_context).to(device)
        for rope in {config.rope_of(index) for index in range(config.num_layers)}
    }

    def head_norms(prefix: str) -> HeadNorms | None:
        if parts.q_norm is None:
            return None
        q, k = (in_order(norm(f"{prefix}{name}")) for name in (parts.q_norm, parts.k_norm))
        return HeadNorms(q, k, config.rms_norm_eps)

    def row_norms(prefix: str) -> RowNorms | None:
        if parts.q_row_norm is None or parts.k_row_norm is None:
            return None
        named = ((parts.q_row_norm, query_rows), (parts.k_row_norm, kv_rows))
        q, k = (in_order(norm(f"{prefix}{name}", rows)) for name, rows in named)
        return RowNorms(q, k, shard.size, config.rms_norm_eps)

    scale = config.attention_scale or config.head_dim**-0.5

    def layer(index: int) -> LayerWeights:
        prefix = f"{spec.layers}.{index}."
        return LayerWeights(
            input_norm=norm_if_any(prefix, parts.input_norm),
            qkv=by_rows(prefix, {parts.q: query_rows, parts.k: kv_rows, parts.v: kv_rows}),
            output=by_columns(prefix, parts.output, query_rows),
            mlp_norm=norm_if_any(prefix, parts.mlp_norm),
            gate_up=by_rows(prefix, {parts.gate: inner, parts.up: inner}),
            down=by_columns(prefix, parts.down, inner),
            cos_sin=tables[config.rope_of(index)],
            head_norms=head_norms(prefix),
            row_norms=row_norms(prefix),
            attention=AttentionForm(scale, config.window(index), config.soft_cap),
            attention_norm=norm_if_any(prefix, parts.attention_norm),
            output_norm=norm_if_any(prefix, parts.output_norm),
        )

    lm_head = backend.make_linear(tensor(_head(config), vocabulary), None, of_lm_head(quantization))
    embedding_scale = config.embedding_scale
    if config.rounds_embedding_scale:
        embedding_scale = torch.tensor(embedding_scale).to(dtype).item()
    return DecoderWeights(
        dtype=dtype,
        embedding=lm_head if config.tie_word_embeddings else kept(f"{spec.embedding}.weight", vocabulary),
        embedding_scale=embedding_scale,
        first_token=vocabulary.start,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=norm(spec.final_norm) * config.logits_scale,
        lm_head=lm_head,
    )


def weight_bytes(config: ModelConfig, dtype: torch.dtype, quantization: Quantization) -> int:
    """Of all ranks together, once the model is loaded in `dtype`; that norms are fp32 is nothing beside the rest."""
    total = 0
    for name, shape in expected_shapes(config):
        held: Quantization = "none" if len(shape) == 1 or name == f"{config.spec.embedding}.weight" else quantization
        total += tensor_bytes(shape, dtype, of_lm_head(quantization) if name == _head(config) else held)
    return total


def _head(config: ModelConfig) -> str:
    """The tensor that the logits are computed with."""
    return f"{config.spec.embedding if config.tie_word_embeddings else config.spec.lm_head}.weight"
