"""The shape of a decoder and what its layers are made of, whatever family it is of. No torch here.

model/checkpoint/config_file.py reads it from a folder's config.json; model/architectures/families has one file each.
"""

from dataclasses import dataclass
from typing import Literal

from twostroke.protocol.kv_layout import STATE_WINDOW, KVGroups, group_layers, least_block_tokens

STATE_BLOCK_STEP = 16
"""Blocks that are larger than asked for, for the sake of states, are multiples of so many tokens."""

Quantization = Literal["auto", "none", "int8", "int4"]
"""Form in which the projections' weights are held. auto: the checkpoint's."""

KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
"""Dtype of cached keys and values. auto: that of activations; the other two are e4m3, one byte a number."""


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
    """Form of a checkpoint's projections in its files, where each is quantised in several tensors."""

    method: Literal["fp8", "int8", "packed", "awq", "gptq", "fp4", "mxfp4"]  # mxfp4: stacked experts alone
    form: WeightForm  # what they are held in
    left: tuple[str, ...] = ()  # modules that are not quantised: their names, parts of those, and `re:` patterns
    block: tuple[int, int] | None = None  # fp8: rows and columns that share a scale
    zero_shift: int = 0  # gptq: what is added to its zero points


Activation = Literal["silu", "gelu_tanh", "clamped"]
"""Activation of an MLP's gate. `gelu_tanh` is GELU approximated with tanh. `clamped` is gpt-oss's: with g the gate
clamped to GLU_LIMIT from above, and u the up clamped to it on both sides, g sigmoid(GLU_ALPHA g) (u + 1)."""
GLU_ALPHA, GLU_LIMIT = 1.702, 7.0

PrefillKernel = Literal["plain", "fa3"]
"""Kernel of prefill attention on GPUs: `plain` is ours, `fa3` FlashAttention-3."""

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


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
    rotated: int = 0  # dimensions of a head, the first; 0: all
    interleaves: bool = False  # neighbours are a pair, not dimensions half of the rotated ones apart


@dataclass(frozen=True)
class QueryScale:
    """Scale of a query by its position p, for long contexts: 1 + factor * ln(1 + floor((p + shift) / tokens))."""

    tokens: int
    factor: float
    shift: int = 0


@dataclass(frozen=True)
class Projection:
    """One matrix of a layer."""

    name: str  # of its tensors within the layer, before `.weight` and `.bias`
    has_bias: bool = False
    first_row: int = 0  # of those tensors, where several projections lie one behind the other in one


@dataclass(frozen=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek-AI 2024, section 2.1), in numbers a token.

    A token's latent is what the keys and values of all heads are made of. It is cached with the part of the keys that
    turns, which all heads share: one row of `rank + rotary`, and nothing else.
    """

    rank: int  # of the latent
    rotary: int  # of a head's queries and keys, the part that turns
    key: int  # of a head's queries and keys, the part that does not
    value: int  # of a head
    query_rank: int = 0  # of the queries' own latent, which is not cached; 0: they are made of the layer's input

    @property
    def query(self) -> int:
        """Width of a head's queries as they are projected; the rotated part is the last."""
        return self.key + self.rotary


@dataclass(frozen=True)
class DeltaSizes:
    """Gated delta nets (Yang et al. 2024, "Gated Delta Networks"), in numbers.

    A layer keeps for each value head a matrix [key, value], and the last inputs of a convolution over its tokens. The
    heads are shared out among KV heads, as the blocks are that hold the states.
    """

    key_heads: int  # of queries, and of keys
    value_heads: int
    key: int  # of a head's queries and keys
    value: int  # of a head
    taps: int  # tokens that the convolution sees, the last one included

    @property
    def key_width(self) -> int:
        """Width of a token's queries, and of its keys."""
        return self.key_heads * self.key

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value

    @property
    def conv_width(self) -> int:
        """Width of what the convolution takes: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    def numbers_in(self, kind: int, kv_heads: int) -> int:
        """Return the numbers of one KV head's share in a block's part of the first or the second kind.

        Half of each matrix lies in either. The convolution's inputs are queries and keys in the first, values in the
        second; there the number of tokens that the state has seen is the last.
        """
        width = (2 * self.key_width, self.value_width)[kind] // kv_heads
        return self.matrix_numbers_in(kv_heads) + (self.taps - 1) * width + kind

    def matrix_numbers_in(self, kv_heads: int) -> int:
        """Return those of `numbers_in` that are of matrices, which are the first."""
        return self.value_heads // kv_heads * (self.key // 2) * self.value


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
class LatentSpec:
    """Projections between a layer's input and `q`, `k` and `v`, where the layer attends to latents."""

    down: Projection  # to the latent and the keys' part that turns
    norm: str  # of the latent
    query_down: Projection | None  # None: `q` is of the layer's input
    query_norm: str | None
    norm_eps: float = 1e-6  # of both, whatever config.json says of norms


