"""How long an answer will be, guessed before it is written, so that short ones can go first.

A guess is made when a request comes, and each predictor learns from answers as they end.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

FIRST_GUESS = 100.0  # tokens, before any answer has ended
WEIGHT = 0.05  # of an answer that has ended, in the mean


@dataclass(slots=True, eq=False)
class Job:
    """A request at a simulated worker, and how far it has come. Times in seconds, lengths in tokens."""

    at_s: float
    prompt: int
    output: int
    class_name: str = ""
    ready_s: float = 0.0  # when this worker may begin with it
    deadline_s: float = 0.0  # of its first token
    turn: float = 0.0  # the smallest goes first
    computed: int = 0  # of the prompt, and after a preemption of what was written
    written: int = 0
    place: tuple[int, int] = (0, 0)  # of contiguous memory: where, and how much
    first_s: float = 0.0
    last_s: float = 0.0


class Predictor(Protocol):
    """Guesses the tokens of answers."""

    def expected(self, job: Job) -> float: ...

    def ended(self, job: Job) -> None:
        """Learn from an answer."""


class ByHistory:
    """The running mean of the answers of the request's group: its class, or its prompt's length."""

    def __init__(self, group: Callable[[Job], int | str]) -> None:
        self._group = group
        self._means: dict[int | str, float] = defaultdict(lambda: FIRST_GUESS)

    def expected(self, job: Job) -> float:
        return self._means[self._group(job)]

    def ended(self, job: Job) -> None:
        group = self._group(job)
        self._means[group] += WEIGHT * (job.output - self._means[group])


class Oracle:
    """Knows, as only a simulation can: what the best predictor would gain."""

    def expected(self, job: Job) -> float:
        return float(job.output)

    def ended(self, job: Job) -> None:
        pass


AGEING_TOKENS_PER_S = 16.0
"""So many tokens fewer count for each second by which a request came earlier: long answers come, too."""


def by_class() -> Predictor:
    """Requests of one class have answers alike. Where there is but one class, little more than arrival counts."""
    return ByHistory(lambda job: job.class_name)


def by_prompt_length() -> Predictor:
    """Prompts within a factor of two have answers alike."""
    return ByHistory(lambda job: job.prompt.bit_length())


ORDERS: dict[str, Callable[[], Predictor] | None] = {
    "fcfs": None,
    "edf": None,
    "sjf by class": by_class,
    "sjf by prompt": by_prompt_length,
    "sjf oracle": Oracle,
}


class Order:
    """Whose turn it is among those that wait."""

    def __init__(self, name: str) -> None:
        self._name = name
        make = ORDERS[name]
        self._predictor = None if make is None else make()

    def take_turn(self, job: Job) -> None:
        """It has come: its turn is settled."""
        if self._predictor is not None:
            job.turn = self._predictor.expected(job) + job.at_s * AGEING_TOKENS_PER_S
        else:
            job.turn = job.deadline_s if self._name == "edf" else job.at_s

    def ended(self, job: Job) -> None:
        """Its answer is written."""
        if self._predictor is not None:
            self._predictor.ended(job)
