"""How a request gives way: it is computed again later, or its KV goes to host memory and comes back. Pure."""

from dataclasses import dataclass
from typing import Literal

Preemption = Literal["recompute", "swap", "auto"]


@dataclass(slots=True)
class Rate:
    """What has been done in how much time, so far."""

    amount: float = 0.0
    seconds: float = 0.0

    def count(self, amount: float, seconds: float) -> None:
        """So much more was done."""
        self.amount += amount
        self.seconds += seconds

    def time_for(self, amount: float) -> float | None:
        """Seconds, at this rate; None while it isn't known."""
        return self.seconds * amount / self.amount if self.amount > 0 and self.seconds > 0 else None


class PreemptionPolicy:
    """Chooses by `mode`; `auto` takes what costs less time by the rates that its owner measures.

    While no rate of computing is known, requests are computed again, and while none of copying is, they are swapped:
    which makes both known.
    """

    def __init__(self, mode: Preemption, block_bytes: int):
        """`block_bytes` are of one block in all layers."""
        self._mode = mode
        self._block_bytes = block_bytes
        self.computing = Rate()  # prompt tokens
        self.copying = Rate()  # bytes, one way

    def should_swap(self, num_tokens: int, num_blocks: int, num_free_host_blocks: int) -> bool:
        """For a request with KV of so many tokens, in so many blocks; False where host memory has no room."""
        if self._mode == "recompute" or num_tokens == 0 or num_blocks > num_free_host_blocks:
            return False
        if self._mode == "swap":
            return True
        computing_s = self.computing.time_for(num_tokens)
        copying_s = self.copying.time_for(2.0 * num_blocks * self._block_bytes)  # there and back
        return computing_s is not None and (copying_s is None or copying_s < computing_s)
