"""What a worker tells about itself: for routing, for metrics, for `twostroke status`."""

from typing import Literal

import msgspec

from protocol.tickets import Address, Peer

Role = Literal["prefill", "decode"]


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's fixed facts, published when it starts."""

    role: Role
    peer: Peer
    token_address: Address  # its token channel listener
    transfer_address: Address | None  # its transfer control listener; None: it receives no KV
    fingerprint: str  # of model and KV layout: workers with different ones can't exchange KV
    block_size: int
    num_blocks: int
    max_context: int  # tokens, prompt and output together


class WorkerStats(msgspec.Struct, frozen=True):
    """A worker's changing numbers. Counters only grow within one epoch."""

    num_waiting: int = 0  # requests that hold no place in a step yet
    num_running: int = 0
    num_waiting_tokens: int = 0  # prompt tokens still to be computed, of all requests
    free_blocks: int = 0  # unowned blocks, cached ones included
    total_blocks: int = 0
    owned_blocks: int = 0  # referenced by a request or a transfer: 0 when idle
    num_transfers: int = 0  # in flight
    prefix_queries: int = 0  # counter: prompt tokens looked up
    prefix_hits: int = 0  # counter: prompt tokens found
    computed_tokens: int = 0  # counter: prompt tokens computed
    generated_tokens: int = 0  # counter
    steps: int = 0  # counter
    step_seconds: float = 0.0  # counter: time spent in engine steps
    preemptions: int = 0  # counter
    finished_requests: int = 0  # counter
    aborted_requests: int = 0  # counter
    transfers_done: int = 0  # counter
    transfers_failed: int = 0  # counter
    transfer_bytes: int = 0  # counter
    transfer_seconds: float = 0.0  # counter
    transfer_digest_failures: int = 0  # counter: chunks of KV that arrived damaged
    broken_logit_rows: int = 0  # counter: rows of logits with NaN or +inf; above 0 the model or the cache is unsound
