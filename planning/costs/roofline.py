"""Rooflines of whole steps: the least time of a step on a machine, and the time at a part of its peaks.

Every kernel takes the longer of computing and moving bytes (Williams et al., Roofline, CACM 2009), and a step's kernels
run one after the other. Ranks of a tensor-parallel worker share the products and sum twice a layer (Shoeybi et al.,
Megatron-LM, 2019) in a ring, which moves 2 (n - 1) / n of the bytes over each link (Thakur et al. 2005).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from twostroke.model.config import ModelConfig, ModelShape
from twostroke.model.costs.operations import (
    AS_BF16,
    Kind,
    NumberFormats,
    Operation,
    decode_operations,
    prefill_operations,
    stored_form,
)
from twostroke.model.published.hardware import EFFICIENCY, PEAK, Efficiency, Hardware, Number
from twostroke.protocol.stats import StepCosts

SUMS_A_LAYER = 2
MAX_BATCH = 1 << 16


@dataclass(frozen=True)
class WorkerHardware:
    """One worker's GPUs, and how it holds the model."""

    hardware: Hardware
    ranks: int = 1
    held: NumberFormats = AS_BF16
    efficiency: Efficiency = EFFICIENCY
    shares_contexts: bool = False  # ranks share the tokens of latents

    def number(self, shape: ModelShape, kind: Kind = "product") -> Number:
        """Return the number format that operations multiply in: FP8 products where the checkpoint has them and the
        GPU can, else the native one. int8 and int4 are weights alone: they are read and multiplied in bf16
        (docs/design/engine.md)."""
        form = stored_form(shape)
        is_fp8 = form is not None and form.kind == "fp8" and self.held.quantization == "auto"
        can = kind == "product" and "fp8" in self.hardware.flops_per_s
        return "fp8" if is_fp8 and can else self.hardware.native

    def bound(self, shape: ModelShape, one: Operation) -> str:
        """Return what an operation waits for at the peaks: FLOPs or bandwidth."""
        return "FLOPs" if one.intensity > self.hardware.ridge(self.number(shape, one.kind)) else "bandwidth"

    def operation_s(self, shape: ModelShape, one: Operation) -> float:
        """Seconds of one kind of operation."""
        hardware, efficiency = self.hardware, self.efficiency
        share = 1.0 if one.kind == "norm" else 1.0 / self.ranks
        computing_s = one.flops * share / (hardware.flops_per_s[self.number(shape, one.kind)] * efficiency.compute)
        kv = one.kv_bytes * self.kv_share(shape)
        moved = (one.weight_bytes + one.activation_bytes) * share + kv
        return max(computing_s, moved / (hardware.read_bytes_per_s * efficiency.read))

    def kv_share(self, shape: ModelShape) -> float:
        """Share of a token's KV that one rank holds: whole heads; of latents everything, or its part of the tokens."""
        if self.shares_contexts:
            return 1.0 / self.ranks
        return max(1, shape.num_kv_heads // self.ranks) / shape.num_kv_heads

    def sums_s(self, shape: ModelShape, rows: float) -> float:
        """Return the seconds of the ranks' sums in a step of `rows` rows."""
        if self.ranks == 1:
            return 0.0
        moved = 2 * (self.ranks - 1) / self.ranks * rows * shape.hidden_size * self.held.itemsize
        each_s = self.hardware.kernel_s + moved / self.hardware.link_bytes_per_s
        return SUMS_A_LAYER * shape.num_layers * each_s

    def exchange_s(self, shape: ModelShape, decodes: float, gathered: float) -> float:
        """Return the seconds of a step in which ranks that share contexts exchange more than sums.

        These are all heads' queries and results of each decode, and `gathered` tokens' latents of the contexts that
        prompts attend to (docs/design/engine.md#parallel-forms)."""
        sizes = shape.latent
        if not self.shares_contexts or self.ranks == 1 or sizes is None:
            return 0.0
        row = sizes.rank + sizes.rotary
        numbers = decodes * shape.num_heads * (row + sizes.rank) + gathered * row
        moved = (self.ranks - 1) / self.ranks * numbers * self.held.itemsize
        launches = self.hardware.kernel_s * ((2 if decodes else 0) + (1 if gathered else 0))
        return shape.num_layers * (launches + moved / self.hardware.link_bytes_per_s)

    def step_s(self, shape: ModelShape, rows: float, operations: Sequence[Operation]) -> float:
        """Seconds of a step of so many rows, what `exchange_s` tells aside."""
        computed_s = sum(self.operation_s(shape, one) for one in operations)
        return computed_s + self.sums_s(shape, rows) + self.efficiency.host_s

    def prefill_s(self, shape: ModelShape, tokens: int, step_tokens: int | None = None) -> float:
        """A whole prompt, in chunks of `step_tokens`, with nobody else in its steps."""
        size, seconds = step_tokens or tokens, 0.0
        for before in range(0, tokens, size):
            chunk = min(size, tokens - before)
            operations = prefill_operations(shape, chunk, before, self.held, is_last=before + chunk == tokens)
            seconds += self.step_s(shape, chunk, operations) + self.exchange_s(shape, 0, before + chunk)
        return seconds

    def decode_s(self, shape: ModelShape, batch: int, context: float) -> float:
        """A step of `batch` sequences with `context` tokens each."""
        computed_s = self.step_s(shape, batch, decode_operations(shape, batch, context, self.held))
        return computed_s + self.exchange_s(shape, batch, 0)

    def at_peak(self) -> "WorkerHardware":
        """The same with nothing lost: what it takes is a floor."""
        return replace(self, efficiency=PEAK)


def ttft_floor_s(machine: WorkerHardware, shape: ModelShape, prompt: int) -> float:
    """No first token of a prompt comes earlier from an idle worker: its operations at the peaks, in one chunk."""
    return machine.at_peak().prefill_s(shape, prompt)


def tpot_floor_s(machine: WorkerHardware, shape: ModelShape, context: float) -> float:
    """No token comes sooner after the one before: weights and one context are read once (Pope et al. 2023)."""
    return machine.at_peak().decode_s(shape, 1, context)


def largest_batch(token_s: Callable[[int], float], tpot_s: float) -> int:
    """The most sequences with at most `tpot_s` for each token, memory aside; 0: not even one has.

    `token_s` tells a token's time by the batch. It rises with the batch, so halving finds it.
    """
    low, high = 0, MAX_BATCH
    while low < high:
        middle = (low + high + 1) // 2
        if token_s(middle) <= tpot_s:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class BatchLimits:
    """The most sequences that a step may have, by what each of a worker's means allows for itself."""

    memory: float  # weights and all contexts have room
    bandwidth: float  # both are read within the promised time
    compute: float  # the products of all rows take no longer

    @property
    def binds(self) -> str:
        """Name the one that allows the fewest."""
        return min(("memory", "bandwidth", "compute"), key=lambda name: float(getattr(self, name)))

    @property
    def batch(self) -> int:
        """The most sequences that all three allow."""
        return int(getattr(self, self.binds))


def batch_limits(
    machine: WorkerHardware, shape: ModelShape, weights: float, context: float, tpot_s: float
) -> BatchLimits:
    """Textbook limits of a batch of `context` tokens each under a TPOT promise (Pope et al., MLSys 2023): the whole
    memory, and products and reads one beside the other. `weights` are the bytes of all ranks together."""
    hardware, efficiency = machine.hardware, machine.efficiency
    kv = kv_bytes(shape, context, machine.held.kv_itemsize) * machine.kv_share(shape) * machine.ranks
    read = hardware.read_bytes_per_s * efficiency.read * machine.ranks * tpot_s
    flops = hardware.flops_per_s[machine.number(shape)] * efficiency.compute * machine.ranks * tpot_s
    return BatchLimits(
        memory=max(0.0, (hardware.memory_bytes * machine.ranks - weights) / kv),
        bandwidth=max(0.0, (read - weights) / kv),
        compute=flops / flops_of(decode_operations(shape, 1, context, machine.held)),
    )


def knee(batches: Sequence[int], rates: Sequence[float]) -> int:
    """Return the last batch to which rows were worth adding: throughput rose at least half as much as their number.

    Beyond it a step's reads are shared by as many rows as they can be. With experts, whose number that a step reads
    grows with its rows, throughput may rise slowly before it, too.
    """
    worth = [
        more
        for (rate, later), (batch, more) in zip(pairwise(rates), pairwise(batches), strict=True)
        if later / rate - 1 >= (more / batch - 1) / 2
    ]
    return max(worth, default=batches[0])


# --- needs of one model, whatever machine it is on ---


def kv_bytes(shape: ModelShape, tokens: float = 1, itemsize: float = 2.0) -> float:
    """Bytes that the caches of all layers hold of `tokens`: of layers with windows, of the last ones alone."""
    return itemsize * shape.kv_held(tokens)


def flops_of(operations: Sequence[Operation], kind: Kind | None = None) -> float:
    """Products and attention, or one of them: what the literature counts."""
    return sum(one.flops for one in operations if (one.kind != "norm" if kind is None else one.kind == kind))


def as_mha(shape: ModelConfig) -> ModelConfig:
    """The same model with keys and values of every query head, as before MQA, GQA (Ainslie et al. 2023) and latents."""
    head_dim = shape.head_dim if shape.latent is None else shape.latent.value
    return replace(shape, latent=None, num_kv_heads=shape.num_heads, head_dim=head_dim)


def uncached_flops(shape: ModelShape, prompt: int, answer: int) -> float:
    """A request without a KV cache: each token of the answer computes all tokens before it again."""
    stride = max(1, answer // 64)
    steps = [flops_of(prefill_operations(shape, prompt + written)) for written in range(0, answer, stride)]
    return sum(steps) / len(steps) * answer


def cached_flops(shape: ModelShape, prompt: int, answer: int) -> float:
    """The same with a cache: the prompt once, and then a row a token."""
    row = flops_of(decode_operations(shape, 1, prompt + answer / 2))
    return flops_of(prefill_operations(shape, prompt)) + (answer - 1) * row


# --- links, and money ---


def transfer_s(kv_bytes: float, bytes_per_s: float) -> float:
    """KV of a prompt on a link, none of it hidden behind computing (Zhong et al., DistServe, OSDI 2024, 3.3)."""
    return kv_bytes / bytes_per_s


@dataclass(frozen=True)
class Interference:
    """Terms of the inequality that says when a transfer negates disaggregation.

    On a worker that does both, prompts take share = rate x prefill of its time at `rate` requests a second. An answer's
    own steps take answer x step, and it waits share / (1 - share) times as long for others' prompts. Disaggregation
    saves that and costs a transfer, which negates it where

        KV(prompt) / link  >=  share / (1 - share) x answer x step.

    By Little's law a worker of B rows on average serves B requests in the time of an answer. There
    rate = B / (answer x step + B x prefill), and the right side is B x prefill.
    """

    prefill_s: float
    answer: float  # tokens
    step_s: float
    batch: float
    kv_bytes: float  # of a prompt

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.batch / (self.answer * self.step_s + self.batch * self.prefill_s)

    @property
    def waits_s(self) -> float:
        """Return how long an answer waits for others' prompts."""
        share = self.rate * self.prefill_s
        return share / (1 - share) * self.answer * self.step_s

    @property
    def slowest_link(self) -> float:
        """Bytes a second of the link at which a transfer takes what disaggregation saves."""
        return self.kv_bytes / self.waits_s

    def shortest_answer(self, bytes_per_s: float) -> float:
        """Tokens of the answer that waits, at this rate, as long as the transfer takes on a link."""
        return self.answer * transfer_s(self.kv_bytes, bytes_per_s) / self.waits_s


def request_usd(usd_per_hour: float, prefill_s: float, answer_s: float, batch: float = 1) -> float:
    """Price of a request: the machine while its prompt is computed, and its part of a batch's steps after that."""
    return usd_per_hour / 3600.0 * (prefill_s + answer_s / batch)


def usd_per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    """Return USD per million tokens, from the hourly cost of all machines and their tokens per second."""
    return usd_per_hour / (3600.0 * tokens_per_s) * 1e6


def step_costs(machine: WorkerHardware, shape: ModelShape, context: float, step_tokens: int) -> StepCosts:
    """The roofline in the form that schedulers, routers and the simulator know: a sum where this is a maximum.

    Exact at a prompt of `step_tokens`, and at decodes of one and of 64 rows of about `context` tokens.
    """
    experts = shape.expert_share
    near, far = 0.5 * context, 1.5 * context
    rows, few = 64, 1
    context_s = (machine.decode_s(shape, rows, far) - machine.decode_s(shape, rows, near)) / (rows * (far - near))

    def decode_s(batch: int) -> float:
        """Return the step's time without the contexts, in seconds."""
        return machine.decode_s(shape, batch, context) - batch * context * context_s

    experts_s = 0.0
    if experts:
        read = next(one for one in decode_operations(shape, MAX_BATCH, context, machine.held) if one.name == "experts")
        rate = machine.hardware.read_bytes_per_s * machine.efficiency.read
        experts_s = read.weight_bytes / machine.ranks / rate

    def reading_s(batch: int) -> float:
        return experts_s * (1.0 - (1.0 - experts) ** batch) if experts else 0.0

    row_s = max(0.0, (decode_s(rows) - reading_s(rows) - decode_s(few) + reading_s(few)) / (rows - few))
    base_s = max(0.0, decode_s(few) - reading_s(few) - few * row_s)
    chunk = prefill_operations(shape, step_tokens, 0, machine.held)
    attention = next(one for one in chunk if one.kind == "attention")
    pair_s = machine.operation_s(shape, attention) / (step_tokens**2 / 2)
    # Every chunk gathers all of its context.
    gathering_s = machine.exchange_s(shape, 0, 2 * step_tokens) - machine.exchange_s(shape, 0, step_tokens)
    pair_s += gathering_s / step_tokens**2
    whole_s = machine.prefill_s(shape, step_tokens) - base_s - reading_s(step_tokens)
    token_s = max(0.0, whole_s / step_tokens - pair_s * step_tokens / 2)
    return StepCosts(
        base_s=base_s,
        token_s=token_s,
        pair_s=pair_s,
        row_s=row_s,
        context_s=max(0.0, context_s),
        experts_s=experts_s,
        expert_share=experts,
    )
