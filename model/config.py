"""The shape of a decoder and what its layers are made of, whatever family it is of. No torch here.

model/checkpoint/config_file.py reads it from a folder's config.json; model/architectures/families has one file each.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from twostroke.model.state_sizes import StateSizes
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import (
    STATE_WINDOW,
    KVGroups,
    KVLayout,
    group_layers,
    least_block_tokens,
    mean_seen,
)


@dataclass(frozen=True)
class IndexSizes:
    """Indexed attention (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1), in numbers a token.

    Small heads score the tokens before a query, and the query attends to those with the highest scores. A token's key,
    which these heads share, is cached behind its latent; its rotary part is as wide as that of the attention's
    keys.
    """

    heads: int
    key: int  # of a head's queries, and of the key
    top_k: int  # tokens that a query attends to
    sharing: frozenset[int] = frozenset()  # layers without an index, which attend to what the layer before them does


@dataclass(frozen=True)
class MLASizes:
    """Multi-head latent attention (DeepSeek-AI 2024, section 2.1), in numbers a token.

    A token's latent is what the keys and values of all heads are made of. It is cached with the rotary part of
    the keys, which all heads share: one row of `rank + rotary`, and behind them the index's key where there is one.
    """

    rank: int  # of the latent
    rotary: int  # of a head's queries and keys, the rotary part
    key: int  # of a head's queries and keys, the part that does not
    value: int  # of a head
    query_rank: int = 0  # of the queries' own latent, which is not cached; 0: they are made of the layer's input
    index: IndexSizes | None = None  # None: queries attend to all tokens

    @property
    def query(self) -> int:
        """Width of a head's queries as they are projected; the rotated part is the last."""
        return self.key + self.rotary

    @property
    def attended(self) -> int:
        """Width of the part of a cached row that attention reads."""
        return self.rank + self.rotary

    @property
    def row(self) -> int:
        """Width of a cached row."""
        return self.attended + (0 if self.index is None else self.index.key)


@dataclass(frozen=True)
class WeightForm:
    """Form of a quantised weight, from which all its bytes follow."""

    kind: Literal["int8", "int4", "fp8", "fp4"]  # fp8 is e4m3, fp4 e2m1
    group_size: int | None  # columns that share a scale; None: a row's
    has_offsets: bool = False  # each group's, beside its scale

    @property
    def bits(self) -> Literal[8, 4]:
        return 4 if self.kind in ("int4", "fp4") else 8


@dataclass(frozen=True)
class StoredQuantization:
    """Form of a checkpoint's projections in its files, where each is quantised in several tensors.

    Modules are named by their whole names, parts of those, and `re:` patterns.
    """

    method: Literal["fp8", "int8", "packed", "awq", "gptq", "fp4", "mxfp4"]  # mxfp4: stacked experts alone
    form: WeightForm  # what they are held in
    left: tuple[str, ...] = ()  # modules that are not quantised
    block: tuple[int, int] | None = None  # fp8: rows and columns that share a scale
    zero_shift: int = 0  # gptq: what is added to its zero points
    targets: tuple[str, ...] = ()  # modules of this form, or `Linear`, which is all that no form names; (): all
    others: tuple["StoredQuantization", ...] = ()  # forms of other modules of the same checkpoint

    def leaves(self, names: Sequence[str]) -> bool:
        """Return True if the module, which files may call by any of `names`, is not quantised."""
        return _is_named(self.left, names)

    def of_module(self, names: Sequence[str]) -> "StoredQuantization | None":
        """Return the form of a module that is quantised: the first one that names it, else one of all modules."""
        forms = (self, *self.others)
        named = (one for one in forms if _is_named(one.targets, names))
        of_all = (one for one in forms if not one.targets or "Linear" in one.targets)
        return next(named, None) or next(of_all, None)