@dataclass(frozen=True)
class MlpSpec:
    """A gated MLP that all tokens take."""

    gate: Projection
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
class ExpertsSpec:
    """A routed feed-forward block: gated MLPs of which each token takes some (Shazeer et al. 2017)."""

    routing: Routing
    size: int  # features between, of each expert
    router: Projection
    gate: Projection  # `*` in a name stands for the expert's number
    up: Projection
    down: Projection
    # One tensor of all experts [number, in, out], `.weight` left out; columns of gate and up take turns, where
    # `up.first_row` does not say where the latter begin.
    are_stacked: bool = False
    scales_input: bool = False  # the one chosen expert's input is multiplied by its score's sigmoid, not its result
    correction: str | None = None  # the tensor that is added to scores where they choose, and not where they weigh
    shared: MlpSpec | None = None  # that all tokens take beside
    shared_gate: Projection | None = None  # whose sigmoid the shared one's result is multiplied by


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
    gate: Projection
    up: Projection
    down: Projection
    q_norm: str | None = None  # of each head's queries, and of its keys, before they are rotated
    k_norm: str | None = None
    normalises_rotated: bool = False  # norms without weights of each head's queries and keys, where they are rotated
    q_row_norm: str | None = None  # of all heads' queries of a token together, and of its keys
    k_row_norm: str | None = None
    attention_norm: str | None = None  # of what the attention adds to the residual
    output_norm: str | None = None  # of what the MLP adds
    # Of a layer that attends to latents `k` and `v` are of the latent, and lie in one tensor: the first head's rows of
    # `k`, then of `v`, and so on; `v.first_row` is where they begin within a head's.
    latent: LatentSpec | None = None
    sinks: str | None = None  # the tensor of `AttentionForm.sinks`
    gates_output: bool = False  # `q` has a gate of the attention's output behind each head's queries
    delta: DeltaSpec | None = None  # instead of attention, in `ModelShape.state_layers`
    experts: ExpertsSpec | None = None  # instead of gate, up and down, but in `ModelConfig.dense_layers`


TEXT_PREFIXES = (("model.language_model.", ""), ("language_model.model.", "language_model."))
"""Prefixes in checkpoints that see images: what stands for `model.`, and before `lm_head.`. transformers' modules have
the first pair, most files the second. Others name their text's tensors as checkpoints of text alone do."""


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
    is_wrapped: bool = False  # checkpoints have towers for images beside it, and TEXT_PREFIXES

    def names_in_files(self, module: str) -> tuple[str, ...]:
        """Return the names that checkpoints may have for a module of this decoder."""
        inner = module.removeprefix("model.")
        wrapped = TEXT_PREFIXES if self.is_wrapped else ()
        return module, *(f"{head}{module}" if inner == module else f"{text}{inner}" for text, head in wrapped)


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
    latent: LatentSizes | None = None  # there is one KV head then, of `head_dim` rank + rotary
    state: DeltaSizes | None = None  # of the layers whose window is STATE_WINDOW, where there are any

    def keeps_state(self, layer: int) -> bool:
        """Return True if the layer keeps a state instead of keys and values."""
        return self.state is not None and self.window(layer) == STATE_WINDOW

    @property
    def state_numbers(self) -> int:
        """Return KVLayout.state_numbers."""
        state = self.state
        return 0 if state is None else max(state.numbers_in(kind, self.num_kv_heads) for kind in (0, 1))

    def fitting_block_size(self, wanted: int, itemsize: int) -> int:
        """Return the tokens of a block of numbers of `itemsize` bytes: `wanted`, or as many as a state needs."""
        least = least_block_tokens(self.state_numbers, self.head_dim, itemsize)
        return wanted if least <= wanted else -(-least // STATE_BLOCK_STEP) * STATE_BLOCK_STEP

    @property
    def kv_kinds(self) -> int:
        """Kinds of rows in the cache: keys and values, or latents alone."""
        return 2 if self.latent is None else 1

    def window(self, layer: int) -> int:
        """Return what a layer attends to, as kv_layout.first_seen takes it; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def kv_groups(self) -> KVGroups:
        """Groups of layers that share block tables."""
        return self.groups_of(range(self.num_layers))

    def groups_of(self, layers: range) -> KVGroups:
        """Return `kv_groups` of some layers, the first of which counts as 0. As `KVLayout.groups_of`."""
        return group_layers(self.windows[layers.start : layers.stop] or (0,) * len(layers))

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
        """Width of the queries of one token, as they meet the cache's rows."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or the values) of one token."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_values(self) -> int:
        """Numbers that the caches of all layers hold of one token, states aside."""
        layers = sum(not self.keeps_state(layer) for layer in range(self.num_layers))
        return self.kv_kinds * layers * self.kv_size


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """A decoder of ours: its shape, and what it is made of."""

    rms_norm_eps: float
    rope: RopeConfig
    spec: DecoderSpec
    tie_word_embeddings: bool = False
    unrotated_layers: frozenset[int] = frozenset()  # whose queries and keys know no positions
    local_rope: RopeConfig | None = None
    local_layers: frozenset[int] = frozenset()  # whose queries and keys turn by `local_rope`
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

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """None: this layer has no experts."""
        return None if layer in self.dense_layers else self.spec.layer.experts

    @property
    def expert_share(self) -> float:
        experts = self.spec.layer.experts
        return 0.0 if experts is None else experts.routing.top_k / experts.routing.num_experts

    @property
    def num_routed_layers(self) -> int:
        return sum(self.experts_of(layer) is not None for layer in range(self.num_layers))

    def mlp_of(self, layer: int) -> MlpSpec | None:
        """Return the MLP that all tokens take, beside the experts where there are any."""
        experts, spec = self.experts_of(layer), self.spec.layer
        return MlpSpec(spec.gate, spec.up, spec.down, self.intermediate_size) if experts is None else experts.shared

    @property
    def rotary_dim(self) -> int:
        """Width of a head's rotated part, or of the whole head."""
        return self.head_dim if self.latent is None else self.latent.rotary

    def rope_of(self, layer: int) -> RopeConfig | None:
        """None: this layer turns nothing."""
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
        return width
