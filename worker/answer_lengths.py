"""Predicted lengths of answers, from those that have ended, so that short ones can go first. Pure.

A request's answer is expected to be as long as the mean of its SLO class and of prompts about as long as its own
(within a factor of two). Where none of these has ended yet, the mean of its class counts, then that of all answers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

FIRST_GUESS = 100.0  # tokens, before any answer has ended
WEIGHT = 0.05  # of an answer that has ended, in a mean of many

Group = tuple[str | int, ...]


@dataclass(slots=True)
class _Mean:
    """A mean in which the last answers count more than those long ago."""

    tokens: float = 0.0
    num_answers: int = 0

    def add(self, tokens: int) -> None:
        self.num_answers += 1
        self.tokens += max(WEIGHT, 1 / self.num_answers) * (tokens - self.tokens)


@dataclass(slots=True)
class AnswerLengths:
    """Predicts the lengths of answers, and learns from each one that ends."""

    _means: dict[Group, _Mean] = field(default_factory=dict)

    def expected(self, class_name: str, num_prompt_tokens: int) -> float:
        """Tokens of the answer to such a prompt."""
        return next(
            (self._means[group].tokens for group in _groups(class_name, num_prompt_tokens) if group in self._means),
            FIRST_GUESS,
        )

    def ended(self, class_name: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """An answer has ended after so many tokens."""
        for group in _groups(class_name, num_prompt_tokens):
            self._means.setdefault(group, _Mean()).add(num_tokens)


def _groups(class_name: str, num_prompt_tokens: int) -> Iterator[Group]:
    """The groups that a request belongs to, the narrowest first."""
    yield (class_name, num_prompt_tokens.bit_length())
    yield (class_name,)
    yield ()
