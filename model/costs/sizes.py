"""Tensors of a decoder, and the memory that it takes: arithmetic over its config alone. No torch here.

Bytes are of weights, of KV and of the largest step, on each of the ranks that share the model.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from twostroke.model.config import (
    DeltaSpec,
    ExpertsSpec,
    ModelConfig,
    ModelShape,
    Projection,
    Quantization,
)
from twostroke.model.costs.state_shapes import shapes_of, state_shapes
from twostroke.model.parallel.form import ONE_RANK, ParallelForm
from twostroke.model.shapes.weight_forms import WeightForm
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import stage_layers

FP32_BYTES, FP16_BYTES, INT64_BYTES = 4, 2, 8

INT4_GROUP = 64  # columns that share a scale


def num_parameters(config: ModelConfig) -> int:
    """Return the number of all parameters; tied ones count once."""
    return sum(math.prod(shape) for _, shape in expected_shapes(config))


def num_active_parameters(config: ModelConfig) -> int:
    """Return the number of parameters that one token is computed with; of embeddings for each layer not the table."""
    experts, parameters = config.spec.layer.experts, num_parameters(config)
    if (embedding := config.spec.layer_embedding) is not None:
        parameters -= config.vocab_size * config.num_layers * embedding.size
    if experts is None:
        return parameters
    idle = experts.routing.num_experts - experts.routing.top_k
    each = (2 if experts.gate is None else 3) * experts.size * config.hidden_size
    if experts.gate is not None and experts.gate.has_bias:
        each += 2 * experts.size + config.hidden_size
    return parameters - config.num_routed_layers * idle * each


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a checkpoint of this config holds."""
    spec, hidden = config.spec, config.hidden_size
    yield f"{spec.embedding}.weight", (config.vocab_size, hidden)
    if not config.tie_word_embeddings:
        yield f"{spec.lm_head}.weight", (config.vocab_size, hidden)
    yield f"{spec.final_norm}.weight", (hidden,)
    if (embedding := spec.layer_embedding) is not None:
        width = config.num_layers * embedding.size
        yield f"{embedding.table}.weight", (config.vocab_size, width)
        yield f"{embedding.projection.name}.weight", (width, hidden)
        yield f"{embedding.projection_norm}.weight", (embedding.size,)
    if config.has_mtp and spec.mtp is not None:
        head, _ = config.prefixes(config.num_layers - 1)
        for name in (spec.mtp.embedding_norm, spec.mtp.hidden_norm, spec.mtp.final_norm):
            yield f"{head}{name}.weight", (hidden,)
        yield f"{head}{spec.mtp.projection}.weight", (hidden, 2 * hidden)
    for index in range(config.num_layers):
        prefix, mlp_prefix = config.prefixes(index)
        layer, shapes = spec.layer, dict[str, tuple[int, ...]]()
        if (mlp := config.mlp_of(index)) is not None:
            parts = ((mlp.gate, mlp.size, hidden), (mlp.up, mlp.size, hidden), (mlp.down, hidden, mlp.size))
            shapes |= shapes_of(parts)
        if (experts := config.experts_of(index)) is not None:
            shapes |= _shapes_of_experts(experts, hidden)
        around = ((prefix, layer.input_norm), (mlp_prefix, layer.mlp_norm))
        behind = ((prefix, layer.attention_norm), (mlp_prefix, layer.output_norm))
        for before, norm in (*around, *behind):
            if before is not None and norm is not None:
                yield f"{before}{norm}.weight", (hidden,)
        shapes_by_prefix = (prefix, _mixer_shapes(config, index)), (mlp_prefix, shapes)
        for before, of_part in (*shapes_by_prefix, (prefix, _layer_embedding_shapes(config))):
            for name, shape in of_part.items():
                yield f"{before}{name}", shape


def _mixer_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's attention, or of what keeps a state, by names within the layer."""
    layer = config.spec.layer
    if config.keeps_state(index):
        return state_shapes(config)
    owns_kv = config.kv_owner(index) == index
    norms = (
        *((norm, config.heads(index).dim) for norm in (layer.q_norm, layer.k_norm if owns_kv else None)),
        (layer.q_row_norm, config.q_size),
        (layer.k_row_norm, config.kv_size),
        *_latent_norms(config),
    )
    shapes: dict[str, tuple[int, ...]] = {f"{norm}.weight": (width,) for norm, width in norms if norm is not None}
    if layer.sinks is not None:
        shapes[layer.sinks] = (config.num_heads,)
    if layer.output_scale is not None:
        shapes[layer.output_scale] = (1,)
    return shapes | shapes_of(_attention_projections(config, index)) | _index_shapes(config, index)


