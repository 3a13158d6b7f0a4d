"""What is to be sent, and when. The types that arrivals, workloads, the dispatcher and the stub server share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt. Equal pieces are equal tokens, so prompts that begin with equal pieces share a prefix."""

    seed: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    prompt: tuple[Piece, ...]  # what is new in this turn; what was said before goes before it
    output_tokens: int
    think_s: float = 0.0  # from the end of the answer before; of a first turn 0
    kind: str = ""  # what reports tell apart: `long`, `short`


@dataclass(frozen=True, slots=True)
class Session:
    """One turn mostly; several are sent one after another, over the chat API, with the answers in between."""

    index: int  # from 0, in the order of arrivals
    at_s: float  # after the run's beginning; of closed loops 0, since users take the next when they are free
    turns: tuple[Turn, ...]
