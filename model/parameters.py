"""Every parameter of a decoder, from its config alone: the only place that walks a model's layers. No torch here.

A module is what an engine computes with at once: a projection, whose rows may come from several tensors of a
checkpoint, or one vector. Each of its parts names a tensor on disk, and the rows and columns that belong to the module,
with their division among ranks. The loader builds modules from parts; memory, FLOPs, `check` and the forms of quantised
checkpoints are sums over them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from twostroke.model.config import (
    ConvolutionSpec,
    DeltaSpec,
    ExpertsSpec,
    MambaSpec,
    MLASizes,
    MLASpec,
    MlpSpec,
    ModelConfig,
    Projection,
    RopeConfig,
    StateSpec,
)
from twostroke.model.parallel.form import Shard, of_heads, shifted
from twostroke.model.state_sizes import ConvolutionSizes, DeltaSizes, MambaSizes, StateSizes

Shape = tuple[int, ...]


class Span(NamedTuple):
    """Neighbouring rows or columns of a tensor, and their division among ranks."""

    first: int
    number: int
    # whole: each rank has all. equal: one share each. heads: of `heads` heads, of which ranks beyond their number have
    # copies. experts: equal, or whole where ranks have whole experts.
    cut: Literal["whole", "equal", "heads", "vocabulary", "experts"] = "whole"
    heads: int = 0

    def on(self, shard: Shard) -> slice:
        """Return those of one rank."""
        match self.cut:
            case "whole":
                found = slice(0, self.number)
            case "equal":
                found = shard.part(self.number)
            case "heads":
                found = of_heads(shard.kv_heads(self.heads), self.number // self.heads)
            case "vocabulary":
                found = shard.vocabulary(self.number)
            case "experts":
                found = shard.inside_experts(self.number)
        return shifted(found, self.first)


Product = Literal[
    "queries",
    "keys and values",
    "attention output",
    "state inputs",
    "state outputs",
    "MLP",
    "experts",
    "layer embeddings",
    "LM head",
]
"""Product of a step that a weight takes part in."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and columns of a tensor on disk, in the order in which a module has them."""

    tensor: str  # the name on disk; `*` stands for the number of an expert
    rows: Span
    columns: Span | None = None  # None: of a vector
    bias: str | None = None  # the name of a tensor with a number a row
    # The order of rows within each head, where the module has them in another one; of some rows it is a choice.
    order: tuple[int, ...] | None = None
    head: int = 0  # rows of a head on disk
    # matrix: [rows, columns]. convolution: [rows, 1, columns]. stack: [experts, rows, columns]. transposed: [experts,
    # columns, rows].
    layout: Literal["matrix", "convolution", "stack", "transposed"] = "matrix"
    product: Product | None = None  # None: none, or too small to count

    @property
    def outputs(self) -> int:
        """Number of rows that the module has of it, on all ranks."""
        return self.rows.number if self.order is None else self.rows.number // self.head * len(self.order)

    @property
    def weights(self) -> int:
        """Number of weights that a token is multiplied with, on all ranks."""
        return self.outputs * (1 if self.columns is None else self.columns.number)

    @property
    def is_stacked(self) -> bool:
        """True if its tensor has all experts."""
        return self.layout in ("stack", "transposed")

    def shape(self, rows: int, experts: int) -> Shape:
        """Return the shape of the tensor, which has so many rows."""
        if self.columns is None:
            return (rows,)
        columns = self.columns.first + self.columns.number
        match self.layout:
            case "matrix":
                return rows, columns
            case "convolution":
                return rows, 1, columns
            case "stack":
                return experts, rows, columns
            case "transposed":
                return experts, columns, rows


@dataclass(frozen=True, slots=True)
class Module:
    """What is computed with at once: its parts one below the other."""

    role: str
    # projection: quantised where that is asked for. exact: a projection that never is. head: the LM head's, which keeps
    # 8 bits. experts: of each expert its gate, if any, its up and its down. norm: of an RMSNorm. vector: used as it is.
    kind: Literal["projection", "exact", "head", "table", "experts", "norm", "vector"]
    parts: tuple[Part, ...]
    experts: int = 0

    @property
    def is_projection(self) -> bool:
        """True if checkpoints may have it quantised."""
        return self.kind in ("projection", "exact", "head", "experts")

    def tensors(self, part: Part) -> list[str]:
        """Return the names of a part's weights on disk: of experts as many as there are, or one."""
        if "*" not in part.tensor:
            return [part.tensor]
        return [expert_name(part.tensor, expert) for expert in range(self.experts)]


