"""The operations of a decoder layer on CUDA: Triton kernels behind `model.backend.Backend`.

Importing this needs no GPU. Under Triton's interpreter the backend also runs on CPU tensors, which is how its tests do.
Nothing here synchronises with the host, and launches depend on shapes and on the layout's plain numbers alone: a decode
step can be captured in a CUDA graph, with a layout whose `max_context_len` is the longest to come.
"""

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.architectures.context_index import write_index_keys
from twostroke.model.architectures.states import group_square_sums, norm_groups
from twostroke.model.backend import (
    AS_THEY_ARE,
    AttentionForm,
    Chosen,
    ExpertWeights,
    HeadNorms,
    KVScales,
    Linear,
    MLAHeads,
)
from twostroke.model.batch import BatchLayout
from twostroke.model.checkpoint.quantization import QuantizedWeight, quantize
from twostroke.model.config import Activation, PrefillKernel, Quantization
from twostroke.model.cuda.fp8_products import TorchProducts, torch_product
from twostroke.model.cuda.kernels import elementwise, experts, launch
from twostroke.model.cuda.kernels.fp8 import quantize_tokens
from twostroke.model.cuda.kernels.gemm import (
    FP8_GROUP,
    MAX_TOKENS,
    SplitWorkspace,
    can_multiply_fp8,
    can_pack,
    gemm,
    gemm_config,
    pack,
    pack_fp8,
)
from twostroke.model.cuda.kernels.grouped_gemm import (
    TOKENS_OF_CONFIGS,
    grouped_config,
    grouped_embedding,
    grouped_gemm,
    pack_groups,
)
from twostroke.model.cuda.kernels.launch import GpuTarget
from twostroke.model.cuda.kernels.mla import write_latents
from twostroke.model.cuda.kernels.paged_attention import (
    decode_attention,
    decode_config,
)
from twostroke.model.cuda.kernels.states import CudaStates
from twostroke.model.cuda.mla import CudaMLA
from twostroke.model.cuda.prompt_attention import PromptAttention, rows_like, variant_key
from twostroke.model.parallel.tensor_parallel import ContextParts

# Numbers of tokens that reach each row of the launch tables: of weights as they are, and of quantised ones.
_FEW_TOKENS = (1, 17, 33)
_ANY_TOKENS = (*_FEW_TOKENS, 65, 129)


class CudaLinear:
    """Weights as the checkpoint lays them out, or in eight or four bits, widened as they are multiplied.

    Up to MAX_TOKENS tokens a projection is bound by reading its weights, and our kernel reads them; beyond, cuBLAS is
    hard to beat. Quantised weights are for our kernel alone. Implements model.backend.Linear.
    """

    def __init__(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, target: GpuTarget, workspace: SplitWorkspace
    ):
        """weight [out, in] and bias [out], on one device, kept and not copied if contiguous; quantised weights are
        copied into the kernels' form. The workspace may be shared by all projections that run on one stream.

        Raises ValueError for groups of columns that the kernels don't know.
        """
        self._weight = pack(weight)
        self.out_features, self.in_features = self._weight.rows, self._weight.columns
        self._bias = bias
        self._target = target
        self._workspace = workspace
        self._compiled: set[tuple[torch.dtype, torch.dtype, Activation | None]] = set()

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, activation: Activation | None = None) -> Tensor:
        """Implement Linear for contiguous x; sums are fp32 and rounded once, to `out_dtype`. With an activation:
        Backend.gated, in the same launch where tokens are few.

        The first call with an `out_dtype` and activation compiles what any later one could need; it can't be captured.
        """
        out_dtype = out_dtype or x.dtype
        if (x.dtype, out_dtype, activation) not in self._compiled:
            self._compiled.add((x.dtype, out_dtype, activation))
            few = _FEW_TOKENS if activation is None else _ANY_TOKENS[:-1]  # many end in a launch of their own
            for distinct in _ANY_TOKENS if self._weight.bits < 16 else few:
                self._product(x.new_zeros((distinct, self.in_features)), out_dtype, activation)
        return self._product(x, out_dtype, activation)

    def _product(self, x: Tensor, out_dtype: torch.dtype, activation: Activation | None) -> Tensor:
        tokens, bits = x.shape[0], self._weight.bits
        if activation is not None and tokens > MAX_TOKENS:
            return elementwise.gate(self._product(x, out_dtype, None), activation)
        if bits < 16 or tokens <= MAX_TOKENS:
            config = gemm_config(self._target, x.dtype, bits, tokens, self.out_features, self.in_features)
            return gemm(x, self._weight, self._bias, out_dtype, self._workspace, config, activation=activation)
        if out_dtype == x.dtype:
            return functional.linear(x, self._weight.packed, self._bias)
        y = torch.mm(x, self._weight.packed.T, out_dtype=out_dtype)
        return y if self._bias is None else y.add_(self._bias)

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """Implement Linear.embed."""
        return elementwise.vocab_embedding(token_ids, self._weight, first, dtype)


