"""What must hold of every accepted answer: the very answer that the request gets without faults.

A log of answers goes in, findings come out; nothing here does I/O.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.chaos.client import Answer, Choice

LOGPROB_TOLERANCE = 5e-4  # fp32 sums differ in the last bits with the shape of a batch

Verdict = Literal["lost", "mismatched", "duplicates"]


@dataclass(frozen=True)
class Finding:
    """Something that must not be. `at` is when the answer ended, of `time.monotonic`."""

    verdict: Verdict
    key: int
    at: float
    text: str


def check(answer: Answer, expected: Answer) -> list[Finding]:
    """`expected` is the answer to the same request without faults, whole. A client that left saw a beginning of it."""
    if not answer.is_accepted:
        return []
    key = answer.request.key
    if not answer.left:
        whole = answer.has_end and answer.error is None
        if not whole:
            return [Finding("lost", key, answer.ended_at, answer.error or "the stream has no end")]
    findings = []
    for index, (choice, wanted) in enumerate(zip(answer.choices, expected.choices, strict=True)):
        findings += [
            Finding(verdict, key, answer.ended_at, f"choice {index}: {text}")
            for verdict, text in _check_choice(choice, wanted, is_whole=not answer.left)
        ]
    if not answer.left:
        told = (answer.usage or {}).get("completion_tokens")
        received = sum(len(choice.tokens) for choice in answer.choices)
        if told != (expected.usage or {}).get("completion_tokens") or told != received:
            findings.append(Finding("mismatched", key, answer.ended_at, f"usage tells {told} tokens, {received} came"))
    return findings


def _check_choice(choice: Choice, wanted: Choice, *, is_whole: bool) -> list[tuple[Verdict, str]]:
    if has_repeats(choice.tokens, wanted.tokens) or _goes_back(choice.offsets):
        return [("duplicates", "tokens came again")]
    if choice.tokens != (wanted.tokens if is_whole else wanted.tokens[: len(choice.tokens)]):
        return [("mismatched", f"tokens differ from {first_difference(choice.tokens, wanted.tokens)} on")]
    found: list[tuple[Verdict, str]] = []
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
    """Where two sequences begin to differ; the shorter one's length where it never happens."""
    pairs = enumerate(zip(tokens, wanted, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(tokens), len(wanted)))


def has_repeats(tokens: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether `tokens` are `wanted` but for some in a row that came a second time."""
    at = first_difference(tokens, wanted)
    extra = len(tokens) - len(wanted)
    if not 0 < extra <= at:
        return False
    came_again, before = tokens[at : at + extra], tokens[at - extra : at]
    return list(came_again) == list(before) and list(tokens[at + extra :]) == list(wanted[at:])


def _goes_back(offsets: Sequence[int]) -> bool:
    return any(after < before for before, after in itertools.pairwise(offsets))