def _layer_embedding_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a layer makes of its tokens' embeddings for it."""
    parts, hidden = config.spec.layer_embedding, config.hidden_size
    if parts is None:
        return {}
    shapes = shapes_of([(parts.gate, parts.size, hidden), (parts.output, hidden, parts.size)])
    return shapes | {f"{parts.norm}.weight": (hidden,)}


def _shapes_of_experts(spec: ExpertsSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of experts and of the router."""
    count = spec.routing.num_experts
    shapes = shapes_of([(spec.router, count, hidden)])
    if spec.correction is not None:
        shapes[spec.correction] = (count,)
    if spec.shared_gate is not None:
        shapes |= shapes_of([(spec.shared_gate, 1, hidden)])
    if spec.scales is not None:
        shapes[spec.scales] = (count,)
    if (norms := spec.norms) is not None:
        shapes |= {norms.router: (hidden,)} | {
            f"{name}.weight": (hidden,) for name in (norms.input, norms.output, norms.beside)
        }
    return shapes | shapes_of_each_expert(spec, hidden)


def shapes_of_each_expert(spec: ExpertsSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all of a layer's experts, by names within a layer."""
    count, size = spec.routing.num_experts, spec.size
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.are_stacked and spec.gate is not None:
        for part, columns, rows in ((spec.gate, hidden, 2 * size), (spec.down, size, hidden)):
            shapes[part.name] = (count, rows, columns) if spec.stacks_rows else (count, columns, rows)
            if part.has_bias:
                shapes[f"{part.name}_bias"] = count, rows
        return shapes
    parts = ((spec.gate, size, hidden), (spec.up, size, hidden), (spec.down, hidden, size))
    for expert in range(count):
        of_one = [(of_expert(part, expert), rows, columns) for part, rows, columns in parts if part is not None]
        shapes |= shapes_of(of_one)
    return shapes


def of_expert(part: Projection, expert: int) -> Projection:
    """Return the projection of one expert, from the experts' common name."""
    return replace(part, name=part.name.replace("*", str(expert)))


def _attention_projections(config: ModelConfig, index: int) -> tuple[tuple[Projection, int, int], ...]:
    """Return the projections of a layer's attention, with rows and columns."""
    layer, sizes, hidden = config.spec.layer, config.latent, config.hidden_size
    if sizes is None or layer.latent is None:
        queries, width = config.query_width(index), config.heads(index).width
        kept = (layer.k, config.value_projection(index)) if config.kv_owner(index) == index else ()
        return (
            (layer.q, queries * (2 if layer.gates_output else 1), hidden),
            *((part, width, hidden) for part in kept),
            (layer.output, hidden, queries),
        )
    heads, down = config.num_heads, layer.latent.query_down
    return (
        (layer.latent.down, sizes.rank + sizes.rotary, hidden),
        *(() if down is None else ((down, sizes.query_rank, hidden),)),
        (layer.q, heads * sizes.query, sizes.query_rank or hidden),
        (layer.k, heads * (sizes.key + sizes.value), sizes.rank),  # with the values between
        (layer.output, hidden, heads * sizes.value),
    )


def _index_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's index, where it has one."""
    latent, sizes = config.spec.layer.latent, config.index
    spec = None if latent is None else latent.index
    if config.latent is None or sizes is None or spec is None or layer in sizes.sharing:
        return {}
    projections = (
        (spec.query, sizes.heads * sizes.key, config.latent.query_rank),
        (spec.key, sizes.key, config.hidden_size),
        (spec.weights, sizes.heads, config.hidden_size),
    )
    return shapes_of(projections) | {f"{spec.key_norm}.{part}": (sizes.key,) for part in ("weight", "bias")}


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
        prefix: stage
        for stage in range(stages)
        for index in stage_layers(config.num_layers, stages, stage)
        for prefix in config.prefixes(index)
    }
    # What is computed by one projection is held in one form.
    together = ((layer.gate, layer.up), *(((layer.q, layer.k, layer.v),) if layer.latent is None else ()))
    fused = {part.name: parts for parts in together if None not in parts for part in parts}
    experts = layer.experts
    whole = {part.name for part in (experts.router, experts.shared_gate) if part} if experts is not None else set()
    if layer.latent is not None and layer.latent.index is not None:
        whole.add(layer.latent.index.weights.name)
    conv = None if layer.state is None else layer.state.conv
    if isinstance(layer.state, DeltaSpec):
        whole |= {layer.state.beta.name, layer.state.decay.name}
    each = {} if experts is None else shapes_of_each_expert(experts, config.hidden_size)
    tables = {f"{config.spec.embedding}.weight"}
    if (embedding := config.spec.layer_embedding) is not None:
        tables.add(f"{embedding.table}.weight")
        whole |= {part.name for part in (embedding.projection, embedding.gate, embedding.output)}
    shapes = dict(expected_shapes(config))
    for name, shape in shapes.items():
        number, _, name_in_layer = name.removeprefix(f"{config.spec.layers}.").partition(".")
        stage = stage_of.get(f"{config.spec.layers}.{number}.", 0)
        is_table = name in tables
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
            names = [f"{prefix}{one.name}.weight" for one in parts]
            form = common_form([stored.get(one) for one in names if one in shapes]) if parts else form
            form = form_of("none" if part in whole else quantization, form)
        elif len(shape) == 3 and name_in_layer != conv:
            rows, columns = shape[1:] if experts is not None and experts.stacks_rows else shape[:0:-1]
            form, shape = form_of(quantization, form), (shape[0] * rows, columns)
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

    dimensions = (3,) if stored.method == "mxfp4" else (2, 3)
    state = config.spec.layer.state
    weights = (
        name
        for name, shape in expected_shapes(config)
        if len(shape) in dimensions and (state is None or not name.endswith(state.conv))
    )
    forms: dict[str, WeightForm] = {}
    for name in weights:
        names = config.spec.names_in_files(name.removesuffix(".weight"))
        found = None if name == f"{config.spec.embedding}.weight" or stored.leaves(names) else stored.of_module(names)
        if found is not None:
            forms[name] = found.form
    return forms


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
    elif size > config.num_kv_heads and len({heads.number for heads in config.layer_heads}) > 1:
        fault = f"its {config.num_kv_heads} KV heads, of which layers have different numbers"
    elif config.state is not None and (size > config.num_kv_heads or not config.state.can_be_shared_by(size)):
        fault = "its states, of which each KV head's and each group's part is on one rank"
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
    if config.index is not None:
        raise ConfigError(
            "context_parallel: ranks would have to choose among all tokens of a context, and this model's index knows "
            "those of one rank alone: leave it out"
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
    if count > 1 and config.has_mtp:
        raise ConfigError(
            "pipeline_parallel: an MTP head needs the whole model's hidden states on one stage: leave it out, or set "
            "speculation.method: auto"
        )
    if count > 1 and any(config.kv_owner(layer) != layer for layer in range(config.num_layers)):
        raise ConfigError("pipeline_parallel: the model's layers share keys and values, so stages can't: leave it out")
    if config.index is not None:
        stages = [stage_layers(config.num_layers, count, stage).start for stage in range(count)]
        if cut := sorted(config.index.sharing & {*stages}):
            raise ConfigError(
                f"pipeline_parallel: a stage would begin with layer {cut[0]}, which attends to what the layer before "
                "chooses: use another number of stages"
            )
    fitting = [number for number in range(1, count + 1) if _have_the_windows(config, number)]
    if fitting[-1] != count:
        raise ConfigError(
            f"pipeline_parallel: {count} stages of the model's {config.num_layers} layers don't each have layers with "
            f"a window and without in the same proportion: use {' or '.join(map(str, fitting))}"
        )


def _have_the_windows(config: ModelShape, count: int) -> bool:
    """Return True if each stage has the groups of layers that the model has, and its part of the KV layers: stages
    share each request's block table."""
    for stage in range(count):
        layers, of_kv = (stage_layers(number, count, stage) for number in (config.num_layers, len(config.kv_layers)))
        if config.kv_layers_of(layers) != config.kv_layers[of_kv.start : of_kv.stop]:
            return False
        if config.groups_of(layers).windows != config.kv_groups.windows:
            return False
    return True


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
    mixed = max(2 * (config.query_width(layer) + config.heads(layer).width) for layer in range(config.num_layers))
    widest = max(mixed, config.mlp_width)
    activations = bounds.max_tokens * (3 * config.hidden_size + widest) * itemsize
    logits = bounds.max_sequences * config.vocab_size * FP32_BYTES
    return activations + logits + _choice_bytes(config, bounds, itemsize)


MOST_SCORES = 1 << 23
"""Numbers of each kind that an index has in memory at a time: keys, scores of each head, scores of each query."""
GATHERED_BYTES = 64 * 2**20
"""Bytes of chosen rows that are in memory at a time."""


def _choice_bytes(config: ModelShape, bounds: StepBounds, itemsize: int) -> int:
    """Return the bytes of a step that chooses tokens: its index's queries and choices, and scores and rows in parts."""
    if (index := config.index) is None:
        return 0
    of_token = 2 * index.heads * index.key * itemsize + index.top_k * FP32_BYTES
    of_score = 6 * FP32_BYTES + 2 * INT64_BYTES  # keys twice, of heads, in sum, and in the order of choice
    return bounds.max_tokens * of_token + MOST_SCORES * of_score + 2 * GATHERED_BYTES


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
