"""Costs of a step's operations: FLOPs and bytes of each, by phase, tokens and context.

A product of n rows with a weight [out, in] takes 2 n out in operations and reads the weight once (Kaplan et al. 2020,
table 1; Pope et al., Efficiently Scaling Transformer Inference, MLSys 2023). Attention adds 2 operations for each
number of a query and key, and of a weight and value. Sums over all layers; an element-wise operation between two
products is taken to be in one of their kernels, so that norms alone stand for themselves.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from twostroke.model.config import ModelConfig, ModelShape, Quantization, WeightForm
from twostroke.model.costs.sizes import FP32_BYTES, INT4_GROUP, head_quantization
from twostroke.model.parameters import Product, decoder_modules, expert_name
from twostroke.model.state_sizes import StateSizes
from twostroke.protocol.kv_layout import mean_seen

NORM_FLOPS = 5  # of a number: residual added, squared, summed, scaled, weighed


@dataclass(frozen=True)
class MachineLimits:
    """Rates of a machine."""

    gemm: float  # bf16 operations a second
    read: float  # bytes a second

    def times(self, count: int) -> "MachineLimits":
        """Return the limits of `count` machines together."""
        return MachineLimits(self.gemm * count, self.read * count)

    def mean(self, other: "MachineLimits") -> "MachineLimits":
        return MachineLimits((self.gemm + other.gemm) / 2, (self.read + other.read) / 2)


@dataclass(frozen=True)
class OperationWork:
    """FLOPs and bytes that one step can't do without."""

    tokens: int  # tokens that count
    operations: float
    bytes: float  # weights and cached KV that must be read

    def floor_s(self, limits: MachineLimits) -> float:
        """Seconds that the step takes at least."""
        return max(self.operations / limits.gemm, self.bytes / limits.read)


@dataclass(frozen=True)
class NumberFormats:
    """Bytes of the numbers that a model is held in."""

    quantization: Quantization = "none"
    itemsize: float = 2.0  # of activations, and of weights that are not quantised
    kv_itemsize: float = 2.0

    def weight(self, shape: ModelShape) -> float:
        """Bytes of a projection's weight, its part of scales with it."""
        return self._of(self.quantization, shape)

    def attention_weight(self, shape: ModelShape) -> float:
        """Return the bytes of a weight around attention: in MXFP4 checkpoints only experts are quantised."""
        stored = shape.stored if isinstance(shape, ModelConfig) else None
        is_left = self.quantization == "auto" and stored is not None and stored.method == "mxfp4"
        return self.itemsize if is_left else self._of(self.quantization, shape, of_attention=True)

    def head_weight(self, shape: ModelShape) -> float:
        """Return the bytes of a weight of the LM head, which quantised checkpoints leave as it was."""
        return self.itemsize if self.quantization == "auto" else self._of(head_quantization(self.quantization), shape)

    def _of(self, quantization: Quantization, shape: ModelShape, of_attention: bool = False) -> float:
        form = stored_form(shape, of_attention)
        if quantization == "auto" and form is not None:
            scale = 0.0 if form.group_size is None else 2.0 / form.group_size
            return form.bits / 8 + scale * (2 if form.has_offsets else 1)
        return {"int8": 1.0, "int4": 0.5 + 2.0 / INT4_GROUP}.get(quantization, self.itemsize)


AS_BF16 = NumberFormats()


