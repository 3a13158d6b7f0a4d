"""Tensors of a decoder, and the memory that it takes: arithmetic over its config alone. No torch here.

Bytes are of weights, of KV and of the largest step, on each of the ranks that share the model.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from twostroke.model.config import (
    ExpertsSpec,
    ModelConfig,
    ModelShape,
    Projection,
    Quantization,
    WeightForm,
)
from twostroke.model.parallel.form import ONE_RANK, ParallelForm
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import stage_layers

FP32_BYTES, FP16_BYTES = 4, 2

INT4_GROUP = 64  # columns that share a scale


def num_parameters(config: ModelConfig) -> int:
    """Return the number of all parameters; tied ones count once."""
    return sum(math.prod(shape) for _, shape in expected_shapes(config))


def num_active_parameters(config: ModelConfig) -> int:
    """Return the number of parameters that one token is computed with."""
    experts = config.spec.layer.experts
    if experts is None:
        return num_parameters(config)
    idle = experts.routing.num_experts - experts.routing.top_k
    each = 3 * experts.size * config.hidden_size
    if experts.gate.has_bias:
        each += 2 * experts.size + config.hidden_size
    return num_parameters(config) - config.num_routed_layers * idle * each


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a checkpoint of this config holds."""
    spec, hidden = config.spec, config.hidden_size
    yield f"{spec.embedding}.weight", (config.vocab_size, hidden)
    if not config.tie_word_embeddings:
        yield f"{spec.lm_head}.weight", (config.vocab_size, hidden)
    yield f"{spec.final_norm}.weight", (hidden,)
    for index in range(config.num_layers):
        shapes = _attention_shapes(config, index)
        if (mlp := config.mlp_of(index)) is not None:
            parts = ((mlp.gate, mlp.size, hidden), (mlp.up, mlp.size, hidden), (mlp.down, hidden, mlp.size))
            shapes |= _shapes_of(parts)
        if (experts := config.experts_of(index)) is not None:
            shapes |= _shapes_of_experts(experts, hidden)
        for name, shape in shapes.items():
            yield f"{spec.layers}.{index}.{name}", shape


def _attention_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes around attention by names within a layer, with all of the layer's norms."""
    layer, hidden = config.spec.layer, config.hidden_size
    of_layer = (layer.input_norm, layer.mlp_norm, layer.attention_norm, layer.output_norm)
    if config.keeps_state(index):
        return {f"{norm}.weight": (hidden,) for norm in of_layer if norm is not None} | _delta_shapes(config)
    norms = (
        *((norm, hidden) for norm in of_layer),
        *((norm, config.head_dim) for norm in (layer.q_norm, layer.k_norm)),
        (layer.q_row_norm, config.q_size),
        (layer.k_row_norm, config.kv_size),
        *_latent_norms(config),
    )
    shapes: dict[str, tuple[int, ...]] = {f"{norm}.weight": (width,) for norm, width in norms if norm is not None}
    if layer.sinks is not None:
        shapes[layer.sinks] = (config.num_heads,)
    return shapes | _shapes_of(_attention_projections(config))


def _delta_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's gated delta net."""
    parts, sizes, hidden = config.spec.layer.delta, config.state, config.hidden_size
    if parts is None or sizes is None:
        return {}
    heads, both = sizes.value_heads, sizes.conv_width + sizes.value_width
    rows = (
        [(parts.qkv, both, hidden), (parts.beta, 2 * heads, hidden)]
        if parts.by_key_heads
        else [
            (parts.qkv, sizes.conv_width, hidden),
            (parts.gate, sizes.value_width, hidden),
            (parts.beta, heads, hidden),
            (parts.decay, heads, hidden),
        ]
    )
    return _shapes_of([*rows, (parts.output, hidden, sizes.value_width)]) | {
        parts.conv: (sizes.conv_width, 1, sizes.taps),
        parts.decay_log: (heads,),
        parts.decay_bias: (heads,),
        f"{parts.norm}.weight": (sizes.value,),
    }


