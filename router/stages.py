"""What is stamped on a sequence on its way: for metrics, for `usage`, for finding out where time went."""

from dataclasses import dataclass

from router.estimate import Estimate


@dataclass(slots=True)
class Stages:
    """The stamps of one sequence. Moments are the router's clock, durations are the workers' own; all in seconds.

    A resumed sequence keeps the durations of its last attempt.
    """

    arrive: float
    first_token: float | None = None
    finish: float | None = None
    admit: float | None = None
    expected: Estimate | None = None  # of the path that it was admitted on
    follows: bool = False  # admitted together with another choice of the same response
    attempts: int = 0
    prefill_failures: int = 0  # how often the decode worker was told to compute the prompt after all
    num_cached_tokens: int = 0  # prompt tokens found in a prefix cache
    num_output_tokens: int = 0
    num_preemptions: int = 0
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    decode_queue_s: float | None = None

    def begin_attempt(self) -> None:
        """Count an attempt, and forget the workers' numbers of the one before."""
        self.attempts += 1
        self.prefill_queue_s = self.prefill_s = self.transfer_s = self.decode_queue_s = None
        self.num_cached_tokens = 0

    @property
    def resumes(self) -> int:
        """Attempts after the first."""
        return max(0, self.attempts - 1)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.arrive

    @property
    def e2e_s(self) -> float | None:
        """From arrival to the last token."""
        return None if self.finish is None else self.finish - self.arrive

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        return None if self.finish is None or self.first_token is None else self.finish - self.first_token

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.decode_s is None or self.num_output_tokens < 2:
            return None
        return self.decode_s / (self.num_output_tokens - 1)