def _is_named(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(
        re.match(pattern.removeprefix("re:"), name) if pattern.startswith("re:") else f".{pattern}." in f".{name}."
        for pattern in patterns
        for name in names
    )


STATE_BLOCK_STEP = 16
"""Blocks that are larger than asked for, for the sake of states, are multiples of so many tokens."""

Quantization = Literal["auto", "none", "int8", "int4"]
"""Form in which the projections' weights are held. auto: the checkpoint's."""

KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
"""Dtype of cached keys and values. auto: that of activations; the other two are e4m3, one byte a number."""


GatedActivation = Literal["silu", "gelu_tanh", "clamped"]
"""Activation of an MLP's gate. `gelu_tanh` is GELU approximated with tanh. `clamped` is gpt-oss's: with g the gate
clamped to GLU_LIMIT from above, and u the up clamped to it on both sides, g sigmoid(GLU_ALPHA g) (u + 1)."""
GLU_ALPHA, GLU_LIMIT = 1.702, 7.0
Activation = Literal[GatedActivation, "relu2"]
"""Activation of an MLP. `relu2` is that of an MLP without a gate: the square of what is positive."""

PrefillKernel = Literal["plain", "fa3"]
"""Kernel of prefill attention on GPUs: `plain` is ours, `fa3` FlashAttention-3."""

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the fields beyond `theta` are those of the type named (transformers' names).

    `dynamic` equals `default` up to the model's maximum position, and we never go beyond it.
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn: positions the model was trained on before scaling
    attention_factor: float = 1.0  # yarn, longrope: scales cos and sin
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    factors: tuple[float, ...] = ()  # longrope: of each frequency
    rotated: int = 0  # dimensions of a head, the first; 0: all. proportional: half of them lie in either half of a head
    interleaves: bool = False  # neighbours are a pair, not dimensions half of the rotated ones apart


@dataclass(frozen=True)
class QueryScale:
    """Scale of a query by its position p, for long contexts: 1 + factor * ln(1 + floor((p + shift) / tokens))."""

    tokens: int
    factor: float
    shift: int = 0


@dataclass(frozen=True)
class KVHeads:
    """The heads of a layer's keys and values."""

    number: int
    dim: int  # of each, and of queries

    @property
    def width(self) -> int:
        """Width of the keys (or the values) of one token."""
        return self.number * self.dim


@dataclass(frozen=True)
class Projection:
    """One matrix of a layer."""

    name: str  # of its tensors within the layer, before `.weight` and `.bias`
    has_bias: bool = False
    first_row: int = 0  # of those tensors, where several projections lie one behind the other in one


@dataclass(frozen=True)
class DeltaSpec:
    """Parts of a layer that is a gated delta net, by their names within it. Its output's projection is `output`."""

    qkv: Projection  # queries, keys, values of all heads one behind the other
    gate: Projection  # of the output
    beta: Projection  # the strength of each value head's update
    decay: Projection  # its forgetting
    conv: str  # [conv width, 1, taps]
    decay_log: str  # [value heads]
    decay_bias: str  # [value heads]
    norm: str  # of a value head's output; it is no norm that adds one
    output: Projection
    by_key_heads: bool = False  # qkv and gate are one tensor, beta and decay another, each key head's rows together


@dataclass(frozen=True)
class MambaSpec:
    """Parts of a layer that is of Mamba-2, by their names within it."""

    inputs: Projection  # gates and x of all heads, B and C of all groups, steps of all heads, one behind the other
    conv: str  # [conv width, 1, taps]
    conv_bias: str | None  # [conv width]
    decay_log: str  # [heads]
    skip: str  # [heads]
    step_bias: str  # [heads]
    norm: str  # of each group's results
    output: Projection
    norm_eps: float
    step_limits: tuple[float, float]


@dataclass(frozen=True)
class ConvolutionSpec:
    """Parts of a layer that is a gated short convolution, by their names within it."""

    inputs: Projection  # B, C, x
    conv: str  # [channels, 1, taps]
    conv_bias: str | None  # [channels]
    output: Projection


StateSpec = DeltaSpec | MambaSpec | ConvolutionSpec


@dataclass(frozen=True)
class IndexSpec:
    """Parts of a layer's index, by their names within the layer."""

    query: Projection  # of the queries' latent
    key: Projection  # of the layer's input
    key_norm: str  # a layer norm with a bias
    weights: Projection  # of the layer's input: the weight of each head's scores
    interleaves: bool  # as RopeConfig's, of the rotary part, which is the first of a head's queries and of the key


@dataclass(frozen=True)
class MLASpec:
    """Projections between a layer's input and `q`, `k` and `v`, where the layer is of MLA."""

    down: Projection  # to the latent and the rotary part of the keys
    norm: str  # of the latent
    query_down: Projection | None  # None: `q` is of the layer's input
    query_norm: str | None
    norm_eps: float = 1e-6  # of both, whatever config.json says of norms
    index: IndexSpec | None = None  # in all layers but `IndexSizes.sharing`


@dataclass(frozen=True)
class MlpSpec:
    """An MLP that all tokens take."""

    gate: Projection | None  # None: it has no gate
    up: Projection
    down: Projection
    size: int  # features between


@dataclass(frozen=True)
class Routing:
    """Choice and weighting of a token's experts by their scores. Of equal scores the lower expert wins."""

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits, in fp32
    normalises: bool = False  # the weights of the chosen ones, which are their scores, are divided by their sum
    scale: float = 1.0  # of weights, after that
    groups: int = 1  # of neighbours, as many in each
    top_groups: int = 1  # number of groups, by the highest sums, whose experts can be chosen
    summed: int = 1  # of each group's highest scores (DeepSeek-V2: 1; V3: 2)

    def expected_hit(self, tokens: float) -> float:
        """Return how many experts `tokens` tokens hit together if each expert is equally likely."""
        missed: float = (1 - self.top_k / self.num_experts) ** tokens
        return self.num_experts * (1 - missed)


@dataclass(frozen=True)
class ExpertNorms:
    """Norms around experts that stand beside an MLP with norms of its own, by their names within a layer."""

    router: str  # the tensor [hidden] that weighs the router's input, normalised and divided by sqrt(hidden)
    input: str  # of the experts, which as the router's is the residual
    output: str  # of the experts
    beside: str  # of the MLP's output


@dataclass(frozen=True)
class ExpertsSpec:
    """A routed feed-forward block: gated MLPs of which each token takes some (Shazeer et al. 2017)."""

    routing: Routing
    size: int  # features between, of each expert
    router: Projection
    gate: Projection | None  # None: they have no gates
    up: Projection  # `*` in a name stands for the expert's number
    down: Projection
    # One tensor of all experts [number, in, out], `.weight` left out; columns of gate and up take turns, where
    # `up.first_row` does not say where the latter begin.
    are_stacked: bool = False
    stacks_rows: bool = False  # such tensors are [number, out, in]
    scales_input: bool = False  # the one chosen expert's input is multiplied by its score's sigmoid, not its result
    correction: str | None = None  # the tensor that is added to scores where they choose, and not where they weigh
    shared: MlpSpec | None = None  # that all tokens take beside
    shared_gate: Projection | None = None  # whose sigmoid the shared one's result is multiplied by
    scales: str | None = None  # the tensor [experts] that the chosen ones' weights are multiplied by
    norms: ExpertNorms | None = None  # None: experts take what the MLP beside takes, and results are summed


@dataclass(frozen=True)
class LayerSpec:
    """Parts of a layer, by their names within a layer in the family's checkpoints.

    The loader and the decoder go by this alone, and no family's name is asked for: what another family's layer has
    more is one more field, which the families before leave out. Norms are RMSNorms.
    """

    input_norm: str | None  # None: the attention gets the residual as it is
    q: Projection
    k: Projection
    v: Projection
    output: Projection
    mlp_norm: str | None
    gate: Projection | None  # None: the MLP has no gate
    up: Projection
    down: Projection
    q_norm: str | None = None  # of each head's queries, and of its keys, before they are rotated
    k_norm: str | None = None
    normalises_rotated: bool = False  # norms without weights of each head's queries and keys, where they are rotated
    q_row_norm: str | None = None  # of all heads' queries of a token together, and of its keys
    k_row_norm: str | None = None
    attention_norm: str | None = None  # of what the attention adds to the residual
    output_norm: str | None = None  # of what the MLP adds
    # Of a layer of MLA `k` and `v` are of the latent, and lie in one tensor: the first head's rows of
    # `k`, then of `v`, and so on; `v.first_row` is where they begin within a head's.
    latent: MLASpec | None = None
    sinks: str | None = None  # the tensor of `AttentionForm.sinks`
    gates_output: bool = False  # `q` has a gate of the attention's output behind each head's queries
    normalises_values: bool = False  # a norm without weights of each head's values
    output_scale: str | None = None  # the tensor [1] that the residual is multiplied by behind the layer
    state: StateSpec | None = None  # instead of attention, where `ModelShape.keeps_state`
    experts: ExpertsSpec | None = None  # instead of gate, up and down, but in `ModelConfig.dense_layers`


@dataclass(frozen=True)
class LayerEmbeddingSpec:
    """Embeddings of a token for each layer (Gemma 3n and 4's "per-layer embeddings"), each of `size` numbers.

    A layer adds to its result what a gated projection makes of its token's: norm(output(act(gate(x)) * embedding)).
    """

    size: int
    table: str  # [vocabulary, layers * size]
    projection: Projection  # of the embedded token, hidden -> layers * size, which is added to the table's rows
    projection_norm: str  # of each layer's part of it
    gate: Projection  # within a layer, as what follows
    output: Projection
    norm: str


@dataclass(frozen=True)
class MtpSpec:
    """Parts of an MTP head within its layer, the one behind the last: it drafts the token after the next (DeepSeek-AI
    2024, section 2.2). Embedding and LM head are the model's, whatever copies of them the files have."""

    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"  # 2 hidden -> hidden: of the next token's embedding, and behind it the hidden state
    final_norm: str = "shared_head.norm"


TEXT_PREFIXES = (("model.language_model.", ""), ("language_model.model.", "language_model."))
"""Prefixes in checkpoints that see images: what stands for `model.`, and before `lm_head.`. transformers' modules have
the first pair, most files the second. Others name their text's tensors as checkpoints of text alone do, some of which
kept the first pair when they were made of such."""


@dataclass(frozen=True)
class DecoderSpec:
    """Parts of a family's decoder, and their names in its checkpoints."""

    family: str  # for people
    embedding: str
    layers: str  # before each layer's number
    layer: LayerSpec
    final_norm: str
    lm_head: str  # where embeddings are not tied
    norms_add_one: bool = False  # checkpoints hold what norms' weights are beyond 1
    ignored: tuple[str, ...] = ()  # what names of tensors begin with that have no part in this
    layer_embedding: LayerEmbeddingSpec | None = None
    is_wrapped: bool = False  # checkpoints have towers for images beside it
    mtp: MtpSpec | None = None  # of the head that checkpoints may have, whose layer's tensors are `ignored`

    def names_in_files(self, module: str) -> tuple[str, ...]:
        """Return the names that checkpoints may have for a module of this decoder."""
        inner = module.removeprefix("model.")
        return module, *(f"{head}{module}" if inner == module else f"{text}{inner}" for text, head in TEXT_PREFIXES)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder that memory, requests and transfers depend on, whatever computes it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # positions the model accepts, prompt and output together
    # Of each layer: the last tokens that it attends to, itself included; 0: all; negative: a chunk's size. (): all.
    windows: tuple[int, ...] = ()
    latent: MLASizes | None = None  # there is one KV head then, and `head_dim` is the width of a row
    state: StateSizes | None = None  # of the layers whose window is STATE_WINDOW, where there are any
    # Of each layer, where they differ: `num_kv_heads` and `head_dim` are then the cache's, which have the narrowest
    # layer's width, and other widths are multiples. Layers with the same window are alike.
    layer_heads: tuple[KVHeads, ...] = ()
    kv_owners: tuple[int, ...] = ()  # of each layer, whose keys and values it attends to; (): its own
    has_mtp: bool = False  # the last layer is the MTP head's

    def keeps_state(self, layer: int) -> bool:
        """Return True if the layer keeps a state instead of keys and values."""
        return self.state is not None and self.window(layer) == STATE_WINDOW

    @property
    def state_numbers(self) -> int:
        """Return KVLayout.state_numbers."""
        state = self.state
        return 0 if state is None else max(state.numbers_in(kind, self.num_kv_heads) for kind in (0, 1))

    def fitting_block_size(self, wanted: int, itemsize: int) -> int:
        """Return the tokens of a row of blocks of numbers of `itemsize` bytes: `wanted` for the widest layers' blocks,
        or as many as a state needs."""
        wanted *= max(self.num_parts(layer) for layer, _ in self.kv_layers)
        least = least_block_tokens(self.state_numbers, self.head_dim, itemsize)
        return wanted if least <= wanted else -(-least // STATE_BLOCK_STEP) * STATE_BLOCK_STEP

    @property
    def kv_kinds(self) -> int:
        """Kinds of rows in the cache: keys and values, or latents alone."""
        return 2 if self.latent is None else 1

    def window(self, layer: int) -> int:
        """Return what a layer attends to, as kv_layout.first_seen takes it; 0: all."""
        return self.windows[layer] if self.windows else 0

    def heads(self, layer: int) -> KVHeads:
        """Return the heads of a layer's keys and values."""
        return self.layer_heads[layer] if self.layer_heads else KVHeads(self.num_kv_heads, self.head_dim)

    def num_parts(self, layer: int) -> int:
        """Return how many blocks of the cache a row of this layer's tokens takes."""
        return self.heads(layer).width // self.kv_size

    def kv_owner(self, layer: int) -> int:
        """Return the layer whose keys and values this one attends to."""
        return self.kv_owners[layer] if self.kv_owners else layer

    def kv_layers_of(self, layers: range) -> tuple[tuple[int, int], ...]:
        """Return the KV layers (protocol/kv_layout.py) of some layers, in order: the layer and the part of each."""
        own = (layer for layer in layers if self.kv_owner(layer) == layer)
        return tuple((layer, part) for layer in own for part in range(self.num_parts(layer)))

    @property
    def kv_layers(self) -> tuple[tuple[int, int], ...]:
        """Return `kv_layers_of` all layers."""
        return self.kv_layers_of(range(self.num_layers))

    def kv_layout(self, model: str, dtype: str, block_size: int) -> KVLayout:
        """Return the layout of the model's cache on one rank: `model` is its digest, `dtype` of the cache's numbers."""
        parts = tuple(part for _, part in self.kv_layers)
        return KVLayout(
            model,
            dtype,
            len(self.kv_layers),
            self.num_kv_heads,
            self.head_dim,
            block_size,
            windows=tuple(self.windows[layer] for layer, _ in self.kv_layers) if self.windows else (),
            kinds=self.kv_kinds,
            state_numbers=self.state_numbers,
            parts=parts if any(parts) else (),
        )

    @property
    def index(self) -> IndexSizes | None:
        """Sizes of the index that chooses what is attended to; None: there is none."""
        return None if self.latent is None else self.latent.index

    def attended(self, layer: int) -> int:
        """Return the most tokens that a layer attends to, as a window; 0: all."""
        return self.window(layer) if self.index is None else self.index.top_k

    @property
    def dense_context(self) -> int:
        """The longest context within which queries attend to all tokens of their windows."""
        return self.max_position if self.index is None else min(self.max_position, self.index.top_k)

    @property
    def kv_groups(self) -> KVGroups:
        """Groups of KV layers that share block tables."""
        return self.groups_of(range(self.num_layers))

    def groups_of(self, layers: range) -> KVGroups:
        """Return `kv_groups` of some layers, the first of which counts as 0. As `KVLayout.groups_of`."""
        if not self.layer_heads and not self.kv_owners:
            return group_layers(self.windows[layers.start : layers.stop] or (0,) * len(layers))
        found = self.kv_layers_of(layers)
        return group_layers(tuple(self.window(layer) for layer, _ in found), tuple(part for _, part in found))

    @property
    def expert_share(self) -> float:
        """Fraction of a layer's experts that a token takes; 0: the model has none, or nothing is known of them."""
        return 0.0

    def mlp_sizes(self, with_experts: bool) -> frozenset[int]:
        """Features between the projections of MLPs, and of each expert."""
        return frozenset({self.intermediate_size})

    @property
    def num_experts(self) -> int:
        """Number of experts of each layer that has any; 0: no layer has."""
        return 0

    @property
    def mlp_width(self) -> int:
        """Numbers of a token that stand at one time between the operations of an MLP."""
        return 3 * self.intermediate_size

    @property
    def q_size(self) -> int:
        """Width of the queries of one token, as they meet the cache's rows, in the widest layer."""
        return max(self.query_width(layer) for layer in range(self.num_layers if self.layer_heads else 1))

    def query_width(self, layer: int) -> int:
        """Return the width of the queries of one token in this layer, as they meet the cache's rows."""
        return self.num_heads * (self.heads(layer).dim if self.latent is None else self.latent.attended)

    @property
    def kv_size(self) -> int:
        """Width of the keys (or the values) of one token, in the narrowest layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_values(self) -> int:
        """Numbers that the caches of all layers hold of one token, states aside."""
        return round(self.kv_held(1))

    def kv_held(self, tokens: float) -> float:
        """Return the numbers that the caches of all layers hold of so many tokens, states aside."""
        seen = (mean_seen(self.window(layer), tokens) for layer, _ in self.kv_layers if not self.keeps_state(layer))
        return self.kv_kinds * self.kv_size * sum(seen)

    @property
    def last_kv_layer(self) -> int:
        """Return the last layer with keys and values, or a state, of its own: those behind it need only the rows that
        draw."""
        return max(self.kv_owners, default=self.num_layers - 1)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """A decoder of ours: its shape, and what it is made of."""

    rms_norm_eps: float
    rope: RopeConfig
    spec: DecoderSpec
    tie_word_embeddings: bool = False
    unrotated_layers: frozenset[int] = frozenset()  # whose queries and keys know no positions
    local_rope: RopeConfig | None = None
    local_layers: frozenset[int] = frozenset()  # whose queries and keys `local_rope` rotates
    query_scale: QueryScale | None = None
    scaled_layers: frozenset[int] = frozenset()  # whose queries `query_scale` multiplies
    attention_scale: float = 0.0  # of scores; 0: 1 / sqrt(head_dim), which no latents' is
    soft_cap: float = 0.0  # c: a score s becomes c tanh(s / c); 0: none
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # to the model's dtype
    logits_scale: float = 1.0
    logits_cap: float = 0.0  # as `soft_cap`, of logits
    stored: StoredQuantization | None = None  # None: not quantised, or by each tensor for itself, as GGUF's are
    dense_layers: frozenset[int] = frozenset()  # that have an MLP where the others have experts
    wide_layers: frozenset[int] = frozenset()  # whose MLP has twice as many features
    keys_as_values: frozenset[int] = frozenset()  # layers whose values are made by the keys' projection
    # Of each layer the numbers that the checkpoint has for its attention or state, and for its MLP or experts, None
    # where it has neither of these; (): both are the layer's own.
    numbers: tuple[tuple[int, int | None], ...] = ()

    def with_mtp(self) -> "ModelConfig":
        """Return the config with the MTP head's layer as one more. Raises ConfigError where the model has no head."""
        if self.spec.mtp is None:
            raise ConfigError(
                f"speculation.method: mtp: this model, {self.spec.family}, has no MTP head: set it to auto"
            )
        return replace(self, num_layers=self.num_layers + 1, has_mtp=True)

    def prefixes(self, layer: int) -> tuple[str, str | None]:
        """Return what the names of a layer's tensors begin with, as `numbers`."""
        first, second = self.numbers[layer] if self.numbers else (layer, layer)
        layers = self.spec.layers
        return f"{layers}.{first}.", None if second is None else f"{layers}.{second}."

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """None: this layer has no experts."""
        return None if layer in self.dense_layers or self.prefixes(layer)[1] is None else self.spec.layer.experts

    @property
    def expert_share(self) -> float:
        experts = self.spec.layer.experts
        return 0.0 if experts is None else experts.routing.top_k / experts.routing.num_experts

    def mlp_of(self, layer: int) -> MlpSpec | None:
        """Return the MLP that all tokens take, beside the experts where there are any."""
        experts, spec = self.experts_of(layer), self.spec.layer
        size = self.intermediate_size * (2 if layer in self.wide_layers else 1)
        if self.prefixes(layer)[1] is None:
            return None
        return MlpSpec(spec.gate, spec.up, spec.down, size) if experts is None else experts.shared

    def value_projection(self, layer: int) -> Projection:
        """Return what a layer's values are made by."""
        parts = self.spec.layer
        return parts.k if layer in self.keys_as_values else parts.v

    def rotary_dim(self, layer: int) -> int:
        """Return the width of a head's rotated part, or of the whole head."""
        return self.heads(layer).dim if self.latent is None else self.latent.rotary

    def rope_of(self, layer: int) -> RopeConfig | None:
        """None: this layer rotates nothing."""
        if layer in self.unrotated_layers:
            return None
        return self.local_rope if layer in self.local_layers else self.rope

    def mlp_sizes(self, with_experts: bool) -> frozenset[int]:
        """Return the sizes of MLPs, and of experts where they are wanted."""
        layers = range(self.num_layers)
        blocks = [*map(self.mlp_of, layers), *(map(self.experts_of, layers) if with_experts else ())]
        return frozenset(block.size for block in blocks if block is not None)

    @property
    def num_experts(self) -> int:
        """Implement ModelShape.num_experts."""
        return 0 if self.spec.layer.experts is None else self.spec.layer.experts.routing.num_experts

    @property
    def mlp_width(self) -> int:
        """Width of experts' activations and of those beside them: rows for each, and fp32 results."""
        mlps = (self.mlp_of(layer) for layer in range(self.num_layers))
        width, experts = 3 * max((mlp.size for mlp in mlps if mlp is not None), default=0), self.spec.layer.experts
        if experts is not None:
            width += experts.routing.top_k * 3 * (experts.size + self.hidden_size)
        return width + (0 if self.spec.layer_embedding is None else self.num_layers * self.spec.layer_embedding.size)
