"""Facts and numbers that a worker reports: for routing, for metrics, for `twostroke status`.

`StepCosts` predicts how long an engine step takes from its contents. Workers fit it; routers and schedulers use it. It
has the form of the rooflines of prefill and decode: a constant (weights are read once a step), the products of prompt
tokens, attention over pairs of a prompt token and each token that it sees, then the cost of each decoding row and of
each token of its context. A mixture of experts reads only the experts that its tokens hit: nearly all with a chunk of a
prompt, few in a small batch of decodes.
"""

from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Address, Peer

MIN_STRETCH = 1.5
"""A promise that not even a request alone could keep limits a step to so many times what it takes alone."""


class StepCosts(msgspec.Struct, frozen=True, array_like=True):
    """Seconds a unit; none is negative."""

    base_s: float  # of any step, the reading of experts aside
    token_s: float  # of a prompt token
    pair_s: float  # of a prompt token and a token that it attends to: n new after p cached tokens are n * (p + n / 2)
    row_s: float  # of a request that decodes
    context_s: float  # of a token in the context of a request that decodes, or before a chunk of a prompt
    num_samples: int = 0  # steps behind this
    experts_s: float = 0.0  # of a step that reads all experts
    expert_share: float = 0.0  # of the experts, that a token takes; 0: there are none

    @property
    def weights_s(self) -> float:
        """The constant of a step that reads all weights, as with a chunk of a prompt."""
        return self.base_s + self.experts_s

    def reading_s(self, num_tokens: float) -> float:
        """The constant of a step of so many tokens: it reads the experts that these hit, if all are hit alike."""
        missed: float = (1.0 - self.expert_share) ** num_tokens
        return self.base_s + self.experts_s * (1.0 - missed)

    def prompt_s(self, num_new: int, num_before: int = 0) -> float:
        """Return the seconds that `num_new` prompt tokens after `num_before` others add to steps (no constant)."""
        return num_new * (self.token_s + self.pair_s * (num_before + num_new / 2))

    def decode_s(self, num_rows: int, num_context_tokens: int) -> float:
        """Return the seconds that decoding requests with so many tokens of context in all add to a step."""
        return num_rows * self.row_s + num_context_tokens * self.context_s

    def prefill_s(self, num_new: int, num_before: int, step_tokens: int) -> float:
        """Return a whole prompt's time in steps of `step_tokens` tokens of its own, with no other request in them."""
        if num_new <= 0:
            return 0.0
        num_steps = -(-num_new // step_tokens)
        num_read = num_steps * num_before + step_tokens * num_steps * (num_steps - 1) // 2  # before each step's chunk
        reading_s = num_steps * self.reading_s(min(num_new, step_tokens))
        return reading_s + num_read * self.context_s + self.prompt_s(num_new, num_before)


def typical(costs: Iterable[StepCosts | None]) -> StepCosts | None:
    """Costs of the worker in the middle, by a step of some prompt and some rows; None, of cold workers, don't count.

    They are one worker's and no means of several: numbers that were fitted together only make sense together.
    """
    known = sorted((one for one in costs if one is not None), key=_usual_s)
    return known[(len(known) - 1) // 2] if known else None


def _usual_s(costs: StepCosts) -> float:
    return costs.weights_s + costs.prompt_s(512) + costs.decode_s(8, 8 * 512)


Role = Literal["prefill", "decode"]

ROLES: tuple[Role, ...] = get_args(Role)

StepRole = Literal["prefill", "decode", "even"]
"""The preference of a worker's steps: prompts, streams, or neither. A worker begins with that of its role, and may be
asked for another while it serves."""

STEP_ROLES: tuple[StepRole, ...] = get_args(StepRole)


def role_of(info: "WorkerInfo", stats: "WorkerStats | None") -> Role:
    """Return the role by which a worker is chosen now; an even one computes prompts for itself, as decode workers do.

    It is the worker's own until its numbers say otherwise.
    """
    if stats is None or stats.step_role is None:
        return info.role
    return "prefill" if stats.step_role == "prefill" else "decode"


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's fixed facts, published when it starts."""

    role: Role
    peer: Peer
    token_address: Address  # its token channel listener
    transfer_addresses: tuple[Address, ...]  # transfer control listeners, one for each rank; none: it receives no KV
    layout: KVLayout  # decides with whom it can exchange KV
    num_blocks: int
    max_context: int  # tokens, prompt and output together
    max_step_tokens: int = 2048  # of one engine step
    max_batch: int = 256  # requests in one step
    weights: str | None = None  # what quantised ones are held in; None: all are of the layout's dtype
    vocab_size: int | None = None  # of the model: all token ids are below it; None: nothing is known of them
    machine: str = ""  # workers with the same one share a CPU or a GPU, and slow each other; empty: it shares none

    @property
    def full_contexts(self) -> float:
        """Requests of the longest context that fit into the cache."""
        needed = self.layout.groups.blocks_of(self.max_context, self.layout.block_size, self.max_step_tokens)
        return self.num_blocks / max(1, needed)


class QueuedWork(msgspec.Struct, frozen=True, array_like=True):
    """The prompt work of one SLO class that a worker still has before it."""

    class_name: str
    priority: int
    share: float
    tokens: int  # of prompts
    requests: int


class GpuUse(msgspec.Struct, frozen=True, array_like=True):
    """A worker's first GPU as NVML tells of it."""

    memory_used_bytes: int
    memory_total_bytes: int
    utilization: float  # share of the time in which some kernel ran, 0 to 1


class TierStats(msgspec.Struct, frozen=True):
    """Numbers of one KV tier as one worker sees it. Counters only grow within one epoch."""

    name: str  # `host`, `disk` or `shared`
    lookups: int = 0  # counter: objects looked up
    hits: int = 0  # counter: objects read whole
    hit_tokens: int = 0  # counter: prompt tokens whose KV came from it
    read_bytes: int = 0  # counter
    read_seconds: float = 0.0  # counter
    written_objects: int = 0  # counter
    written_bytes: int = 0  # counter
    write_seconds: float = 0.0  # counter
    dropped: int = 0  # counter: objects that were to be written and found no place in the queue, or no blocks any more
    evicted: int = 0  # counter: objects deleted for the quota
    quarantined: int = 0  # counter: objects with a wrong digest
    errors: int = 0  # counter: reads and writes that the storage failed
    late: int = 0  # counter: reads given up since computing was quicker
    num_bytes: int = 0  # held now; 0: not known, as of a bucket
    max_bytes: int = 0  # quota; 0: none
    is_open: bool = True  # False before its storage and the key's file have answered
    read_s: float = 0.0  # predicted seconds of one read, however short
    read_token_s: float = 0.0  # predicted further seconds for each token


class WorkerStats(msgspec.Struct, frozen=True):
    """A worker's changing numbers. Counters only grow within one epoch."""

    num_waiting: int = 0  # requests that wait for blocks, or whose KV is still arriving
    num_running: int = 0
    num_decoding: int | None = None  # of both, those whose answers are written here; None: all of a decode worker's
    num_waiting_tokens: int = 0  # prompt tokens still to be computed, of all requests
    free_blocks: int = 0  # unowned blocks, cached ones included
    total_blocks: int = 0
    owned_blocks: int = 0  # referenced by a request or a transfer: 0 when idle
    num_transfers: int = 0  # in flight
    prefix_queries: int = 0  # counter: prompt tokens looked up
    prefix_hits: int = 0  # counter: prompt tokens found
    computed_tokens: int = 0  # counter: prompt tokens computed
    generated_tokens: int = 0  # counter
    drafts: int = 0  # counter: of one request in one step each, by speculative decoding
    draft_tokens: int = 0  # counter: rows of steps that drafted tokens took
    accepted_tokens: int = 0  # counter: of these, the ones that were drawn
    accepted_by_position: tuple[int, ...] = ()  # counters: the same by their place in the draft
    steps: int = 0  # counter
    step_seconds: float = 0.0  # counter: time spent in engine steps
    preemptions: int = 0  # counter
    swaps: int = 0  # counter: of the preemptions, those whose KV went to host memory
    swap_bytes: int = 0  # counter: copied to host memory and back, on rank 0
    swap_seconds: float = 0.0  # counter
    swapped_blocks: int = 0  # blocks of host memory that hold a request's KV: 0 when idle
    finished_requests: int = 0  # counter
    aborted_requests: int = 0  # counter
    dropped_log_lines: int = 0  # counter: found the queue of the log's writer full, or could not be written
    transfers_done: int = 0  # counter
    transfers_failed: int = 0  # counter
    transfers_given_up: int = 0  # counter: of the failed, those that one of both sides did not want any more
    transfer_bytes: int = 0  # counter
    transfer_seconds: float = 0.0  # counter
    transfer_digest_failures: int = 0  # counter: chunks of KV that arrived damaged
    transfer_links_lost: int = 0  # counter: data links that broke while their connection stood
    pulled_tokens: int = 0  # counter: prompt tokens whose KV came from another worker's prefix cache
    broken_logit_rows: int = (
        0  # counter: drawn rows of logits with NaN or +inf; above 0 the model or the cache is unsound
    )
    collection_seconds: tuple[float, ...] = ()  # counters: of Python's garbage, by generation; empty before the first
    queued: tuple[QueuedWork, ...] = ()  # by class; their tokens sum up to num_waiting_tokens
    context_tokens: int = 0  # of the requests that decode
    tightest_tpot_s: float | None = None  # longest step that keeps their promises, as far as any; None: there are none
    draft_speedup: float = 1.0  # factor by which drafts shorten the time per token of a newcomer
    costs: StepCosts | None = None  # how long steps take here; None: too few have run yet
    is_draining: bool = False  # takes no new requests
    has_hung: bool = False  # a step has exceeded its bound: the worker hangs up, and its process ends
    step_role: StepRole | None = None  # None: that of its WorkerInfo
    flops: float = 0.0  # counter: of the model's products and attention
    read_bytes: float = 0.0  # counter: of weights and KV that steps have read
    peak_flops_per_s: float = 0.0  # of the machine, for one worker; 0: not known
    peak_bytes_per_s: float = 0.0  # of its memory
    mfu: float | None = None  # share of the peak over the last seconds, idle time included; None: not known
    mbu: float | None = None
    gpu: GpuUse | None = None  # None: it has none, or nobody can tell
    expert_skews: tuple[float, ...] = ()  # by layer: hits of the hottest expert over the mean, of late; 0: no hits
    expert_copies: int = 0  # of experts of all layers, that ranks hold beside their own
    expert_imbalances: tuple[float, ...] = ()  # by layer: the busiest rank's rows of late over the mean; 0: no rows
    tiers: tuple[TierStats, ...] = ()  # KV tiers in the order in which they are looked up


class TransferStats(msgspec.Struct, array_like=True):
    """Counters of one worker's, or one rank's, side of KV transfer; they only grow, but for `in_flight`."""

    in_flight: int = 0  # transfers that have not ended
    done: int = 0  # verified
    failed: int = 0  # ended otherwise, given up ones included
    given_up: int = 0  # of the failed, those not wanted any more, on this side or by the peer's word
    digest_failures: int = 0  # chunks whose bytes did not match their digest (receiver only)
    links_lost: int = 0  # data links that broke, or could not be joined, while their connection stood (sender only)
    bytes: int = 0  # of KV on the wire, sent or received
    seconds: float = 0.0  # summed over the verified ones, from open or expect to verified

    def end(self, failure: str | None, seconds: float, *, is_given_up: bool) -> None:
        """A transfer has ended after so many seconds."""
        self.in_flight -= 1
        if failure is None:
            self.done += 1
            self.seconds += seconds
        else:
            self.failed += 1
            self.given_up += is_given_up
