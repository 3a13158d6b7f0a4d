"""A decoder layer's operations in plain torch: what the kernels of both devices must compute, and are tested against.

They are plain and slow, run on any device, and take the shapes of model/backend.py: statistics, sums and rotation in
fp32, one rounding at the end.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.backend import (
    AS_THEY_ARE,
    FP8_LIMIT,
    AttentionForm,
    Chosen,
    ExpertWeights,
    HeadNorms,
    KVScales,
    MLAHeads,
    RowNorms,
)
from twostroke.model.batch import BatchLayout
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.config import GLU_ALPHA, GLU_LIMIT, Activation, Routing
from twostroke.protocol.kv_layout import first_seen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, hidden] -> x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual): the sum is rounded to x's dtype, and the norm taken of what is kept."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def add(x: Tensor, residual: Tensor) -> Tensor:
    """The sum, rounded once."""
    return (x.float() + residual.float()).to(x.dtype)


def scale(x: Tensor, factor: float) -> Tensor:
    """x times a factor, rounded once."""
    return (x.float() * factor).to(x.dtype)


def scale_by_position(x: Tensor, scales: Tensor, positions: Tensor) -> Tensor:
    """x [T, width], each row times the scale of its position, rounded once."""
    return (x.float() * scales[positions][:, None]).to(x.dtype)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """fp32 [N, vocab] -> cap tanh(logits / cap)."""
    return cap * torch.tanh(logits / cap)


def square_sums(qkv: Tensor, norms: RowNorms) -> Tensor:
    """fp32 [T, 2]: of all queries of a token, and of all its keys."""
    parts = _queries_and_keys(qkv.float(), norms)
    return torch.stack([part.square().sum(1) for part in parts], dim=1)


def _queries_and_keys(qkv: Tensor, norms: RowNorms) -> tuple[Tensor, Tensor]:
    q, k, _ = qkv.tensor_split((len(norms.q), len(norms.q) + len(norms.k)), dim=1)
    return q, k


def norm_rows(qkv: Tensor, square_sums: Tensor, norms: RowNorms) -> Tensor:
    """qkv [T, (H + 2 G) D] with queries and keys normalised: as `rms_norm`, by the sums of all ranks."""
    out = qkv.clone()
    parts = _queries_and_keys(out, norms)
    for part, weight, total in zip(parts, (norms.q, norms.k), square_sums.unbind(1), strict=True):
        mean = total.unsqueeze(1) / (norms.ranks * len(weight))
        part.copy_(part.float() * torch.rsqrt(mean + norms.eps) * weight)
    return out


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, D] rotated by its positions [T], in the half-split form of Llama checkpoints (Su et al. 2021).

    cos_sin fp32 [max_position, D]: cos of the D/2 frequencies, then sin.
    """
    return _turned(x, positions, cos_sin).to(x.dtype)


