"""What a side of KV transfer counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class TransferStats:
    """Counters of one worker's side; they only grow, but for `in_flight`."""

    in_flight: int = 0  # transfers that have not ended
    done: int = 0  # verified
    failed: int = 0  # ended otherwise, given up ones included
    given_up: int = 0  # of the failed, those not wanted any more, on this side or by the peer's word
    digest_failures: int = 0  # chunks whose bytes did not match their digest (receiver only)
    retries: int = 0  # chunks that the target asked for again (sender only)
    links_lost: int = 0  # data links that broke, or could not be joined, while their connection stood (sender only)
    bytes: int = 0  # of KV on the wire, sent or received
    seconds: float = 0.0  # summed over the verified ones, from open or expect to verified
