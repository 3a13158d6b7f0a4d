"""A decoder made of transformers' own modules over our paged KV cache: for families that have none of ours.

The modules of transformers decide what is computed, and in which order. Ours is what they call on the way: attention
over the paged cache, projections, embedding, LM head, and RMSNorms that compute what ours do. The tokens of a step
are one row, a batch of one: nothing but attention mixes them, and ours goes by the BatchLayout.

What a step's attention needs beyond queries, keys and values lies on the attention modules: what is handed to a model's
`forward` by name does not reach the attention of every family.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from twostroke.model.architectures.rope import cos_sin_table
from twostroke.model.backend import AttentionForm, Backend, Linear, LoadOptions
from twostroke.model.batch import StepInput
from twostroke.model.config import ModelShape
from twostroke.model.parallel.tensor_parallel import TensorParallel
from twostroke.model.step import OnLayer

ATTENTION = "twostroke"
"""The name of our attention in transformers, which makes no masks for unknown names; ours needs none."""
_SEEN_BY = "twostroke_attention"  # attribute of every module that may attend


@dataclass(frozen=True)
class AttentionCall:
    """Arguments that a module of transformers passes to its attention. Queries [1, H, T, D]; keys and values [1, G, T,
    D]."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int  # 0: none
    soft_cap: float  # 0: none
    sinks: Tensor | None  # [H]
    others: dict[str, Any]  # its other arguments, to check that they may be ignored


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Our attention as transformers calls it: returns [1, T, H, D], and no weights."""
    others["attention_mask"] = attention_mask
    call = AttentionCall(
        module,
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        soft_cap=softcap or 0.0,
        sinks=s_aux,
        others=others,
    )
    return getattr(module, _SEEN_BY)(call), None


AttentionInterface.register(ATTENTION, _attend)


def attend_by(model: nn.Module, attention: Callable[[AttentionCall], Tensor]) -> None:
    """Let all attention of `model` be computed by `attention`."""
    for module in model.modules():
        setattr(module, _SEEN_BY, attention)


def trace(model: Any, tokens: int, see: Callable[[AttentionCall], None]) -> None:
    """Show `see` the calls of one forward pass, in order, over a model whose tensors are all on the meta device."""

    def record(call: AttentionCall) -> Tensor:
        see(call)
        return call.query.transpose(1, 2)[..., : call.value.shape[-1]]

    # The default for experts multiplies bf16 alone on the meta device.
    model.config._experts_implementation, experts = "batched_mm", model.config._experts_implementation
    attend_by(model, record)
    positions = torch.arange(tokens, device="meta")
    try:
        with torch.inference_mode():
            _logits(model, torch.zeros(tokens, dtype=torch.int64, device="meta"), positions, positions[:1])
    finally:
        model.config._experts_implementation = experts


def _logits(model: Any, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """[rows, vocab] of one flat row of tokens."""
    out = model(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows, return_dict=True
    )
    logits: Tensor = out.logits[0]
    return logits


class ProjectionModule(nn.Module):
    """Replaces an nn.Linear or a Conv1D by a projection of the backend."""

    def __init__(self, linear: Linear, parallel: TensorParallel, *, sums: bool, splits: bool, gathers: bool):
        """`sums`: this rank's result is a summand. `splits`: it takes its part of an input that is whole. `gathers`:
        its result is a part of the output, all of which is needed."""
        super().__init__()
        self._linear = linear
        self._parallel = parallel
        self._sums, self._splits, self._gathers = sums, splits, gathers

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self._splits:
            x = x[..., self._parallel.shard.part(x.shape[-1])]
        y = self._linear(x.reshape(-1, x.shape[-1]).contiguous())
        if self._gathers:
            shard = self._parallel.shard
            whole = y.new_zeros((len(y), y.shape[1] * shard.size))
            whole[:, shard.part(whole.shape[1])] = y
            y = whole
        if self._sums or self._gathers:
            y = self._parallel.all_reduce(y)
        return y.view(*x.shape[:-1], y.shape[-1])


class HeadModule(nn.Module):
    """Replaces the LM head: computes this rank's logits in fp32."""

    def __init__(self, linear: Linear):
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:  # nothing is drawn
            return x.new_empty((*x.shape[:-1], self._linear.out_features), dtype=torch.float32)
        logits = self._linear(x.reshape(-1, x.shape[-1]).contiguous(), out_dtype=torch.float32)
        return logits.view(*x.shape[:-1], logits.shape[-1])


class EmbeddingModule(nn.Module):
    """Replaces the token embedding: looks up this rank's rows, or those of the shared LM head, and sums over the
    ranks."""

    def __init__(
        self, table: Tensor | Linear, first: int, dtype: torch.dtype, backend: Backend, parallel: TensorParallel
    ):
        super().__init__()
        self._table = table
        self._first = first
        self._dtype = dtype
        self._backend = backend
        self._parallel = parallel

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [1, T] -> [1, T, hidden]."""
        found = self._backend.embed(token_ids.reshape(-1), self._table, self._first, self._dtype)
        return self._parallel.all_reduce(found).view(*token_ids.shape, -1)


class NormModule(nn.Module):
    """Replaces an RMSNorm that computes what ours does."""

    def __init__(self, weight: Tensor, eps: float, backend: Backend):
        super().__init__()
        self._weight = weight  # fp32
        self._eps = eps
        self._backend = backend

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same."""
        return self._backend.rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), self._weight, self._eps).view(x.shape)