def _turned(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate as `rope` does, in fp32."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x / scale, by multiplication with the inverse in fp32, to nearest in e4m3, ties to even; what is beyond its range
    becomes its largest number, and NaN stays."""
    return (x.float() * torch.tensor(1 / scale)).clamp(-FP8_LIMIT, FP8_LIMIT).to(torch.float8_e4m3fn)


def rope_and_write_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    kv_layer: Tensor,
    positions: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
    kv_scales: KVScales = AS_THEY_ARE,
    query_scales: Tensor | None = None,
) -> Tensor:
    """Rotated Q [T, H, D], times `query_scales` of its positions; rotated K, and V, go into `kv_layer` at `slots`, but
    for negative ones."""
    _, _, groups, block_size, dim = kv_layer.shape
    heads = qkv.shape[1] // dim - 2 * groups
    q, k, v = qkv.view(-1, heads + 2 * groups, dim).tensor_split((heads, heads + groups), dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
        v = v if norms.v is None else rms_norm(v, norms.v, norms.eps)
    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    turned = _turned(k, positions, cos_sin)
    if kv_layer.dtype == torch.float8_e4m3fn:
        turned, v = to_fp8(turned, kv_scales.key), to_fp8(v, kv_scales.value)
    kv_layer[blocks, 0, :, offsets] = turned[kept].to(kv_layer.dtype)
    kv_layer[blocks, 1, :, offsets] = v[kept]
    rotated = _turned(q, positions, cos_sin)
    return (rotated if query_scales is None else rotated * query_scales[positions][:, None, None]).to(q.dtype)


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    form: AttentionForm,
) -> Tensor:
    """Causal softmax attention in fp32, sequence by sequence (Vaswani et al. 2017; GQA: Ainslie et al. 2023).

    q [T, H, D]; kv_layer [num_blocks, 2, G, block_size, D], or of one kind of rows, which are keys and values alike;
    the last of a sequence's queries stands at the last position of its context. What the cache holds is multiplied by
    the form's scales of KV. Returns [T, H * D], rounded once to q's dtype. Only slots within the context and the
    queries' windows are read.
    """
    _, heads, _ = q.shape
    groups, block_size = kv_layer.shape[2], kv_layer.shape[3]
    out = torch.zeros_like(q)
    starts = query_starts.tolist()
    for sequence, context_len in enumerate(context_lens.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        if context_len == 0 or start == end:
            continue
        first = first_seen(form.window, context_len - (end - start))
        keys = torch.arange(first, context_len, device=q.device)
        blocks = block_tables[sequence, keys // block_size].long()
        kinds = kv_layer[blocks, :, :, keys % block_size].float().repeat_interleave(heads // groups, dim=2)
        k, v = kinds[:, 0] * form.kv_scales.key, kinds[:, -1] * form.kv_scales.value
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * form.scale
        if form.soft_cap:
            scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
        positions = torch.arange(context_len - (end - start), context_len, device=q.device).unsqueeze(1)
        visible = keys <= positions
        if form.window > 0:
            visible &= keys > positions - form.window
        elif form.window < 0:
            visible &= keys >= positions - positions % -form.window
        scores = scores.masked_fill(~visible, -math.inf)
        if form.sinks is not None:
            scores = torch.cat((scores, form.sinks[:, None, None].expand(-1, end - start, 1)), dim=2)
        weights = scores.softmax(-1)[:, :, : len(keys)]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out.flatten(1)


def attention(q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm) -> Tensor:
    """`paged_attention` of a layout's sequences."""
    return paged_attention(q, kv_layer, layout.query_starts, layout.context_lens, layout.block_tables, form)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2 I], gate first -> activation(gate) * up [T, I] (Shazeer 2020; GELU: Hendrycks & Gimpel 2016).

    Without gates, [T, I] -> relu^2 [T, I] (So et al. 2021, "Primer").
    """
    if activation == "relu2":
        return gate_up.float().relu().square().to(gate_up.dtype)
    gates, up = gate_up.float().chunk(2, dim=-1)
    match activation:
        case "silu":
            active = functional.silu(gates)
        case "gelu_tanh":
            active = functional.gelu(gates, approximate="tanh")
        case "clamped":
            gates, up = gates.clamp(max=GLU_LIMIT), up.clamp(-GLU_LIMIT, GLU_LIMIT) + 1
            active = gates * torch.sigmoid(GLU_ALPHA * gates)
    return (active * up).to(gate_up.dtype)


def gate_columns(gates: Tensor, x: Tensor, first: int, activation: Activation) -> Tensor:
    """Implement Backend.gate_columns."""
    return gate(torch.cat((gates, x[:, first : first + gates.shape[1]]), dim=1), activation)


def route(logits: Tensor, correction: Tensor | None, routing: Routing, scales: Tensor | None = None) -> Chosen:
    """The experts for logits fp32 [T, experts]: by groups as DeepSeek-AI 2024 (V2: 2.2.2; V3: 2.1.2)."""
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(1)
    choosing = scores if correction is None else scores + correction
    if routing.groups > 1:
        groups = choosing.view(len(logits), routing.groups, -1)
        sums = groups.sort(stable=True, dim=2, descending=True).values[:, :, : routing.summed].sum(2)
        closed = torch.ones_like(sums, dtype=torch.bool).scatter_(1, _first_best(sums, routing.top_groups), False)
        choosing = groups.masked_fill(closed[:, :, None], -math.inf).flatten(1)
    experts = _first_best(choosing, routing.top_k)
    weights = scores.gather(1, experts)
    if routing.normalises:
        weights = weights / weights.sum(1, keepdim=True)
    weights = weights * routing.scale
    return Chosen(experts.int(), weights if scales is None else weights * scales[experts])


def _first_best(scores: Tensor, count: int) -> Tensor:
    """The indices of each row's highest scores, of equal ones the first."""
    return torch.sort(scores, stable=True, dim=1, descending=True).indices[:, :count]


