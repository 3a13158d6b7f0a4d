"""What the prefill scheduler keeps of a prompt, and what it decides."""

from dataclasses import dataclass

from model.sequence import SequenceState
from model.step import SequenceStep
from protocol.requests import GenerateRequest


@dataclass(eq=False, slots=True)
class PrefillJob:
    """One prompt between its arrival and the release of its blocks. Only the scheduler changes it."""

    sequence: SequenceState
    arrival: int  # 0, 1, 2, ...: the order in which prompts came
    awaits_offer: bool = False  # another worker may offer its beginning: not to be admitted yet
    offered_tokens: int = 0  # how much of its beginning another worker offers; 0: nothing, or no longer wanted
    num_cached_tokens: int = 0  # found in the prefix cache on admission, or pulled
    is_pulling: bool = False  # a transfer may be writing into its blocks
    in_step: bool = False  # the engine may be writing into its blocks
    is_sending: bool = False  # a transfer may be reading its blocks
    has_ended: bool = False  # computed, failed or aborted: nothing more will be scheduled

    @property
    def request(self) -> GenerateRequest:
        return self.sequence.request

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