def replace_norms(model: nn.Module, backend: Backend) -> None:
    """Put ours in the place of every RMSNorm over loaded weights that gives on random input what ours gives."""
    for name, module in list(model.named_modules()):
        if "RMSNorm" in type(module).__name__ and (norm := _our_norm(module, backend)) is not None:
            model.set_submodule(name, norm)


def _our_norm(module: nn.Module, backend: Backend) -> NormModule | None:
    """None where it computes something else."""
    weights = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weights.keys() != {"weight"} or weights["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    weight = weights["weight"].detach().float().contiguous()
    x = torch.randn((3, len(weight)), generator=torch.Generator().manual_seed(0)).to(weight.device)
    with torch.inference_mode():
        try:
            expected = copy.deepcopy(module).float()(x)
        except (TypeError, ValueError, RuntimeError):
            return None  # it takes more than its input
        for ours in (weight, weight + 1):
            if torch.allclose(backend.rms_norm(x, ours, eps), expected, rtol=1e-4, atol=1e-5):
                return NormModule(ours, eps, backend)
    return None


class TransformersDecoder:
    """Implements StepDecoder over a loaded model of transformers."""

    def __init__(
        self,
        model: Any,
        calls: Sequence[AttentionCall],
        shape: ModelShape,
        options: LoadOptions,
        backend: Backend,
        parallel: TensorParallel,
        *,
        sums_heads: bool,
    ):
        """`calls` are the trace of one forward pass of `model`: a layer each.

        `sums_heads`: where a rank hands all heads to its attention, which attends with its own, what follows takes all.
        """
        self._model = model
        self._vocab_size = shape.vocab_size
        self._groups = shape.kv_groups
        self._backend = backend
        self._parallel = parallel
        self._sums_heads = sums_heads
        self._step: StepInput | None = None  # the one under way
        self._on_layer: OnLayer | None = None
        self._below: Any = None  # what the layers below the LM head gave, while it is read
        self._layers = {call.module: index for index, call in enumerate(calls)}
        self._forms: dict[int, AttentionForm] = {}
        # Transformers has rotated queries and keys already.
        self._still = cos_sin_table(None, calls[0].query.shape[-1], options.max_context).to(options.device)
        attend_by(model, self._attend)

    @property
    def vocab_size(self) -> int:
        """Implement StepDecoder.vocab_size."""
        return self._vocab_size

    @property
    def logits_width(self) -> int:
        """Implement StepDecoder.logits_width."""
        return self._parallel.shard.vocabulary_size(self._vocab_size)

    def forward(self, step: StepInput, on_layer: OnLayer | None = None) -> Tensor | None:
        """Implement StepDecoder.forward. The last layer computes all of its rows."""
        rows, positions = step.drawing.rows, step.layouts[0].positions
        self._step, self._on_layer = step, on_layer
        if step.on_hidden is None:
            logits = _logits(self._model, step.token_ids, positions, rows)
        else:
            self._below = self._model.base_model(
                input_ids=step.token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True
            )
            step.on_hidden(hidden := self._below.last_hidden_state[0])
            logits = self.logits(hidden[rows])
            self._below = None
        self._step = None
        return logits.float() if rows.numel() else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement StepDecoder.logits with the model's own `forward` over given hidden states: some families do more
        than the LM head there."""
        rows = torch.arange(len(hidden), device=hidden.device)
        given = copy.copy(self._below)
        given.last_hidden_state = hidden[None]
        base = self._model.base_model
        base.forward = lambda *_, **__: given
        try:
            return _logits(self._model, rows, rows, rows).float()
        finally:
            del base.forward

    def whole_logits(self, token_ids: Tensor) -> Tensor:
        """[T, vocab] of one sequence from its start, by transformers' own attention, mask and all."""
        config = self._model.config
        config._attn_implementation = "eager"
        try:
            rows = torch.arange(len(token_ids), device=token_ids.device)
            return _logits(self._model, token_ids, rows, rows).float()
        finally:
            config._attn_implementation = ATTENTION

    def _attend(self, call: AttentionCall) -> Tensor:
        """Write keys and values into the cache, tell of it, and attend. Returns [1, T, H, D]."""
        step = self._step
        if step is None:
            raise RuntimeError("attention outside of a step")
        index = self._layers[call.module]
        layout = step.layouts[self._groups.table_of_layer[index]]
        kv_layer = step.kv_tensors[self._groups.tensor_of_layer[index]]
        query, key, value = (part[0].transpose(0, 1) for part in (call.query, call.key, call.value))
        tokens, all_heads, dim = query.shape
        heads = slice(None)
        if key.shape[1] != kv_layer.shape[2]:  # those of all ranks
            shard = self._parallel.shard
            heads, groups = shard.part(all_heads), shard.kv_heads(key.shape[1])
            query, key, value = query[:, heads], key[:, groups], value[:, groups]
        narrow = value.shape[-1]
        if narrow < dim:
            value = functional.pad(value, (0, dim - narrow))
        qkv = torch.cat((query, key, value), dim=1).view(tokens, -1)
        q = self._backend.rope_and_write_kv(qkv, self._still, kv_layer, layout)
        if self._on_layer is not None:
            self._on_layer(index)
        form = self._forms.get(index)
        if form is None:
            sinks = None if call.sinks is None else call.sinks.detach().float().reshape(-1)[heads].contiguous()
            form = self._forms[index] = AttentionForm(call.scale, call.window, call.soft_cap, sinks)
        own = self._backend.attention(q, kv_layer, layout, form).view(tokens, -1, dim)[..., :narrow]
        if own.shape[1] == all_heads:
            return own[None]
        out = own.new_zeros((1, tokens, all_heads, narrow))
        out[0, :, heads] = own
        return self._parallel.all_reduce(out) if self._sums_heads else out
