"""What the decode scheduler keeps of a request."""

from dataclasses import dataclass

from twostroke.worker.sequence import Phase, WorkerJob


@dataclass(frozen=True, slots=True)
class SwappedKV:
    """KV of a job in host memory."""

    block_ids: tuple[int, ...]  # of host memory: a table as the sequence's was, of the rows with KV
    num_computed: int  # tokens


@dataclass(eq=False, slots=True)
class DecodeJob(WorkerJob):
    """One request between its arrival and the release of its blocks."""

    wants_transfer: bool = False  # its KV comes from a prefill worker
    is_offered: bool = False  # that worker has begun, and holds all the blocks that it needs itself
    is_copying: bool = False  # the engine may be copying between its blocks and those of `swapped`
    swapped: SwappedKV | None = None
    has_place: bool = False  # it was in the batch of the last step

    @property
    def is_ready(self) -> bool:
        """Whether it may be admitted in its turn.

        Not before it is offered: blocks reserved for what may still wait for blocks elsewhere could end in a circle of
        workers that wait for each other.
        """
        return not (self.awaits_offer or self.awaits_grammar) and (self.is_offered or not self.wants_transfer)

    @property
    def has_kv_coming(self) -> bool:
        return self.wants_transfer or self.offered_tokens > 0

    @property
    def num_indivisible(self) -> int:
        return len(self.sequence.token_ids) if self.wants_transfer else 0

    @property
    def is_in_use(self) -> bool:
        return bool(self.under_way) or self.is_receiving or self.is_copying

    @property
    def num_to_compute(self) -> int:
        """Tokens to be computed here before it decodes: what neither comes by a transfer nor is in host memory."""
        if self.phase is Phase.RUNNING:
            num_tokens = self.sequence.num_uncomputed
            return num_tokens if num_tokens > 1 else 0
        if self.wants_transfer:
            return 0
        num_here = self.offered_tokens if self.phase is Phase.TRANSFERRING else self.sequence.num_computed
        num_swapped = 0 if self.swapped is None else self.swapped.num_computed
        return len(self.sequence.token_ids) - max(num_here, num_swapped)
