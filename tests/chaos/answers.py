"""The verdict on answers under faults: each must be the very answer that the request gets without faults.

Of faults it is told when they struck, when all was whole again, and by what they are known to have fired. Answers and
faults go in, findings and figures come out; nothing here does I/O.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.chaos.load import ClientAnswer, ClientChoice

LOGPROB_TOLERANCE = 5e-4  # fp32 sums differ in the last bits with the shape of a batch

Flaw = Literal["lost", "mismatched", "duplicates", "invalid"]


@dataclass(frozen=True)
class Finding:
    """Something that must not be. `at` is when the answer ended, of `time.monotonic`."""

    flaw: Flaw
    key: int
    at: float
    text: str


def check(answer: ClientAnswer, expected: ClientAnswer) -> list[Finding]:
    """Compare an answer with that to the same request without faults. A client that left saw a beginning of it."""
    if not answer.is_accepted:
        return []
    key = answer.request.key
    if not answer.left and not (answer.has_end and answer.error is None):
        return [Finding("lost", key, answer.ended_at, answer.error or "the stream has no end")]
    findings = []
    for index, (choice, wanted) in enumerate(zip(answer.choices, expected.choices, strict=True)):
        findings += [
            Finding(flaw, key, answer.ended_at, f"choice {index}: {text}")
            for flaw, text in _check_choice(choice, wanted, is_whole=not answer.left)
        ]
    if not answer.left:
        counted = (answer.usage or {}).get("completion_tokens")
        received = sum(len(choice.tokens) for choice in answer.choices)
        if counted != (expected.usage or {}).get("completion_tokens") or counted != received:
            findings.append(
                Finding("mismatched", key, answer.ended_at, f"usage tells {counted} tokens, {received} came")
            )
    return findings


def _check_choice(choice: ClientChoice, wanted: ClientChoice, *, is_whole: bool) -> list[tuple[Flaw, str]]:
    if has_repeats(choice.tokens, wanted.tokens) or choice.offsets != sorted(choice.offsets):
        return [("duplicates", "tokens came again")]
    if choice.tokens != (wanted.tokens if is_whole else wanted.tokens[: len(choice.tokens)]):
        return [("mismatched", f"tokens differ from {first_difference(choice.tokens, wanted.tokens)} on")]
    found: list[tuple[Flaw, str]] = []
    if not (choice.text == wanted.text if is_whole else wanted.text.startswith(choice.text)):
        found.append(("mismatched", "the text differs, its tokens don't"))
    if is_whole and choice.finish_reasons != wanted.finish_reasons:
        found.append(("mismatched", f"finished by {choice.finish_reasons}, not by {wanted.finish_reasons}"))
    pairs = zip(choice.logprobs, wanted.logprobs, strict=False)
    if (is_whole and len(choice.logprobs) != len(wanted.logprobs)) or any(
        abs(one - other) > LOGPROB_TOLERANCE for one, other in pairs
    ):
        found.append(("mismatched", "logprobs differ"))
    return found


def first_difference(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the first place at which two sequences differ; the shorter one's length where there is none."""
    pairs = enumerate(zip(tokens, wanted, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(tokens), len(wanted)))


def has_repeats(tokens: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether `tokens` are `wanted` but for some in a row that came a second time."""
    at = first_difference(tokens, wanted)
    extra = len(tokens) - len(wanted)
    if not 0 < extra <= at:
        return False
    came_again, before = tokens[at : at + extra], tokens[at - extra : at]
    return list(came_again) == list(before) and list(tokens[at + extra :]) == list(wanted[at:])


Family = Literal["kill", "hang", "stop", "partition", "network", "load"]


@dataclass(frozen=True)
class Injected:
    """A fault that has fired, and how that is known: felt from when it struck to when all was whole again."""

    name: str
    family: Family
    begin: float  # of `time.monotonic`
    end: float
    proof: str
    back_s: float | None = None  # from the kill to the new replica's being reached
    figures: Mapping[str, float | str] = field(
        default_factory=dict, compare=False
    )  # what else there is to tell, by name


@dataclass(frozen=True)
class ChoiceWait:
    """One wait of one choice."""

    begin: float
    end: float
    is_first: bool  # for the first token

    @property
    def length_s(self) -> float:
        return self.end - self.begin


def waits(answer: ClientAnswer) -> Iterable[ChoiceWait]:
    """All waits of an answer, the one that its end cut off included."""
    for choice in answer.choices:
        times = [answer.sent_at, *(at for at, _ in choice.pieces)]
        for index, (begin, end) in enumerate(itertools.pairwise(times)):
            yield ChoiceWait(begin, end, index == 0)


@dataclass(frozen=True)
class Survival:
    """The fate of a load during which one fault struck."""

    requests: int
    lost: int  # without a whole answer
    mismatched: int  # whole, and not what the same prompt was answered before
    longest_pause_s: float  # in the stream of any request that was not lost
    lost_new: int  # of the lost, those that were sent after the fault struck
    answered_again_s: float | None  # from the fault to the first token of a request that was sent after it
    slowest_first_token_s: float  # of those that were sent after it, and not lost


def survival(answers: Sequence[ClientAnswer], expected: Mapping[int, ClientAnswer], struck_at: float) -> Survival:
    """Sum up a load; `struck_at` is of `time.monotonic`."""
    is_lost = [not answer.is_accepted or answer.error is not None or not answer.has_end for answer in answers]
    whole = [answer for answer, lost in zip(answers, is_lost, strict=True) if not lost]
    waited = [(answer, wait) for answer in whole for wait in waits(answer)]
    firsts = [wait for answer, wait in waited if wait.is_first and answer.sent_at >= struck_at]
    return Survival(
        requests=len(answers),
        lost=sum(is_lost),
        mismatched=sum(bool(check(answer, expected[answer.request.key])) for answer in whole),
        longest_pause_s=max((wait.length_s for _, wait in waited if not wait.is_first), default=0.0),
        lost_new=sum(lost and answer.sent_at >= struck_at for answer, lost in zip(answers, is_lost, strict=True)),
        answered_again_s=min((wait.end - struck_at for wait in firsts), default=None),
        slowest_first_token_s=max((wait.length_s for wait in firsts), default=0.0),
    )