def stored_form(shape: ModelShape, of_attention: bool = False) -> WeightForm | None:
    """Return the checkpoint's form of what makes the output of an MLP, or of attention; None: it is not quantised."""
    if not isinstance(shape, ModelConfig) or shape.stored is None:
        return None
    layer, (first, second) = shape.spec.layer, shape.prefixes(shape.num_layers // 2)
    down = layer.down.name if layer.experts is None else expert_name(layer.experts.down.name, 0)
    module = f"{first}{layer.output.name}" if of_attention else f"{second or first}{down}"
    return (shape.stored.of_module(shape.spec.names_in_files(module)) or shape.stored).form


Kind = Literal["product", "attention", "norm"]


@dataclass(frozen=True)
class Operation:
    """One kind of operation, all of a step's layers together."""

    name: str
    kind: Kind
    flops: float
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0  # read of the cache
    activation_bytes: float = 0.0  # read and written

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """Operations a byte (Williams et al., Roofline, CACM 2009)."""
        return self.flops / self.bytes


def product_intensity(rows: float, inner: int, outer: int, itemsize: float = 2.0) -> float:
    """Operations a byte of rows [rows, inner] times a weight [outer, inner], each read or written once."""
    return 2.0 * rows * inner * outer / (itemsize * (rows * inner + inner * outer + rows * outer))


def prefill_operations(
    shape: ModelShape, tokens: int, before: int = 0, formats: NumberFormats = AS_BF16, *, is_last: bool = True
) -> list[Operation]:
    """A chunk of `tokens` prompt tokens after `before` cached ones.

    The last chunk draws one token: only one row needs the last layer's output and the logits.
    """
    last, drawing = shape.last_kv_layer, int(is_last)
    rows = [tokens] * last + [drawing] * (shape.num_layers - last)
    if not is_last:
        rows[last] = tokens
    end, flops = before + tokens, 0.0
    for layer in range(shape.num_layers):
        if not shape.keeps_state(layer):
            most = shape.attended(layer)
            pairs = _causal_pairs(end, most) - _causal_pairs(before, most)
            flops += 2.0 * pair_products(shape, layer) * (pairs if layer <= last else drawing * mean_seen(most, end))
    found = _operations(shape, formats, tokens, rows, flops, _numbers_read(shape, before, shape.window), 1, drawing)
    scored = _causal_pairs(end, 0) - _causal_pairs(before, 0)
    return found + _index_operations(shape, formats, end, scored, before)


def decode_operations(
    shape: ModelShape, batch: int, context: float, formats: NumberFormats = AS_BF16
) -> list[Operation]:
    """A step of `batch` sequences with `context` tokens each, the one that is computed among them.

    Heads that attend to latents score all of a row, and mix what of it is the latent (DeepSeek-AI 2024, section 2.1.2).
    """
    rotary = 0 if shape.latent is None else shape.latent.rotary
    scores = sum(
        2.0 * (2 * shape.query_width(layer) - shape.num_heads * rotary) * mean_seen(shape.attended(layer), context)
        for layer in range(shape.num_layers)
        if not shape.keeps_state(layer)
    )
    rows, read = [batch] * shape.num_layers, _numbers_read(shape, context, shape.attended)
    found = _operations(shape, formats, batch, rows, batch * scores, batch * read, batch, batch)
    return found + _index_operations(shape, formats, context, batch * context, batch * context)


def _numbers_read(shape: ModelShape, context: float, seen: Callable[[int], int]) -> float:
    """Return the numbers of all layers' caches that attention to `context` tokens reads, keys of an index aside.
    `seen` returns what a layer attends to, as a window."""
    index_key = 0 if shape.index is None else shape.index.key
    return shape.kv_kinds * sum(
        (shape.heads(layer).width - index_key) * mean_seen(seen(layer), context)
        for layer in range(shape.num_layers)
        if not shape.keeps_state(layer)
    )


def _index_operations(
    shape: ModelShape, formats: NumberFormats, context: float, pairs: float, kv_tokens: float
) -> list[Operation]:
    """Return the scores by which tokens are chosen: of `pairs` of a query and a token, from the cached keys of
    `kv_tokens` tokens, where the longest context has more tokens than are chosen."""
    index = shape.index
    if index is None or context <= index.top_k:
        return []
    layers = shape.num_layers - len(index.sharing)
    flops, read = 2.0 * index.heads * (index.key + 1) * pairs, formats.kv_itemsize * index.key * kv_tokens
    return [Operation("index scores", "attention", layers * flops, kv_bytes=layers * read)]


def prefill_work(shape: ModelShape, tokens: int, quantization: Quantization, itemsize: float = 2.0) -> OperationWork:
    """A prompt in one chunk that draws one token, with activations and a cache of numbers of `itemsize` bytes."""
    formats = NumberFormats(quantization, itemsize, itemsize)
    return _work(tokens, prefill_operations(shape, tokens, formats=formats))


def decode_work(
    shape: ModelShape, batch: int, context: float, quantization: Quantization, itemsize: float = 2.0
) -> OperationWork:
    """Return the work of one decode step of `batch` sequences with `context` tokens each; `itemsize` as there."""
    formats = NumberFormats(quantization, itemsize, itemsize)
    return _work(batch, decode_operations(shape, batch, context, formats))


def _work(tokens: int, operations: Sequence[Operation]) -> OperationWork:
    needed = [one for one in operations if one.kind != "norm"]
    return OperationWork(
        tokens, sum(one.flops for one in needed), sum(one.weight_bytes + one.kv_bytes for one in needed)
    )


def _operations(
    shape: ModelShape,
    formats: NumberFormats,
    tokens: int,
    rows: Sequence[int],
    attention_flops: float,
    kv_numbers: float,
    sequences: int,
    logit_rows: int,
) -> list[Operation]:
    """Return the operations of a step. `rows` are those of each layer behind its keys and values, `kv_numbers` are what
    all layers read of their caches, and `sequences` are those whose states are read and written."""
    by_layer, ends = product_weights(shape)
    hidden, states = shape.hidden_size, [layer for layer in range(shape.num_layers) if shape.keeps_state(layer)]
    layers = shape.num_layers - len(states)
    state_rows = sum(rows[layer] for layer in states)
    row_sum, each, around = sum(rows), formats.weight(shape), formats.attention_weight(shape)
    # Weights of inputs and outputs, their products' operations, and numbers that these read and write, and attention.
    inputs = outputs = input_flops = output_flops = input_numbers = mixed_numbers = 0.0
    last = shape.last_kv_layer
    for layer in range(shape.num_layers):
        if shape.keeps_state(layer):
            continue
        kv, output = by_layer[layer]["keys and values"], by_layer[layer]["attention output"]
        made_by = by_layer[layer]["queries"] + kv
        # The keys are needed of all rows of the last layer that has any, and its queries with them: one product.
        taken, width = tokens if layer <= last else rows[layer], shape.query_width(layer)
        made = width + (shape.kv_kinds * shape.heads(layer).width if kv else 0)
        inputs, outputs = inputs + made_by, outputs + output
        input_flops += 2.0 * taken * made_by
        output_flops += 2.0 * rows[layer] * output
        input_numbers += taken * (hidden + made)
        mixed_numbers += taken * (made + width)
    found = [
        Operation(
            "queries, keys, values",
            "product",
            input_flops,
            weight_bytes=around * inputs,
            activation_bytes=formats.itemsize * input_numbers,
        ),
        Operation(
            "attention",
            "attention",
            attention_flops,
            kv_bytes=formats.kv_itemsize * kv_numbers,
            activation_bytes=formats.itemsize * mixed_numbers,
        ),
        Operation(
            "attention output",
            "product",
            output_flops,
            weight_bytes=around * outputs,
            activation_bytes=formats.itemsize * (row_sum - state_rows) * 2 * hidden,
        ),
    ]
    if shape.state is not None and states:
        one = by_layer[states[0]]
        found += _state_operations(shape, shape.state, one, formats, tokens, len(states), state_rows, sequences)
    mlp_flops = mlp_bytes = mlp_numbers = 0.0
    for weights, count in zip(by_layer, rows, strict=True):
        used = mlp_weights(shape, weights, 1)
        mlp_flops += 2.0 * count * used
        mlp_bytes += each * mlp_weights(shape, weights, tokens)
        mlp_numbers += count * used / hidden  # numbers that its products read and write, about
    found.append(
        Operation(
            "experts" if shape.num_experts else "MLP",
            "product",
            mlp_flops,
            weight_bytes=mlp_bytes,
            activation_bytes=formats.itemsize * (2 * hidden * row_sum + mlp_numbers),
        )
    )
    if of_all := ends["layer embeddings"]:
        of_layers = [weights["layer embeddings"] for weights in by_layer]
        embedded = tokens * of_all + sum(map(operator.mul, rows, of_layers))
        held = formats.itemsize * (of_all + sum(of_layers))
        found.append(Operation("layer embeddings", "product", 2.0 * embedded, weight_bytes=held))
    norms = (2 * layers + 1) * tokens * hidden
    found.append(Operation("norms", "norm", NORM_FLOPS * norms, activation_bytes=4 * formats.itemsize * norms))
    if logit_rows:
        head = ends["LM head"]
        found.append(
            Operation(
                "LM head",
                "product",
                2.0 * logit_rows * head,
                weight_bytes=formats.head_weight(shape) * head,
                activation_bytes=logit_rows * (formats.itemsize * hidden + 4 * shape.vocab_size),
            )
        )
    return found


def _state_operations(
    shape: ModelShape,
    state: StateSizes,
    weights: Counter[Product],
    formats: NumberFormats,
    tokens: int,
    layers: int,
    rows: int,
    sequences: int,
) -> list[Operation]:
    """Return the operations of layers that keep a state, each with these `weights`; `rows` rows of all of them together
    go through their outputs' projections.

    Of a delta net a token multiplies each number for the key's value, for the update, and for the query's (Yang et al.
    2024, eq. 10), of Mamba-2 for the last two. Each sequence's states are read once and written once.
    """
    inputs, output = weights["state inputs"], weights["state outputs"]
    matrices, around = math.prod(state.matrix), formats.attention_weight(shape)
    width = state.conv_width + 2 * state.output_width
    return [
        Operation(
            "states' inputs",
            "product",
            2.0 * tokens * layers * inputs,
            weight_bytes=around * layers * inputs,
            activation_bytes=formats.itemsize * tokens * layers * (shape.hidden_size + width),
        ),
        Operation(
            "states",
            "attention",
            2.0 * state.products * tokens * layers * matrices,
            kv_bytes=2.0 * FP32_BYTES * sequences * layers * (matrices + state.conv_width * (state.taps - 1)),
            activation_bytes=formats.itemsize * tokens * layers * width,
        ),
        Operation(
            "states' outputs",
            "product",
            2.0 * rows * output,
            weight_bytes=around * layers * output,
            activation_bytes=formats.itemsize * rows * (state.output_width + shape.hidden_size),
        ),
    ]


def _causal_pairs(tokens: int, window: int) -> float:
    """Return the pairs of a token and one it attends to. Pairs on the diagonal count half, though kernels compute them
    whole. Behind the first chunk each token counts as the mean of its chunk's."""
    if window < 0:
        return tokens * min(tokens, -window) / 2
    beyond = max(0, tokens - window) if window else 0
    return (tokens * tokens - beyond * beyond) / 2


@lru_cache(maxsize=64)
def product_weights(shape: ModelShape) -> tuple[tuple[Counter[Product], ...], Counter[Product]]:
    """Return the number of weights of each product: by layer, and of the ends. Of experts it is one expert's."""
    ends = Counter[Product]({"LM head": shape.hidden_size * shape.vocab_size})
    if not isinstance(shape, ModelConfig):
        hidden, layers = shape.hidden_size, []
        for layer in range(shape.num_layers):
            queries, width = hidden * shape.query_width(layer), shape.heads(layer).width
            kv = 2 * hidden * width if shape.kv_owner(layer) == layer else 0
            mlp = 3 * hidden * shape.intermediate_size
            layers.append(
                Counter[Product]({"queries": queries, "keys and values": kv, "attention output": queries, "MLP": mlp})
            )
        return tuple(layers), ends
    found = [Counter[Product]() for _ in range(shape.num_layers)]
    for place, module in decoder_modules(shape):
        for part in module.parts:
            if part.product is not None and part.product != "LM head":
                (ends if place is None else found[place])[part.product] += part.weights
    return tuple(found), ends


def pair_products(shape: ModelShape, layer: int) -> int:
    """Return what a prompt's pair of tokens multiplies in a layer: numbers of a query and key, and of a value."""
    if shape.latent is None:
        return 2 * shape.query_width(layer)
    return shape.num_heads * (shape.latent.query + shape.latent.value)


def mlp_weights(shape: ModelShape, layer: Counter[Product], tokens: float) -> float:
    """Return the weights of a layer's MLP that `tokens` tokens use; of experts, as many as they are expected to hit."""
    experts = shape.spec.layer.experts if isinstance(shape, ModelConfig) else None
    hit = 0.0 if experts is None else experts.routing.expected_hit(tokens)
    return layer["MLP"] + layer["experts"] * hit


_BEYOND_WINDOWS = 1 << 20
"""Tokens of context at which no window grows any more."""


@dataclass(frozen=True)
class StepWork:
    """FLOPs and bytes of weights and KV, of all ranks together. The parts of a step are those of StepContent."""

    token_flops: float  # of a prompt token
    pair_flops: float  # of a prompt token and a token that it attends to
    row_flops: float  # of a request that decodes, its logits included
    context_flops: float  # of a token in its context
    weight_bytes: float  # of any step, experts aside
    expert_bytes: float  # of a step that reads all experts
    expert_share: float  # of the experts, that a token takes; 0: there are none
    context_bytes: float  # of a cached token's KV

    def flops(self, prompt_tokens: int, pairs: float, rows: int, context_tokens: int) -> float:
        """Floating-point operations of a step; a multiplication and an addition are two."""
        return (
            prompt_tokens * self.token_flops
            + pairs * self.pair_flops
            + rows * self.row_flops
            + context_tokens * self.context_flops
        )

    def read_bytes(self, prompt_tokens: int, rows: int, context_tokens: int) -> float:
        """Bytes that a step reads of weights and cached KV, each of them once."""
        experts = 0.0
        if self.expert_bytes:
            experts = self.expert_bytes * (1.0 - (1.0 - self.expert_share) ** (prompt_tokens + rows))
        return self.weight_bytes + experts + context_tokens * self.context_bytes


def step_work(shape: ModelShape, formats: NumberFormats = AS_BF16) -> StepWork:
    """Return the coefficients of a model whose numbers are held in `held` bytes."""
    far = _BEYOND_WINDOWS
    token, nearer, further = (
        prefill_operations(shape, 1, before, formats, is_last=False) for before in (0, far, far + 1)
    )
    row, short, longer = (decode_operations(shape, 1, context, formats) for context in (0, far, far + 1))
    all_weights = _sum(decode_operations(shape, far, 0, formats), "weight_bytes")
    share, expert_bytes = shape.expert_share, 0.0
    if 0 < share < 1:  # one token reads its share of the experts
        expert_bytes = (all_weights - _sum(row, "weight_bytes")) / (1 - share)
    return StepWork(
        token_flops=_sum(token, "flops", "product"),
        pair_flops=_sum(further, "flops", "attention") - _sum(nearer, "flops", "attention"),
        row_flops=_sum(row, "flops", "product"),
        context_flops=_sum(longer, "flops", "attention") - _sum(short, "flops", "attention"),
        weight_bytes=all_weights - expert_bytes,
        expert_bytes=expert_bytes,
        expert_share=share,
        context_bytes=_sum(longer, "kv_bytes") - _sum(short, "kv_bytes"),
    )


def _sum(
    operations: list[Operation], what: Literal["flops", "weight_bytes", "kv_bytes"], kind: Kind | None = None
) -> float:
    return float(sum(getattr(one, what) for one in operations if kind in (None, one.kind)))