def expert_name(name: str, expert: int) -> str:
    """Return the name of one expert's, from the experts' common name."""
    return name.replace("*", str(expert))


def decoder_modules(config: ModelConfig) -> Iterator[tuple[int | None, Module]]:
    """Yield all modules of a decoder, each with its layer; None: of the ends."""
    for module in end_modules(config):
        yield None, module
    if config.has_mtp:
        for module in mtp_modules(config):
            yield config.num_layers - 1, module
    for layer in range(config.num_layers):
        for module in layer_modules(config, layer):
            yield layer, module


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor that a checkpoint of this config holds, by its name."""
    return tensor_shapes([module for _, module in decoder_modules(config)])


def tensor_shapes(modules: Sequence[Module]) -> dict[str, Shape]:
    """Return the shapes of all tensors of modules, by their names: a tensor ends with the last of its parts."""
    rows, shapes = dict[str, int](), dict[str, Shape]()
    for part in (part for module in modules for part in module.parts):
        rows[part.tensor] = max(part.rows.first + part.rows.number, rows.get(part.tensor, 0))
    for module in modules:
        is_apart = any("*" in part.tensor for part in module.parts)
        for expert in range(module.experts if is_apart else 1):
            for part in module.parts:
                end = rows[part.tensor]
                shapes[expert_name(part.tensor, expert)] = part.shape(end, module.experts)
                if part.bias is not None:
                    shapes[expert_name(part.bias, expert)] = (module.experts, end) if part.is_stacked else (end,)
    return shapes


def head_tensor(config: ModelConfig) -> str:
    """Return the name of the tensor that the logits are computed with."""
    return f"{config.spec.embedding if config.tie_word_embeddings else config.spec.lm_head}.weight"


def head_order(rope: RopeConfig, head_dim: int) -> tuple[int, ...] | None:
    """Return the checkpoint's dimension for each place of a head of queries or keys; None: all stay.

    Kernels rotate dimension i with dimension i + D / 2 (architectures/rope.py).
    """
    rotated = rope.rotated or head_dim
    if rope.type == "proportional" or (rotated == head_dim and not rope.interleaves):
        return None
    rotary = list(range(rotated))
    firsts, seconds = (
        (rotary[::2], rotary[1::2]) if rope.interleaves else (rotary[: rotated // 2], rotary[rotated // 2 :])
    )
    still = list(range(rotated, head_dim))
    return *firsts, *still[: len(still) // 2], *seconds, *still[len(still) // 2 :]


# --- the ends ---


def end_modules(config: ModelConfig) -> list[Module]:
    """Return the modules before the first layer and behind the last."""
    spec, hidden = config.spec, config.hidden_size
    tokens, columns = Span(0, config.vocab_size, "vocabulary"), Span(0, hidden)
    found = [Module("lm_head", "head", (Part(head_tensor(config), tokens, columns, product="LM head"),))]
    if not config.tie_word_embeddings:
        found.insert(0, Module("embedding", "table", (Part(f"{spec.embedding}.weight", tokens, columns),)))
    found.append(_norm("final_norm", "", spec.final_norm, hidden))
    if (embedding := spec.layer_embedding) is not None:
        width = Span(0, config.num_layers * embedding.size)
        table = Part(f"{embedding.table}.weight", tokens, width)
        found += [
            Module("layer_embedding.table", "table", (table,)),
            _exact("layer_embedding.projection", "", embedding.projection, width.number, hidden, "layer embeddings"),
            _norm("layer_embedding.norm", "", embedding.projection_norm, embedding.size),
        ]
    return found


def mtp_modules(config: ModelConfig) -> list[Module]:
    """Return the modules of an MTP head beside its layer's own."""
    spec, hidden = config.spec.mtp, config.hidden_size
    if spec is None:
        return []
    prefix, _ = config.prefixes(config.num_layers - 1)
    norms = {"embedding": spec.embedding_norm, "hidden": spec.hidden_norm, "final": spec.final_norm}
    tensor, rows = f"{prefix}{spec.projection}.weight", Span(0, hidden)
    return [
        *(_norm(f"mtp.{role}_norm", prefix, name, hidden) for role, name in norms.items()),
        Module("mtp.of_embedding", "projection", (Part(tensor, rows, Span(0, hidden)),)),
        Module("mtp.of_hidden", "projection", (Part(tensor, rows, Span(hidden, hidden)),)),
    ]


