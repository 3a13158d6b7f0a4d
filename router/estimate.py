"""What the router expects of a path before it takes it: for choosing, for admission, and to compare with what came."""

import msgspec


class Estimate(msgspec.Struct, frozen=True):
    """A request's times on a path, in seconds, by the cost models that its workers have fitted."""

    queue_s: float  # until its prompt is begun: work that goes first
    pull_s: float  # fetching the prompt's beginning from another worker
    prefill_s: float  # computing what is cached nowhere
    transfer_s: float  # of KV, as far as prefill doesn't hide it
    decode_slot_s: float  # until the decode worker's next step has room for it
    step_s: float  # of the decode worker with the request in it: its time between tokens

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.queue_s + self.pull_s + self.prefill_s
