"""From answers to figures. Pure."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from twostroke.loadtests.peers.answers import Answer
from twostroke.loadtests.report.estimates import percentile


@dataclass(frozen=True)
class Turn:
    """One row of the workload, sent once to one server."""

    out_tok_s: float | None  # output tokens a second, from the first request sent to the last token come
    prompt_tok_s: float | None  # prompt tokens a second of one request alone, up to its first token (median)
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None  # between events with tokens, as they came
    itl_p99_s: float | None
    tokens_per_event: float | None  # above 1 where a server puts several tokens into one event: its gaps are fewer
    errors: int
    wrong_length: int  # answers of another length than was asked for: they count with the tokens that they had


FIGURES = tuple(field.name for field in fields(Turn))
HIGHER_IS_BETTER = ("out_tok_s", "prompt_tok_s")
LOWER_IS_BETTER = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")


def summarise(answers: Sequence[Answer], asked_tokens: Sequence[int], errors: int) -> Turn:
    """The figures of one turn; `asked_tokens` has what each of `answers` should have. Rates are None without answers.

    Output tokens are those of the servers' `usage`, never a count of events.
    """
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    ttfts = [answer.ttft_s for answer in answers]
    tokens = sum(answer.completion_tokens for answer in answers)
    events = sum(len(answer.token_times) for answer in answers)
    out_tok_s = None
    if answers:
        out_tok_s = tokens / (max(each.ended_at for each in answers) - min(each.sent_at for each in answers))
    return Turn(
        out_tok_s=out_tok_s,
        prompt_tok_s=statistics.median(each.prompt_tokens / each.ttft_s for each in answers) if answers else None,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        itl_p50_s=percentile(gaps, 50),
        itl_p99_s=percentile(gaps, 99),
        tokens_per_event=tokens / events if events else None,
        errors=errors,
        wrong_length=sum(
            answer.completion_tokens != asked for answer, asked in zip(answers, asked_tokens, strict=True)
        ),
    )


def medians(turns: Sequence[Turn]) -> dict[str, float | None]:
    """Each figure's median over turns of one row with one server; errors and wrong lengths are summed."""
    result: dict[str, float | None] = {}
    for name in FIGURES:
        values = [value for turn in turns if (value := getattr(turn, name)) is not None]
        if name in ("errors", "wrong_length"):
            result[name] = sum(values)
        else:
            result[name] = statistics.median(values) if values else None
    return result


@dataclass(frozen=True)
class Ratio:
    """How much better the subject is than a peer: above 1 is better, for rates and for times."""

    median: float  # of the rounds' ratios
    low: float
    high: float
    rounds: int


def ratio(figure: str, subject: Sequence[Turn], peer: Sequence[Turn]) -> Ratio | None:
    """Each round's turns are compared with each other, since the machine changes between rounds; then the median.

    Takes turns of the same rounds in the same order. None where no round has both.
    """
    ratios = []
    for ours, theirs in zip(subject, peer, strict=True):
        mine, other = getattr(ours, figure), getattr(theirs, figure)
        if mine and other:
            ratios.append(mine / other if figure in HIGHER_IS_BETTER else other / mine)
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


def worst(ratios: Iterable[Ratio | None]) -> float | None:
    """The subject against the best of its peers: the smallest of the medians."""
    return min((each.median for each in ratios if each is not None), default=None)


def flat(turns: Mapping[str, Sequence[Turn]]) -> list[Turn]:
    """All servers' turns."""
    return list(itertools.chain.from_iterable(turns.values()))