# --- a layer ---


def layer_modules(config: ModelConfig, layer: int) -> list[Module]:
    """Return the modules of a layer, in the order in which it computes with them, norms around it first."""
    prefix, mlp_prefix = config.prefixes(layer)
    spec, hidden = config.spec.layer, config.hidden_size
    norms = [("norms.input", prefix, spec.input_norm), ("norms.attention", prefix, spec.attention_norm)]
    if mlp_prefix is not None:
        norms[1:1] = [("norms.mlp", mlp_prefix, spec.mlp_norm)]
        norms.append(("norms.output", mlp_prefix, spec.output_norm))
    found = [_norm(role, before, name, hidden) for role, before, name in norms if name is not None]
    if config.state is not None and spec.state is not None and config.keeps_state(layer):
        found += _state_modules(spec.state, config.state, prefix, hidden)
    elif config.latent is not None and spec.latent is not None:
        found += _mla_modules(config, spec.latent, config.latent, prefix, layer)
    else:
        found += _attention_modules(config, prefix, layer)
    if mlp_prefix is not None:
        if (mlp := config.mlp_of(layer)) is not None:
            found += _mlp_modules(mlp, mlp_prefix, hidden)
        if (experts := config.experts_of(layer)) is not None:
            found += _experts_modules(experts, mlp_prefix, hidden)
    if (embedding := config.spec.layer_embedding) is not None:
        found += [
            _exact("embedding_gate.gate", prefix, embedding.gate, embedding.size, hidden, "layer embeddings"),
            _exact("embedding_gate.output", prefix, embedding.output, hidden, embedding.size, "layer embeddings"),
            _norm("embedding_gate.norm", prefix, embedding.norm, hidden),
        ]
    return found


def _attention_modules(config: ModelConfig, prefix: str, layer: int) -> list[Module]:
    spec, heads, hidden = config.spec.layer, config.heads(layer), Span(0, config.hidden_size)
    owns_kv, order = config.kv_owner(layer) == layer, head_order(config.rope, config.rotary_dim(0))
    queries = Span(0, config.query_width(layer), "equal")
    kv = Span(0, heads.width, "heads", heads.number)
    head = 0 if order is None else len(order)
    found = []
    for role, name in (("q_norm", spec.q_norm), ("k_norm", spec.k_norm if owns_kv else None)):
        if name is not None:
            found.append(_norm(role, prefix, name, heads.dim, order))
    for role, name, rows in (("q_row_norm", spec.q_row_norm, queries), ("k_row_norm", spec.k_row_norm, kv)):
        if name is not None:
            found.append(Module(role, "norm", (Part(f"{prefix}{name}.weight", rows, order=order, head=head),)))
    if spec.sinks is not None:
        found.append(_vector("sinks", f"{prefix}{spec.sinks}", Span(0, config.num_heads, "equal")))
    if spec.output_scale is not None:
        found.append(_vector("output_scale", f"{prefix}{spec.output_scale}", Span(0, 1)))
    q = _part(prefix, spec.q, queries, hidden, "queries", order, head)
    gates = []
    if spec.gates_output:
        both, dim = queries._replace(number=2 * queries.number), heads.dim
        q = replace(q, rows=both, order=order or tuple(range(dim)), head=2 * dim)
        gates = [Module("output_gate", "projection", (replace(q, order=tuple(range(dim, 2 * dim))),))]
    qkv = [q]
    if owns_kv:
        qkv.append(_part(prefix, spec.k, kv, hidden, "keys and values", order, head))
        values = config.value_projection(layer)
        rotated = values == spec.k  # as the keys that they are made by
        order, head = (order, head) if rotated else (None, 0)
        qkv.append(_part(prefix, values, kv, hidden, "keys and values", order, head))
    output = _part(prefix, spec.output, Span(0, config.hidden_size), queries, "attention output")
    return [*found, Module("qkv", "projection", tuple(qkv)), *gates, Module("output", "projection", (output,))]


