"""Parts of the mean answer that do not overlap, from the client's times and the server's stages. Pure.

The server's stages (docs/observability.md) overlap: KV travels while the prompt is computed, so `transfer_s` begins
with the attempt; and `decode_s` begins with the first token, which the prefill worker sends before the KV has
arrived. So that nothing counts twice, only what the transfer does after prefill is a part, and decode begins after
that and after the wait for the first decode step. Only durations are subtracted, never moments of two clocks.
"""

from collections.abc import Mapping

import msgspec


class StagePart(msgspec.Struct, frozen=True):
    """A stretch of the mean answer."""

    name: str
    mean_s: float


CLIENT_PARTS = ("until the first token", "first to last token")
SERVER_PARTS = (
    "to the server and back",  # the sender's lag and the network: the client's TTFT less the server's
    "admission",
    "prefill queue",
    "prefill",
    "handing over",  # of the time to first token, what no worker accounts for: calls and their way back
    "KV transfer after prefill",
    "decode queue",
    "decode",
)


def server_parts(stages: Mapping[str, float], client_ttft_s: float, client_e2e_s: float) -> tuple[float, ...]:
    """The parts of one answer, in the order of SERVER_PARTS. Their sum is `client_e2e_s`.

    Where a decode worker computed the prompt itself there is no `prefill_s`: then its queue stands before prefill, and
    prefill is all from there to the first token.
    """
    ttft_s = min(stages.get("ttft_s", client_ttft_s), client_ttft_s)
    after_s = client_e2e_s - client_ttft_s
    admit_s = min(stages.get("admit_s", 0.0), ttft_s)
    decode_queue_s = stages.get("decode_queue_s", 0.0)
    left_s = ttft_s - admit_s
    if "prefill_s" not in stages:
        queue_s = min(decode_queue_s, left_s)
        return client_ttft_s - ttft_s, admit_s, queue_s, left_s - queue_s, 0.0, 0.0, 0.0, after_s
    queue_s = min(stages.get("prefill_queue_s", 0.0), left_s)
    prefill_s = min(stages["prefill_s"], left_s - queue_s)
    exposed_s = min(max(0.0, stages.get("transfer_s", 0.0) - queue_s - prefill_s), after_s)
    wait_s = min(decode_queue_s, after_s - exposed_s)
    return (
        client_ttft_s - ttft_s,
        admit_s,
        queue_s,
        prefill_s,
        left_s - queue_s - prefill_s,
        exposed_s,
        wait_s,
        after_s - exposed_s - wait_s,
    )