def experts(x: Tensor, chosen: Chosen, weights: ExpertWeights, activation: Activation) -> Tensor:
    """x [T, hidden] -> the weighted sum of what each token's experts make of it (Shazeer et al. 2017).

    Rounded to x's dtype between the two products and at the end.
    """
    out = torch.zeros(x.shape, device=x.device)
    parts = zip(weights.of_each("gate_up"), weights.of_each("down"), strict=True)
    for expert, ((gate_up, gate_up_bias), (down, down_bias)) in enumerate(parts, start=weights.first):
        tokens, places = (chosen.experts == expert).nonzero(as_tuple=True)
        inner = gate(_linear(x[tokens], gate_up, gate_up_bias).to(x.dtype), activation)
        out.index_add_(0, tokens, _linear(inner, down, down_bias) * chosen.weights[tokens, places, None])
    return out.to(x.dtype)


def _linear(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Tensor:
    plain = weight if isinstance(weight, Tensor) else weight.dequantized(x.dtype)
    return functional.linear(x.float(), plain.float(), None if bias is None else bias.float())


def gate_by_sigmoid(x: Tensor, logits: Tensor) -> Tensor:
    """x [T, hidden] times the sigmoid of each row's highest logit, fp32 [T, N], rounded once."""
    return (x.float() * logits.amax(1, keepdim=True).sigmoid()).to(x.dtype)


def write_latents(
    rows: Tensor, norm: Tensor, eps: float, cos_sin: Tensor, kv_layer: Tensor, positions: Tensor, slots: Tensor
) -> None:
    """rows [T, R + P] with the latents normalised and the rest rotated go to the beginnings of rows of `kv_layer`
    [num_blocks, 1, 1, block_size, R + P or more] at `slots`, but for negative ones."""
    rank, block_size = len(norm), kv_layer.shape[3]
    turned = rope(rows[:, None, rank:], positions, cos_sin)[:, 0]
    kept = slots >= 0
    written = torch.cat((rms_norm(rows[:, :rank], norm, eps), turned), dim=1)[kept]
    kv_layer[slots[kept] // block_size, 0, 0, slots[kept] % block_size, : written.shape[1]] = written


def attend_to_latents(
    q: Tensor,
    heads: MLAHeads,
    cos_sin: Tensor,
    kv_layer: Tensor,
    layout: BatchLayout,
    chosen: Tensor | None = None,
) -> Tensor:
    """q [T, H (N + P)] -> [T, H V]: attention to keys and values that are made of the context's latents (DeepSeek-AI
    2024, equations 9 to 19), all in fp32, rounded once; where slots are `chosen`, to those alone."""
    still, turning = _parts_of_queries(q, heads)
    queries = torch.cat((still.float(), rope(turning.float(), layout.positions, cos_sin)), dim=2)
    rank, block_size = heads.keys.shape[2], kv_layer.shape[3]
    count, _, width = len(q), *heads.values.shape[1:]
    out = torch.zeros(count, heads.keys.shape[0], width, dtype=q.dtype, device=q.device)
    starts = layout.query_starts.tolist()
    for sequence, context in enumerate(layout.context_lens.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        tokens = torch.arange(context, device=q.device)
        blocks = layout.block_tables[sequence, tokens // block_size].long()
        rows = kv_layer[blocks, 0, 0, tokens % block_size].float()
        k = torch.einsum("kr,hnr->khn", rows[:, :rank], heads.keys.float())
        v = torch.einsum("kr,hrv->khv", rows[:, :rank], heads.values.float())
        turned = rows[:, None, rank : rank + cos_sin.shape[1]]
        k = torch.cat((k, turned.expand(-1, k.shape[1], -1)), dim=2)
        scores = torch.einsum("qhd,khd->hqk", queries[start:end], k) * heads.scale
        hidden = tokens > torch.arange(context - (end - start), context, device=q.device).unsqueeze(1)
        if chosen is not None:
            slots = blocks * block_size + tokens % block_size
            hidden |= ~(slots[None, :, None] == chosen[start:end, None]).any(2)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khv->qhv", weights, v).to(q.dtype)
    return out.flatten(1)


def _parts_of_queries(q: Tensor, heads: MLAHeads) -> tuple[Tensor, Tensor]:
    """[T, H, N] and [T, H, P]."""
    count, still, _ = heads.keys.shape
    whole = q.view(len(q), count, -1)
    return whole[..., :still], whole[..., still:]