def _shapes_of(projections: Iterable[tuple[Projection, int, int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of projections given as (projection, rows, columns). Of several in one tensor the last one ends
    it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for projection, rows, columns in projections:
        shapes[f"{projection.name}.weight"] = (projection.first_row + rows, columns)
        if projection.has_bias:
            shapes[f"{projection.name}.bias"] = (projection.first_row + rows,)
    return shapes


def _shapes_of_experts(spec: ExpertsSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of experts and of the router."""
    count = spec.routing.num_experts
    shapes = _shapes_of([(spec.router, count, hidden)])
    if spec.correction is not None:
        shapes[spec.correction] = (count,)
    if spec.shared_gate is not None:
        shapes |= _shapes_of([(spec.shared_gate, 1, hidden)])
    return shapes | shapes_of_each_expert(spec, hidden)


def shapes_of_each_expert(spec: ExpertsSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all of a layer's experts, by names within a layer."""
    count, size = spec.routing.num_experts, spec.size
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.are_stacked:
        for part, columns, rows in ((spec.gate, hidden, 2 * size), (spec.down, size, hidden)):
            shapes[part.name] = count, columns, rows
            if part.has_bias:
                shapes[f"{part.name}_bias"] = count, rows
        return shapes
    parts = ((spec.gate, size, hidden), (spec.up, size, hidden), (spec.down, hidden, size))
    for expert in range(count):
        of_one = [(of_expert(part, expert), rows, columns) for part, rows, columns in parts]
        shapes |= _shapes_of(of_one)
    return shapes


def of_expert(part: Projection, expert: int) -> Projection:
    """Return the projection of one expert, from the experts' common name."""
    return replace(part, name=part.name.replace("*", str(expert)))


def _attention_projections(config: ModelConfig) -> tuple[tuple[Projection, int, int], ...]:
    """The attention's projections, with rows and columns."""
    layer, sizes, hidden = config.spec.layer, config.latent, config.hidden_size
    if sizes is None or layer.latent is None:
        return (
            (layer.q, config.q_size * (2 if layer.gates_output else 1), hidden),
            (layer.k, config.kv_size, hidden),
            (layer.v, config.kv_size, hidden),
            (layer.output, hidden, config.q_size),
        )
    heads, down = config.num_heads, layer.latent.query_down
    return (
        (layer.latent.down, sizes.rank + sizes.rotary, hidden),
        *(() if down is None else ((down, sizes.query_rank, hidden),)),
        (layer.q, heads * sizes.query, sizes.query_rank or hidden),
        (layer.k, heads * (sizes.key + sizes.value), sizes.rank),  # with the values between
        (layer.output, hidden, heads * sizes.value),
    )


def _latent_norms(config: ModelConfig) -> tuple[tuple[str | None, int], ...]:
    """Norms of latents, with their widths."""
    latent, sizes = config.spec.layer.latent, config.latent
    if latent is None or sizes is None:
        return ()
    return (latent.norm, sizes.rank), (latent.query_norm, sizes.query_rank)


# --- how weights are held ---


def of_lm_head(quantization: Quantization) -> Quantization:
    """Return the form of the LM head, and of a tied embedding: logits decide between tokens, so they get no less than 8
    bits."""
    return "int8" if quantization == "int4" else quantization


def form_of(quantization: Quantization, stored: WeightForm | None) -> WeightForm | None:
    """Return the form in which a projection is held that the checkpoint has in the form `stored`; None: in the dtype of
    activations."""
    match quantization:
        case "auto":
            return stored
        case "none":
            return None
        case "int8":
            return WeightForm("int8", None)
        case "int4":
            return WeightForm("int4", INT4_GROUP)


def common_form(forms: Sequence[WeightForm | None]) -> WeightForm | None:
    """Return the form of what `one_below_the_other` makes of weights of these forms; None: none, as where one is not
    quantised."""
    found = [form for form in forms if form is not None]
    if len(found) < len(forms) or len({form.kind.startswith("fp") for form in found}) > 1:
        return None
    sizes = [form.group_size for form in found if form.group_size is not None]
    return WeightForm(
        kind=found[0].kind if len({form.kind for form in found}) == 1 else "fp8" if found[0].kind[0] == "f" else "int8",
        group_size=math.gcd(*sizes) or None,
        has_offsets=any(form.has_offsets for form in found),
    )


def tensor_bytes(shape: tuple[int, ...], itemsize: int, form: WeightForm | None) -> int:
    """Return the bytes of a weight, or of any tensor where `form` is None, for activations of `itemsize` bytes."""
    count = math.prod(shape)
    if form is None:
        return count * itemsize
    rows, columns = shape
    values = count * form.bits // 8
    if form.group_size is None and not form.has_offsets and form.bits == 8:
        return values + rows * FP32_BYTES
    groups = rows * -(-columns // (form.group_size or columns))
    return values + groups * (2 if form.has_offsets else 1) * FP16_BYTES + rows * FP32_BYTES


def weight_bytes(
    config: ModelConfig,
    itemsize: int,
    quantization: Quantization,
    forms: Mapping[str, WeightForm] | None = None,
    parallel: ParallelForm = ONE_RANK,
) -> int:
    """Return the bytes of the rank with the most weights. Norms in fp32, and what each rank holds whole, are too small
    to count.

    `forms` are those of the checkpoint's quantised weights; None: those that config.json says.
    """
    stored = stored_forms(config) if forms is None else forms
    ranks, stages = parallel.tensor_ranks, parallel.stages
    layer, total, of_experts = config.spec.layer, [0] * stages, [0] * stages
    stage_of = {
        str(index): stage for stage in range(stages) for index in stage_layers(config.num_layers, stages, stage)
    }
    # What is computed by one projection is held in one form.
    together = ((layer.gate, layer.up), *(((layer.q, layer.k, layer.v),) if layer.latent is None else ()))
    fused = {part.name: parts for parts in together for part in parts}
    experts = layer.experts
    whole = {part.name for part in (experts.router, experts.shared_gate) if part} if experts is not None else set()
    conv = None
    if layer.delta is not None:
        whole |= {layer.delta.beta.name, layer.delta.decay.name}
        conv = layer.delta.conv
    each = {} if experts is None else shapes_of_each_expert(experts, config.hidden_size)
    for name, shape in expected_shapes(config):
        number, _, name_in_layer = name.removeprefix(f"{config.spec.layers}.").partition(".")
        stage = stage_of.get(number, 0)
        is_table = name == f"{config.spec.embedding}.weight"
        form = stored.get(name)
        if name == head_name(config):
            form = form_of(of_lm_head(quantization), form)
        elif is_table:
            form = form_of("auto" if quantization == "auto" else "none", form)
        elif len(shape) == 2:
            prefix, part = _layer_and_name(config, name)
            if layer.latent is not None and part == layer.k.name:  # what makes keys and values of latents is never
                total[stage] += tensor_bytes(shape, itemsize, None)
                continue
            parts = fused.get(part, ())
            form = common_form([stored.get(f"{prefix}{one.name}.weight") for one in parts]) if parts else form
            form = form_of("none" if part in whole else quantization, form)
        elif len(shape) == 3 and name_in_layer != conv:
            form, shape = form_of(quantization, form), (shape[0] * shape[2], shape[1])
        found = tensor_bytes(shape, itemsize, form)
        total[stage] += found
        of_experts[stage] += found if name_in_layer in each else 0
    if not parallel.has_whole_experts or experts is None:
        return -(-max(total) // ranks)
    count = experts.routing.num_experts
    most = -(-count // ranks) + parallel.spare_experts
    return max(
        -(-(of_stage - of_its_experts) // ranks) + of_its_experts * most // count
        for of_stage, of_its_experts in zip(total, of_experts, strict=True)
    )


def _layer_and_name(config: ModelConfig, name: str) -> tuple[str, str]:
    """A weight's layer, as its prefix, and its projection's name there."""
    layer = name.removeprefix(f"{config.spec.layers}.").partition(".")[0]
    prefix = f"{config.spec.layers}.{layer}."
    return prefix, name.removeprefix(prefix).removesuffix(".weight")


def stored_forms(config: ModelConfig) -> dict[str, WeightForm]:
    """Return the forms of the weights that config.json calls quantised, before there is a checkpoint."""
    stored = config.stored
    if stored is None:
        return {}

    def is_left(module: str) -> bool:
        return any(
            re.match(pattern.removeprefix("re:"), name) if pattern.startswith("re:") else f".{pattern}." in f".{name}."
            for pattern in stored.left
            for name in config.spec.names_in_files(module)
        )

    dimensions = (3,) if stored.method == "mxfp4" else (2, 3)
    delta = config.spec.layer.delta
    weights = (
        name
        for name, shape in expected_shapes(config)
        if len(shape) in dimensions and (delta is None or not name.endswith(delta.conv))
    )
    table = f"{config.spec.embedding}.weight"
    return {name: stored.form for name in weights if name != table and not is_left(name.removesuffix(".weight"))}


def head_name(config: ModelConfig) -> str:
    """The tensor that the logits are computed with."""
    return f"{config.spec.embedding if config.tie_word_embeddings else config.spec.lm_head}.weight"


def weights_as(quantization: Quantization, forms: Mapping[str, WeightForm]) -> str | None:
    """Describe the form of quantised weights in words; None: they are as all others."""
    if quantization != "auto":
        return None if quantization == "none" else quantization
    kinds = {_described(form) for form in forms.values()}
    return " and ".join(sorted(kinds)) or None


def _described(form: WeightForm) -> str:
    kind = "FP8" if form.kind == "fp8" else form.kind
    return kind if form.group_size is None else f"{kind} (groups of {form.group_size})"


def check_size(config: ModelShape, size: int, has_whole_experts: bool = False) -> None:
    """Raises ConfigError with both numbers where `size` ranks, a power of two, can't share the model."""
    if has_whole_experts and not config.num_experts:
        raise ConfigError("expert_parallel: the model has no experts that ranks could share: leave it out")
    cut_sizes = config.mlp_sizes(with_experts=not has_whole_experts)
    fault = None
    if config.num_heads % size:
        fault = f"its {config.num_heads} attention heads"
    elif max(size, config.num_kv_heads) % min(size, config.num_kv_heads):
        fault = f"its {config.num_kv_heads} KV heads"
    elif config.state is not None and (size > config.num_kv_heads or config.state.key_heads % size):
        fault = f"its state's {config.state.key_heads} key heads, of which each KV head's are on one rank"
    elif uneven := [features for features in sorted(cut_sizes) if features % size]:
        fault = f"its MLP's {uneven[0]} features"
    elif has_whole_experts and config.num_experts < size:
        fault = f"its {config.num_experts} experts"
    elif -(-config.vocab_size // size) * (size - 1) >= config.vocab_size:
        fault = f"its {config.vocab_size} tokens"
    if fault is not None:
        raise ConfigError(f"tensor_parallel: {size} ranks can't share the model evenly, for {fault}: use fewer ranks")


def check_contexts(config: ModelShape, parallel: ParallelForm, block_size: int) -> None:
    """Raises ConfigError where ranks that are to share the tokens of each block can't."""
    ranks = parallel.context_ranks
    if not parallel.shares_contexts:
        return
    if config.kv_kinds != 1:
        raise ConfigError(
            "context_parallel: ranks share the tokens of latents, and this model caches keys and values, whose heads "
            "they share: leave it out"
        )
    if block_size % ranks:
        raise ConfigError(
            f"context_parallel: {ranks} ranks can't share blocks of {block_size} tokens evenly: use a block_size that "
            f"is a multiple of {ranks}"
        )


def check_stages(config: ModelShape, count: int) -> None:
    """Raises ConfigError where `count` stages can't share the model's layers, with the counts that can."""
    if count > config.num_layers:
        raise ConfigError(
            f"pipeline_parallel: {count} stages can't share the model's {config.num_layers} layers: use fewer stages"
        )
    fitting = [number for number in range(1, count + 1) if _have_the_windows(config, number)]
    if fitting[-1] != count:
        raise ConfigError(
            f"pipeline_parallel: {count} stages of the model's {config.num_layers} layers don't each have layers with "
            f"a window and without in the same proportion: use {' or '.join(map(str, fitting))}"
        )


def _have_the_windows(config: ModelShape, count: int) -> bool:
    """Return True if each stage has the groups of layers that the model has: stages share each request's block
    table."""
    stages = (stage_layers(config.num_layers, count, stage) for stage in range(count))
    return all(config.groups_of(layers).windows == config.kv_groups.windows for layers in stages)


# --- beside the weights ---


WORKER_BYTES = 600 * 2**20
"""Host memory of a rank's process beside weights and cache: the interpreter, Ray, torch, compiled kernels."""
CUDA_CONTEXT_BYTES = 640 * 2**20
"""GPU memory of a process beside torch's: the driver's context (620 MiB on an H200, CUDA 13), loaded kernels,
libraries' workspaces."""
COMMUNICATOR_BYTES = 900 * 2**20
"""Memory of a rank's GPU that NCCL takes for one communicator, beside torch's (H200, NCCL 2.28)."""


def communicator_bytes(parallel: ParallelForm) -> int:
    """Return the memory of each rank's communicators: one with the ranks of its stage, one with the other stages."""
    return ((parallel.tensor_ranks > 1) + parallel.has_stages) * COMMUNICATOR_BYTES


@dataclass(frozen=True)
class StepBounds:
    """The largest step that an engine is given."""

    max_tokens: int
    max_sequences: int


DEFAULT_BOUNDS = StepBounds(max_tokens=2048, max_sequences=256)


def step_bytes_on_cpu(config: ModelShape, bounds: StepBounds, itemsize: int) -> int:
    """Estimate the bytes of the largest step: the live activations between a layer's operations, and the logits."""
    widest = max(config.q_size + 2 * config.kv_size + config.q_size, config.mlp_width)
    activations = bounds.max_tokens * (3 * config.hidden_size + widest) * itemsize
    return activations + bounds.max_sequences * config.vocab_size * FP32_BYTES


def kv_block_bytes(config: ModelShape, block_size: int, itemsize: int, parallel: ParallelForm = ONE_RANK) -> int:
    """Return the bytes that one block takes in all tensors of a rank, of the stage with the most layers."""
    heads = max(1, config.num_kv_heads // parallel.tensor_ranks)
    stages = (stage_layers(config.num_layers, parallel.stages, stage) for stage in range(parallel.stages))
    num_tensors = max(config.groups_of(layers).num_tensors for layers in stages)
    return config.kv_kinds * num_tensors * heads * config.head_dim * (block_size // parallel.context_ranks) * itemsize


@dataclass(frozen=True)
class Fit:
    """A model on one worker. Bytes are each rank's."""

    weight_bytes: int
    step_bytes: int
    cache_bytes: int  # what is left for KV; negative where weights and steps don't fit
    kv_bytes_per_token: int  # of layers that keep all
    kv_window_bytes: int  # of what a request keeps at most of layers with a window, while it decodes
    max_context: int  # tokens
    max_requests: int  # of that context at once
    rows: int  # that the cache has room for: KV of `row_tokens` tokens in one group of layers
    row_tokens: int = 1  # more where layers keep states, which take whole blocks

    def requests_of(self, shape: ModelShape, context: int, bounds: StepBounds = DEFAULT_BOUNDS) -> int:
        """Return how many requests of `context` tokens, prompt and answer together, have room at once."""
        return self.rows // shape.kv_groups.blocks_of(context, self.row_tokens, bounds.max_tokens)


def fit(
    shape: ModelShape,
    weights: int,
    *,
    itemsize: int,
    kv_itemsize: int,
    memory: int,
    parallel: ParallelForm = ONE_RANK,
    is_gpu: bool = False,
    bounds: StepBounds = DEFAULT_BOUNDS,
) -> Fit:
    """Return how a model fits one worker, each rank of which has at most `weights` bytes and may take `memory`.

    `itemsize` is the bytes of a number of activations, `kv_itemsize` of keys and values. The step is estimated as on
    CPUs: on a GPU the engine measures it when it is loaded, and it takes no more.
    """
    step = step_bytes_on_cpu(shape, bounds, itemsize)
    process = CUDA_CONTEXT_BYTES + communicator_bytes(parallel) if is_gpu else WORKER_BYTES
    cache = memory - weights - step - process
    # As many rows as the ranks that share blocks have together.
    context_ranks = parallel.context_ranks
    groups, row_tokens = shape.kv_groups, shape.fitting_block_size(1, kv_itemsize)
    of_row = kv_block_bytes(shape, row_tokens, kv_itemsize, replace(parallel, shares_contexts=False))
    rows = max(0, cache // of_row) * context_ranks
    context = min(shape.max_position, groups.tokens_in(rows, row_tokens, bounds.max_tokens))
    return Fit(
        weight_bytes=weights,
        step_bytes=step,
        cache_bytes=cache,
        kv_bytes_per_token=of_row * (groups.count - len(groups.windowed)) // context_ranks // row_tokens,
        kv_window_bytes=of_row * sum(groups.most_rows(group, row_tokens, 1) for group in groups.windowed),
        max_context=context,
        max_requests=rows // groups.blocks_of(context, row_tokens, bounds.max_tokens) if context else 0,
        rows=rows,
        row_tokens=row_tokens,
    )
