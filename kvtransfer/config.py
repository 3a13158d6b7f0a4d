"""Settings of KV transfer."""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import field_validator

from twostroke.protocol.kv_layout import Encoding
from twostroke.protocol.settings import Count, Section

TransportName = Literal["auto", "tcp", "shm", "torch_distributed", "cuda_ipc", "nixl"]


class TransferConfig(Section):
    """Transfer of KV between workers. Both sides should have the same values; a peer with other ones is only given up
    sooner or later."""

    transport: TransportName = "auto"
    """auto: for each pair of workers the best that both have: on one machine memory is shared (`shm` on CPUs,
    `cuda_ipc` on GPUs), between machines `tcp` on CPUs and `torch_distributed` (NCCL) on GPUs. `torch_distributed` on
    CPUs is gloo, slower than `tcp`; neither `tcp` nor `shm` reaches a GPU's memory. `nixl` is RDMA by NIXL (the
    extra `nixl`: `make tools`, or `pip install -e '.[nixl]'` in the checkout), on CPUs and GPUs; auto does not take it
    before RDMA hardware has confirmed it. `twostroke doctor` shows what came of it."""
    tcp_streams: Annotated[int, Ge(1), Le(64)] = 4
    """Connections of one `tcp` link between machines, which large chunks are spread over; within a machine it is one.
    More where they don't fill the wire."""
    tcp_max_bytes_per_s: Annotated[int, Ge(1000)] | None = None
    """Largest rate of one `tcp` link, by the kernel's pacing; null: unlimited. Set it where KV shares a network with
    other traffic."""

    lease_s: float = 3.0
    """Seconds after which a silent peer's transfers end, and a link whose chunk takes longer; 0.1 to `progress_s`. A
    decode worker that can't reach the prefill worker then computes the prompt itself. Raise it for machines that stand
    still at times: blocks of lost peers are then kept longer, too."""
    progress_s: float = 15.0
    """Seconds, at least 1, after which a transfer is given up on which the peer makes no step although it sends pings:
    its engine stands still, or other prompts go first there. It must be longer than a prompt that has begun may wait
    for others. A prompt that has not begun is no transfer yet. KV whose request waits for room at the decode worker is
    kept however long that takes."""
    max_chunk_bytes: int | None = None
    """Largest chunk, at least 4096, or one unit where that is larger. Transfers take turns by chunks: smaller ones are
    fairer to short prompts, larger ones cost less each. null: 4 MiB for caches in host memory with two chunks of a link
    under way, 32 MiB for GPUs with three. Links by `torch_distributed` and `nixl` between GPUs need memory for three
    chunks each. It is set aside before the KV cache is sized, for links with all workers there may be. Where that would
    be more than 1 GiB, their chunks are smaller, down to 4 MiB."""
    encoding: Encoding = "raw"
    """KV as it is stored (`raw`), or one byte a value with a scale for each token and head: half the bytes of bf16, and
    answers that differ a little: of 27 greedy ones of a float32 model that a user compared with `raw`'s, 26 were equal
    with `int8` and 16 with `fp8`. For slow wires. Not with `model.kv_cache_dtype: fp8`, which has one byte already, nor
    with `shm` and `cuda_ipc`: `auto` then gives them up, though on one machine they are the faster way."""
    max_pending_offers: Count = 4096
    """Transfers whose offers wait for their request, or for room with it; more are refused."""
    max_queued_messages: Count = 65536
    """Messages of one peer that wait for their bytes; a peer that sends more is cut off."""
    used_ticket_s: Annotated[float, Ge(1)] = 900.0
    """Seconds that a used ticket is remembered, so that it is not used twice."""
    max_used_tickets: Count = 65536
    """Tickets that are remembered; the oldest go first."""

    @field_validator("transport", mode="before")
    @classmethod
    def _check_name(cls, transport: object) -> object:
        if isinstance(transport, str) and transport.lower() in ("nccl", "gloo"):
            raise ValueError(f"{transport} is not a name here: set torch_distributed, which uses it")
        return transport