def _mla_modules(config: ModelConfig, latent: MLASpec, sizes: MLASizes, prefix: str, layer: int) -> list[Module]:
    """Return the modules of MLA: projections to latents are whole on each rank."""
    spec, heads, hidden, rank = config.spec.layer, config.num_heads, Span(0, config.hidden_size), sizes.rank
    order = head_order(config.rope, sizes.rotary)
    down, up = Span(0, rank + sizes.rotary), Span(0, heads * (sizes.key + sizes.value), "equal")
    queries, mixed = Span(0, heads * sizes.query, "equal"), Span(0, heads * sizes.value, "equal")
    of_down, of_query = (_behind(before, order) for before in (rank, sizes.key))
    inputs = Span(0, sizes.query_rank or config.hidden_size)
    found = [_norm("latent.norm", prefix, latent.norm, rank)]
    if latent.query_norm is not None:
        found.append(_norm("latent.query_norm", prefix, latent.query_norm, sizes.query_rank))
    found.append(_projection("latent.down", _part(prefix, latent.down, down, hidden, "keys and values", *of_down)))
    if latent.query_down is not None:
        rows = Span(0, sizes.query_rank)
        found.append(_projection("latent.query_down", _part(prefix, latent.query_down, rows, hidden, "queries")))
    found += [
        _projection("latent.query", _part(prefix, spec.q, queries, inputs, "queries", *of_query)),
        Module("latent.up", "exact", (_part(prefix, spec.k, up, Span(0, rank), "attention output"),)),
        _projection("output", _part(prefix, spec.output, hidden, mixed, "attention output")),
    ]
    index, of_index = latent.index, sizes.index
    if index is None or of_index is None or layer in of_index.sharing:
        return found
    # What rotates is the first in files, and the last here as it is in queries.
    rotary = head_order(replace(config.rope, interleaves=index.interleaves), sizes.rotary)
    places = (*range(sizes.rotary, of_index.key), *(range(sizes.rotary) if rotary is None else rotary))
    query, key = Span(0, of_index.heads * of_index.key), Span(0, of_index.key)
    ordered = places, of_index.key
    return [
        *found,
        _projection("index.query", _part(prefix, index.query, query, inputs, "queries", *ordered)),
        _projection("index.key", _part(prefix, index.key, key, hidden, "keys and values", *ordered)),
        _exact("index.weights", prefix, index.weights, of_index.heads, config.hidden_size, "queries"),
        *(
            Module(
                f"index.norm_{kind}", "vector", (Part(f"{prefix}{index.key_norm}.{kind}", key, None, None, *ordered),)
            )
            for kind in ("weight", "bias")
        ),
    ]


def _behind(still: int, order: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, int]:
    """Return the order of a head whose last dimensions rotate, `still` others before them, and the head's rows."""
    if order is None:
        return None, 0
    return (*range(still), *(still + place for place in order)), still + len(order)


def _state_modules(spec: StateSpec, sizes: StateSizes, prefix: str, hidden: int) -> list[Module]:
    """Return the modules of a layer that keeps a state. Raises TypeError for sizes of another kind than its parts."""
    columns = Span(0, sizes.output_width, "equal")
    output = _projection("output", _part(prefix, spec.output, Span(0, hidden), columns, "state outputs"))
    match spec, sizes:
        case DeltaSpec(), DeltaSizes():
            inputs, others = _delta_modules(spec, sizes, prefix, Span(0, hidden))
        case MambaSpec(), MambaSizes():
            inputs, others = _mamba_modules(spec, sizes, prefix, Span(0, hidden))
        case ConvolutionSpec(), ConvolutionSizes():
            thirds = [columns._replace(first=third * columns.number) for third in range(3)]
            parts = _inputs(prefix, spec.inputs, thirds, Span(0, hidden))
            inputs, others = [Module("state.inputs", "projection", parts)], _convolution(spec, sizes, prefix, [columns])
        case _:
            raise TypeError(f"{spec} has no {sizes}")
    return [*inputs, output, *others]


