"""What the prefill scheduler keeps of a prompt, and what it decides."""

from dataclasses import dataclass

from twostroke.model.queue_order import Turn
from twostroke.model.sequence import SequenceState
from twostroke.model.step import SequenceStep
from twostroke.protocol.requests import GenerateRequest


@dataclass(eq=False, slots=True)
class PrefillJob:
    """One prompt between its arrival and the release of its blocks. Only the scheduler changes it."""

    sequence: SequenceState
    arrival: int  # 0, 1, 2, ...: the order in which prompts came
    arrived_at: float  # in seconds of the worker's clock
    num_uncached: int  # tokens that were not in the prefix cache when it came
    turn: Turn = ()
    awaits_offer: bool = False  # another worker may offer its beginning: not to be admitted yet
    offered_tokens: int = 0  # how much of its beginning another worker offers; 0: nothing, or no longer wanted
    num_cached_tokens: int = 0  # found in the prefix cache on admission, or pulled
    is_pulling: bool = False  # a transfer may be writing into its blocks
    in_step: bool = False  # the engine may be writing into its blocks
    is_sending: bool = False  # a transfer may be reading its blocks
    has_been_sent: bool = False  # a transfer has begun to read them: they must stay, whatever became of it
    keeps_blocks: bool = False  # its class's share has brought it on: no higher class takes its blocks back
    has_ended: bool = False  # computed, failed or aborted: nothing more will be scheduled

    @property
    def request(self) -> GenerateRequest:
        return self.sequence.request

    @property
    def has_begun(self) -> bool:
        """Whether it has output tokens already: a resumed request."""
        return self.request.num_output_tokens_given > 0

    @property
    def is_admitted(self) -> bool:
        """Whether it holds its blocks."""
        return bool(self.sequence.block_ids)

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV is not here yet."""
        return self.sequence.num_uncomputed

    @property
    def num_indivisible(self) -> int:
        """0: any chunk will do."""
        return 0

    @property
    def num_tokens(self) -> int:
        """Length of the prompt; for a resumed request, with the outputs that came with it."""
        return len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A job's part of a step."""

    job: PrefillJob
    step: SequenceStep
    num_tokens_after: int  # the prompt's tokens whose KV exists once the step is done

    @property
    def ends_prompt(self) -> bool:
        return self.step.draw is not None


@dataclass(frozen=True, slots=True)
class Admission:
    """Whose waiting is over. Nothing is to be computed for an admitted job that `is_pulling` until that has ended."""

    admitted: tuple[PrefillJob, ...]  # they hold blocks since this very decision
    declined: tuple[PrefillJob, ...]  # the offers to them are not wanted any more


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """What to run next."""

    chunks: tuple[Chunk, ...]
    admission: Admission
