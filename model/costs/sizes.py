"""The memory that a decoder takes: arithmetic over its parameters and its config alone. No torch here.

Bytes are of weights, of KV and of the largest step, on each of the ranks that share the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from twostroke.model.config import ModelConfig, ModelShape, Quantization, WeightForm
from twostroke.model.parallel.form import ONE_RANK, ParallelForm
from twostroke.model.parameters import Module, decoder_modules, expected_shapes, tensor_shapes
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import stage_layers

FP32_BYTES, FP16_BYTES, INT64_BYTES = 4, 2, 8

INT4_GROUP = 64  # columns that share a scale


def num_parameters(config: ModelConfig) -> int:
    """Return the number of all parameters; tied ones count once."""
    return sum(map(math.prod, expected_shapes(config).values()))


def num_active_parameters(config: ModelConfig) -> int:
    """Return the number of parameters that one token is computed with; of embeddings for each layer not the table."""
    idle = 0
    for _, module in decoder_modules(config):
        if module.role == "layer_embedding.table":
            idle += sum(part.weights for part in module.parts)
        if module.kind == "experts" and config.spec.layer.experts is not None:
            each = sum(part.weights + (0 if part.bias is None else part.outputs) for part in module.parts)
            idle += (module.experts - config.spec.layer.experts.routing.top_k) * each
    return num_parameters(config) - idle


# --- how weights are held ---


def head_quantization(quantization: Quantization) -> Quantization:
    """Return the form of the LM head, and of a tied embedding: logits decide between tokens, so they get no less than 8
    bits."""
    return "int8" if quantization == "int4" else quantization


def held_form(quantization: Quantization, stored: WeightForm | None) -> WeightForm | None:
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
    stage_of = [stage for stage in range(stages) for _ in stage_layers(config.num_layers, stages, stage)]
    total, of_experts = [0] * stages, [0] * stages
    modules = list(decoder_modules(config))
    shapes = tensor_shapes([module for _, module in modules])
    for layer, module in modules:
        stage = 0 if layer is None else stage_of[layer]
        for part in module.parts:
            for name in module.tensors(part):
                # A tensor of several modules counts with the first of them.
                if (shape := shapes.pop(name, None)) is None:
                    continue
                if part.is_stacked:
                    rows, columns = shape[1:] if part.layout == "stack" else shape[:0:-1]
                    shape = shape[0] * rows, columns
                found = tensor_bytes(shape, itemsize, _held_form(module, name, quantization, stored))
                if part.bias is not None:
                    found += math.prod(shapes.pop(part.bias, ())) * itemsize
                total[stage] += found
                of_experts[stage] += found if module.kind == "experts" else 0
    if not parallel.has_whole_experts or config.spec.layer.experts is None:
        return -(-max(total) // ranks)
    count = config.spec.layer.experts.routing.num_experts
    most = -(-count // ranks) + parallel.spare_experts
    return max(
        -(-(of_stage - of_its_experts) // ranks) + of_its_experts * most // count
        for of_stage, of_its_experts in zip(total, of_experts, strict=True)
    )


def _held_form(
    module: Module, name: str, quantization: Quantization, stored: Mapping[str, WeightForm]
) -> WeightForm | None:
    """Return the form in which a module's tensor is held: one for all that is computed by one projection."""
    match module.kind:
        case "projection":
            form = stored.get(name)
            if len(module.parts) > 1:
                form = common_form([stored.get(part.tensor) for part in module.parts])
            return held_form(quantization, form)
        case "experts":
            return held_form(quantization, stored.get(name))
        case "head":
            return held_form(head_quantization(quantization), stored.get(name))
        case "table":
            return stored.get(name) if quantization == "auto" else None
        case "exact" | "norm" | "vector":
            return None


def stored_forms(config: ModelConfig) -> dict[str, WeightForm]:
    """Return the forms of the weights that config.json calls quantised, before there is a checkpoint."""
    stored, forms = config.stored, dict[str, WeightForm]()
    if stored is None:
        return forms
    for _, module in decoder_modules(config):
        if not module.is_projection or (module.kind == "head" and config.tie_word_embeddings):
            continue
        for part in module.parts:
            for name in module.tensors(part) if part.is_stacked or stored.method != "mxfp4" else ():
                names = config.spec.names_in_files(name.removesuffix(".weight"))
                found = None if stored.leaves(names) else stored.of_module(names)
                if found is not None:
                    forms[name] = found.form
    return forms


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


MAX_SCORES = 1 << 23
"""Numbers of each kind that an index has in memory at a time: keys, scores of each head, scores of each query."""
GATHERED_BYTES = 64 * 2**20
"""Bytes of chosen rows that are in memory at a time."""


def _choice_bytes(config: ModelShape, bounds: StepBounds, itemsize: int) -> int:
    """Return the bytes of a step that chooses tokens: its index's queries and choices, and scores and rows in parts."""
    if (index := config.index) is None:
        return 0
    of_token = 2 * index.heads * index.key * itemsize + index.top_k * FP32_BYTES
    of_score = 6 * FP32_BYTES + 2 * INT64_BYTES  # keys twice, of heads, in sum, and in the order of choice
    return bounds.max_tokens * of_token + MAX_SCORES * of_score + 2 * GATHERED_BYTES


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