def _delta_modules(spec: DeltaSpec, sizes: DeltaSizes, prefix: str, hidden: Span) -> tuple[list[Module], list[Module]]:
    """Return the modules before a delta net's output, and the others."""
    keys, values = sizes.key_width, Span(0, sizes.value_width, "equal")
    heads = Span(0, sizes.value_heads, "equal")
    convolved = [Span(0, keys, "equal"), Span(keys, keys, "equal"), values._replace(first=2 * keys)]
    if spec.by_key_heads:
        each = sizes.value_heads // sizes.key_heads
        widths = (sizes.key, sizes.key, *[each * sizes.value] * 2)
        inputs = _by_key_heads(prefix, spec.qkv, hidden, sizes.key_heads, widths)
        strengths = _by_key_heads(prefix, spec.beta, hidden, sizes.key_heads, (each, each))
    else:
        inputs = _inputs(prefix, spec.qkv, convolved, hidden) + _inputs(prefix, spec.gate, [values], hidden)
        strengths = _inputs(prefix, spec.beta, [heads], hidden) + _inputs(prefix, spec.decay, [heads], hidden)
    projections = [Module("state.inputs", "projection", inputs), Module("state.strengths", "exact", strengths)]
    return projections, [
        *_convolution(spec, sizes, prefix, convolved),
        _vector("state.decay", f"{prefix}{spec.decay_log}", heads),
        _vector("state.decay_bias", f"{prefix}{spec.decay_bias}", heads),
        _vector("state.norm", f"{prefix}{spec.norm}.weight", Span(0, sizes.value)),
    ]


def _mamba_modules(spec: MambaSpec, sizes: MambaSizes, prefix: str, hidden: Span) -> tuple[list[Module], list[Module]]:
    """Return the modules before the output of a layer of Mamba-2, and the others."""
    width, heads = Span(0, sizes.output_width, "equal"), Span(0, sizes.heads, "equal")
    group = Span(width.number, sizes.group_width, "heads", sizes.groups)
    convolved = [width, group, group._replace(first=width.number + sizes.group_width)]
    inputs = [width, *(span._replace(first=span.first + width.number) for span in convolved)]
    time_steps = [heads._replace(first=width.number + sizes.conv_width)]
    projections = [
        Module("state.inputs", "projection", _inputs(prefix, spec.inputs, inputs, hidden)),
        Module("state.time_steps", "exact", _inputs(prefix, spec.inputs, time_steps, hidden)),
    ]
    return projections, [
        *_convolution(spec, sizes, prefix, convolved),
        _vector("state.decay", f"{prefix}{spec.decay_log}", heads),
        _vector("state.skip", f"{prefix}{spec.skip}", heads),
        _vector("state.step_bias", f"{prefix}{spec.step_bias}", heads),
        _vector("state.norm", f"{prefix}{spec.norm}.weight", width),
    ]


def _convolution(spec: StateSpec, sizes: StateSizes, prefix: str, channels: Sequence[Span]) -> list[Module]:
    """Return the modules of a short convolution."""
    name, taps = f"{prefix}{spec.conv}", Span(0, sizes.taps)
    found = [Module("state.conv", "vector", tuple(Part(name, span, taps, layout="convolution") for span in channels))]
    if not isinstance(spec, DeltaSpec) and spec.conv_bias is not None:
        biases = tuple(Part(f"{prefix}{spec.conv_bias}", span) for span in channels)
        found.append(Module("state.conv_bias", "vector", biases))
    return found


def _inputs(prefix: str, projection: Projection, rows: Sequence[Span], hidden: Span) -> tuple[Part, ...]:
    return tuple(_part(prefix, projection, span, hidden, "state inputs") for span in rows)


def _by_key_heads(
    prefix: str, projection: Projection, hidden: Span, key_heads: int, widths: Sequence[int]
) -> tuple[Part, ...]:
    """Return parts of a projection whose rows are, key head by key head, so many of each part."""
    head, first, parts = sum(widths), 0, []
    rows = Span(0, key_heads * head, "equal")
    for width in widths:
        order = tuple(range(first, first + width))
        parts.append(_part(prefix, projection, rows, hidden, "state inputs", order, head))
        first += width
    return tuple(parts)