class GroupedCudaLinear:
    """Weights as a checkpoint has quantised them, for our kernel alone. Implements model.backend.Linear."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None):
        """weight [out, in] and bias [out], on one device. Raises ValueError for groups that are too small."""
        self._weight = pack_groups(weight)
        self.out_features, self.in_features = self._weight.rows, self._weight.columns
        self._order = weight.order
        self._bias = bias
        self._compiled: set[tuple[torch.dtype, torch.dtype]] = set()

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Implement Linear for contiguous x; sums are fp32 and rounded once, to `out_dtype`.

        The first call with an `out_dtype` compiles what any later one could need; it can't be captured.
        """
        out_dtype = out_dtype or x.dtype
        if (x.dtype, out_dtype) not in self._compiled:
            self._compiled.add((x.dtype, out_dtype))
            for tokens in TOKENS_OF_CONFIGS:
                self(x.new_zeros((tokens, self.in_features)), out_dtype)
        if self._order is not None:
            x = x.index_select(1, self._order)
        return grouped_gemm(x, self._weight, self._bias, out_dtype, grouped_config(x.dtype, len(x)))

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """Implement Linear.embed for a weight whose inputs are in order."""
        return grouped_embedding(token_ids, self._weight, first, dtype)


class Fp8CudaLinear:
    """Weights in FP8 multiplied by activations that each token's own scale makes FP8, for GPUs that know it.

    Results in bf16 of more than MAX_TOKENS tokens are torch's, where it agrees. Implements model.backend.Linear.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        target: GpuTarget,
        workspace: SplitWorkspace,
        by_torch: TorchProducts | None = None,
    ):
        """Take a weight [out, in] that `can_multiply_fp8` lets pass, and bias [out], on one device; a workspace as
        CudaLinear's. Without `by_torch` all products are ours."""
        self._weight = pack_fp8(weight)
        self.out_features, self.in_features = self._weight.rows, self._weight.columns
        self._bias = bias
        self._target = target
        self._workspace = workspace
        self._compiled: set[tuple[torch.dtype, torch.dtype, Activation | None]] = set()
        self._torch_product = None if by_torch is None else torch_product(self._weight)
        self._by_torch = by_torch

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, activation: Activation | None = None) -> Tensor:
        """Implement CudaLinear's call."""
        out_dtype = out_dtype or x.dtype
        if (x.dtype, out_dtype, activation) not in self._compiled:
            if not launch.compiles_only:  # or there would be no results to choose by
                self._compiled.add((x.dtype, out_dtype, activation))
                self._choose()
            for distinct in _ANY_TOKENS[:-1]:  # the last two share a row
                self._product(x.new_zeros((distinct, self.in_features)), out_dtype, activation)
        return self._product(x, out_dtype, activation)

    def _product(self, x: Tensor, out_dtype: torch.dtype, activation: Activation | None) -> Tensor:
        if activation is not None and len(x) > MAX_TOKENS:
            return elementwise.gate(self._product(x, out_dtype, None), activation)
        return self.of_codes(*quantize_tokens(x), out_dtype, activation)

    def of_codes(
        self, codes: Tensor, scales: Tensor, out_dtype: torch.dtype, activation: Activation | None = None
    ) -> Tensor:
        """Return the product of tokens that are FP8 already, codes [T, in] with scales fp32 [T]."""
        if self._torch_product is not None and out_dtype == torch.bfloat16 and len(codes) > MAX_TOKENS:
            return self._torch_product(codes, scales, self._bias)
        return self._ours(codes, scales, out_dtype, activation)

    @property
    def multiplies_by_torch(self) -> bool:
        """Tell whether torch computes its prompts' products in bf16; the first call may find that it does not."""
        return self._torch_product is not None

    def _ours(self, codes: Tensor, scales: Tensor, out_dtype: torch.dtype, activation: Activation | None) -> Tensor:
        config = gemm_config(self._target, codes.dtype, 8, len(codes), self.out_features, self.in_features)
        return gemm(codes, self._weight, self._bias, out_dtype, self._workspace, config, scales, activation)

    def _choose(self) -> None:
        """Keep torch's product where it agrees with ours."""
        if self._by_torch is None or self._torch_product is None:
            return

        def ours(codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
            return self._ours(codes, scales, torch.bfloat16, None)

        if not self._by_torch.agrees(self._weight, self._bias, self._torch_product, ours):
            self._torch_product = None

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """Implement Linear.embed."""
        rows = token_ids - first
        is_ours = (rows >= 0) & (rows < self.out_features)
        rows = rows.clamp(0, self.out_features - 1)
        group = FP8_GROUP if len(self._weight.scales) > 1 else self.in_features
        scales = self._weight.scales[:, rows].T.repeat_interleave(group, dim=1)[:, : self.in_features]
        found = self._weight.packed.view(torch.uint8)[rows].view(torch.float8_e4m3fn).float() * scales
        return torch.where(is_ours[:, None], found, 0.0).to(dtype)


class CudaExperts:
    """A layer's experts, as they are or in eight or four bits. Implements model.backend.Experts."""

    def __init__(self, weights: ExpertWeights, activation: Activation, quantization: Quantization):
        """Pack the experts on one device; plain weights are kept, and not copied if contiguous.

        Raises ValueError for groups of columns that the kernels don't know.
        """
        self._gate_up = self._packed(weights.gate_up, weights.gate_up_bias, quantization)
        self._down = self._packed(weights.down, weights.down_bias, quantization)
        self.hits = torch.zeros(weights.layer_number, dtype=torch.int64, device=self._gate_up.device)
        self.places = weights.places
        self._number = weights.number
        self._slot_hits = torch.zeros(
            weights.number, dtype=torch.int64, device=self._gate_up.device
        )  # of slots; not counted
        self._local_experts = range(weights.first, weights.first + weights.number)
        self._activation = activation
        self._is_compiled = False

    def __call__(self, x: Tensor, chosen: Chosen) -> Tensor:
        """Implement Experts for contiguous x. The first call compiles what any later one could need; it can't be
        captured."""
        if not self._is_compiled:
            self._is_compiled = True
            top_k = chosen.experts.shape[1]
            for tokens in (1, *[len(self.hits) * rows // top_k + 1 for rows in experts.ROWS_OF_CONFIGS]):
                nobody = chosen.experts.new_zeros((tokens, top_k)), chosen.weights.new_zeros((tokens, top_k))
                self(x.new_zeros((tokens, x.shape[1])), Chosen(*nobody))
        config = experts.experts_config(x.dtype, chosen.experts.numel(), len(self.hits))
        hits, held = self.hits, self._local_experts
        if self.places is not None:
            chosen = Chosen(experts.locate(chosen.experts, self.places.slots, hits), chosen.weights)
            hits, held = self._slot_hits, range(self._number)
        return experts.compute(x, chosen, self._gate_up, self._down, hits, held, self._activation, config)

    def slot_memory(self, slot: int) -> list[Tensor]:
        """Implement Experts.slot_memory."""
        return [part for weight in (self._gate_up, self._down) for part in weight.memory(slot, self._number)]

    @staticmethod
    def _packed(
        weight: Tensor | QuantizedWeight, bias: Tensor | None, quantization: Quantization
    ) -> experts.ExpertsWeight:
        if isinstance(weight, Tensor) and quantization in ("int8", "int4"):
            weight = quantize(weight, 8 if quantization == "int8" else 4)
        flat = None if bias is None else bias.reshape(-1)
        if isinstance(weight, Tensor):
            return experts.ExpertsWeight(weight.contiguous(), flat)
        return experts.ExpertsWeight(pack_groups(weight), flat)


_SPLIT = 1 << 10  # enough tokens that a context may be split


class CudaBackend:
    """Implements `Backend` for one GPU, which must be the thread's current CUDA device whenever a method is called."""

    def __init__(self, target: GpuTarget | None = None, prefill_kernel: PrefillKernel = "plain") -> None:
        """`target`: the GPU to choose launches for; the current CUDA device if None.

        Raises ValueError if that device is too old, RuntimeError if there is none.
        """
        if target is None:
            target = GpuTarget.of_device(torch.device("cuda", torch.cuda.current_device()))
        # Of the whole process: cuBLAS may else add up parts of a product in 16 bits.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._target = target
        self._prompts = PromptAttention(target, prefill_kernel)
        self._compiled: set[tuple[object, ...]] = set()
        self._torch_products = TorchProducts()
        self._with_codes: set[Fp8CudaLinear] = set()
        self._workspace: SplitWorkspace | None = None  # of all projections: they run one after the other

    def make_linear(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        quantization: Quantization,
        dtype: torch.dtype,
    ) -> CudaLinear | GroupedCudaLinear | Fp8CudaLinear:
        if isinstance(weight, Tensor) and quantization in ("int8", "int4"):
            weight = quantize(weight, 8 if quantization == "int8" else 4)
        is_fp8 = False
        if isinstance(weight, QuantizedWeight) and not can_pack(weight):
            is_fp8 = self._target.has_fp8 and dtype != torch.float32 and can_multiply_fp8(weight)
            if not is_fp8:
                return GroupedCudaLinear(weight, bias)
        if self._workspace is None:
            self._workspace = SplitWorkspace(weight.device if isinstance(weight, Tensor) else weight.values.device)
        if is_fp8 and isinstance(weight, QuantizedWeight):
            return Fp8CudaLinear(weight, bias, self._target, self._workspace, self._torch_products)
        return CudaLinear(weight, bias, self._target, self._workspace)

    def make_experts(
        self, weights: ExpertWeights, activation: Activation, quantization: Quantization, dtype: torch.dtype
    ) -> CudaExperts:
        return CudaExperts(weights, activation, quantization)

    def embed(self, token_ids: Tensor, table: Tensor | Linear, first: int, dtype: torch.dtype) -> Tensor:
        if isinstance(table, Tensor):
            return elementwise.vocab_embedding(token_ids, pack(table), first, dtype)
        return table.embed(token_ids, first, dtype)

    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    soft_cap = staticmethod(elementwise.soft_cap)
    square_sums = staticmethod(elementwise.square_sums)
    norm_rows = staticmethod(elementwise.norm_rows)
    route = staticmethod(experts.route)
    gate_by_sigmoid = staticmethod(experts.gate_by_sigmoid)
    # One launch each, which rounds once as our own would.
    add = staticmethod(torch.add)
    scale = staticmethod(torch.mul)

    def scale_by_position(self, x: Tensor, scales: Tensor, positions: Tensor) -> Tensor:
        """Implement Backend.scale_by_position in place."""
        return x.mul_(scales.index_select(0, positions)[:, None])

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        layout: BatchLayout,
        norms: HeadNorms | None = None,
        kv_scales: KVScales = AS_THEY_ARE,
        query_scales: Tensor | None = None,
    ) -> Tensor:
        places = layout.positions, layout.slots
        return elementwise.rope_and_write_kv(qkv, cos_sin, kv_layer, *places, norms, kv_scales, query_scales)

    write_latents = staticmethod(write_latents)
    write_index_keys = staticmethod(write_index_keys)  # torch's kernels

    state_kernels = CudaStates()

    group_square_sums = staticmethod(group_square_sums)
    norm_groups = staticmethod(norm_groups)

    def gate_rows(self, x: Tensor, gates: Tensor) -> Tensor:
        """Implement Backend.gate_rows."""
        return x * torch.sigmoid(gates)

    def gate_columns(self, gates: Tensor, x: Tensor, first: int, activation: Activation) -> Tensor:
        """Implement Backend.gate_columns."""
        return elementwise.gate(torch.cat((gates, x[:, first : first + gates.shape[1]]), dim=1), activation)

    def make_mla(self, heads: MLAHeads, parts: ContextParts | None = None) -> CudaMLA:
        return CudaMLA(heads, self._target, parts)

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation) -> Tensor:
        if activation == "relu2":
            return gate_up(x).relu_().square_()
        if isinstance(gate_up, CudaLinear | Fp8CudaLinear):
            return gate_up(x, activation=activation)
        return elementwise.gate(gate_up(x), activation)

    def feed_forward(self, x: Tensor, gate_up: Linear, down: Linear, activation: Activation) -> Tensor:
        if not isinstance(down, Fp8CudaLinear) or activation == "relu2":
            return down(self.gated(x, gate_up, activation))

        def of_many(x: Tensor) -> Tensor:
            return down.of_codes(*elementwise.gate_codes(gate_up(x), activation), x.dtype)

        if down not in self._with_codes:  # compiles what any later step could need
            if not launch.compiles_only:
                self._with_codes.add(down)
            down(x.new_zeros((1, down.in_features)))
            of_many(x.new_zeros((MAX_TOKENS + 1, x.shape[1])))
        return of_many(x) if len(x) > MAX_TOKENS else down(self.gated(x, gate_up, activation))

    def attention(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm) -> Tensor:
        if kv_layer.dtype == torch.float8_e4m3fn and not self._target.has_fp8:
            kv_layer = kv_layer.view(torch.int8)
        self._compile_once(q, kv_layer, form)
        out = rows_like(q)
        if layout.num_decodes:
            self._attend_decodes(q, kv_layer, layout, form, out)
        if len(q) > layout.num_decodes:
            self._prompts(q, kv_layer, layout, form, out)
        return out

    def _attend_decodes(
        self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm, out: Tensor
    ) -> None:
        groups, dim = kv_layer.shape[2], q.shape[2]
        most_keys = min(layout.max_context_len, abs(form.window) or layout.max_context_len)
        config = decode_config(self._target, dim, q.dtype, groups, most_keys)
        decode_attention(q, kv_layer, layout, form, out, config)

    def _compile_once(self, q: Tensor, kv_layer: Tensor, form: AttentionForm) -> None:
        """Compile every variant of the attention kernels for shapes and form, by launching each on an empty sequence.

        Which variant a step takes depends on its lengths; without this the first long context, for one, would wait
        seconds for a compiler. On the way kernels for prompts are held against each other.
        """
        key = variant_key(q, kv_layer, form)
        if key in self._compiled:
            return
        if not launch.compiles_only:
            self._compiled.add(key)
        q = torch.zeros_like(q[:1])
        out = rows_like(q)
        self._attend_decodes(q, kv_layer, BatchLayout.of_nothing(q.device, _SPLIT), form, out)
        self._prompts.prepare(q, kv_layer, form, BatchLayout.of_nothing(q.device))