def _mlp_modules(spec: MlpSpec, prefix: str, hidden: int) -> list[Module]:
    inner, columns = Span(0, spec.size, "equal"), Span(0, hidden)
    ups = tuple(_part(prefix, part, inner, columns, "MLP") for part in (spec.gate, spec.up) if part is not None)
    down = _part(prefix, spec.down, columns, inner, "MLP")
    return [Module("mlp.gate_up", "projection", ups), _projection("mlp.down", down)]


def _experts_modules(spec: ExpertsSpec, prefix: str, hidden: int) -> list[Module]:
    """Return the modules of a layer's experts, and of what chooses among them, which every rank has whole."""
    count = spec.routing.num_experts
    found = [_exact("experts.router", prefix, spec.router, count, hidden, "MLP")]
    if spec.correction is not None:
        found.append(_vector("experts.correction", f"{prefix}{spec.correction}", Span(0, count)))
    if spec.shared_gate is not None:
        found.append(_exact("experts.shared_gate", prefix, spec.shared_gate, 1, hidden))
    if spec.scales is not None:
        found.append(_vector("experts.scales", f"{prefix}{spec.scales}", Span(0, count)))
    if spec.norms is not None:
        found.append(_vector("experts.norms.router", f"{prefix}{spec.norms.router}", Span(0, hidden)))
        named = (("input", spec.norms.input), ("output", spec.norms.output), ("beside", spec.norms.beside))
        found += [_norm(f"experts.norms.{role}", prefix, name, hidden) for role, name in named]
    inner, columns = Span(0, spec.size, "experts"), Span(0, hidden)
    if not spec.are_stacked or spec.gate is None:
        ups = [_part(prefix, part, inner, columns, "experts") for part in (spec.gate, spec.up) if part is not None]
        down = _part(prefix, spec.down, columns, inner, "experts")
        return [*found, Module("experts", "experts", (*ups, down), count)]
    layout: Literal["stack", "transposed"] = "stack" if spec.stacks_rows else "transposed"

    def stacked(part: Projection, rows: Span, inputs: Span) -> Part:
        name = f"{prefix}{part.name}"
        bias = f"{name}_bias" if part.has_bias else None
        return Part(name, rows, inputs, bias, layout=layout, product="experts")

    if spec.up.first_row:
        ups = [stacked(spec.up, inner._replace(first=first), columns) for first in (0, spec.up.first_row)]
    else:  # gates and ups take turns
        both = stacked(spec.up, inner._replace(number=2 * spec.size), columns)
        ups = [replace(both, order=(place,), head=2) for place in (0, 1)]
    return [*found, Module("experts", "experts", (*ups, stacked(spec.down, columns, inner)), count)]


# --- modules of one part ---


def _part(
    prefix: str,
    projection: Projection,
    rows: Span,
    columns: Span,
    product: Product | None = None,
    order: tuple[int, ...] | None = None,
    head: int = 0,
) -> Part:
    """Return rows of a projection, which may share its tensor with others."""
    name, rows = f"{prefix}{projection.name}", rows._replace(first=rows.first + projection.first_row)
    bias = f"{name}.bias" if projection.has_bias else None
    return Part(f"{name}.weight", rows, columns, bias, order, head, product=product)


def _projection(role: str, part: Part) -> Module:
    return Module(role, "projection", (part,))


def _exact(
    role: str, prefix: str, projection: Projection, rows: int, columns: int, product: Product | None = None
) -> Module:
    """Return a small projection that must stay exact: whole on each rank, and never quantised."""
    return Module(role, "exact", (_part(prefix, projection, Span(0, rows), Span(0, columns), product),))


def _norm(role: str, prefix: str, name: str, width: int, order: tuple[int, ...] | None = None) -> Module:
    head = 0 if order is None else len(order)
    return Module(role, "norm", (Part(f"{prefix}{name}.weight", Span(0, width), order=order, head=head),))


def _vector(role: str, tensor: str, rows: Span) -> Module:
    return Module(role, "vector", (Part(tensor, rows),))
