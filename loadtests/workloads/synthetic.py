"""Requests whose lengths, bursts and shared prefixes are those of public traces, by the traces' parameters alone.

Sources of the figures: Azure LLM inference traces 2023 (Patel et al., Splitwise, ISCA 2024; CC-BY 4.0), Mooncake
conversation and synthetic traces (Qin et al., FAST 2025; Apache-2.0), ServeGen's m-large (Xiang et al.,
arXiv:2505.09999; Apache-2.0). Lengths are the traces' 1st to 99th percentiles and their longest; the parameters of
arrivals were fitted to the traces' variances of counts in windows of 1, 10 and 60 s (Mooncake's conversations with the
3 s ticks of their clock evened out).

How many tokens requests have, and how a workload's lengths are brought into a model's context. Pure.
"""

import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from statistics import NormalDist

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.plan import Piece, SessionTurn
from twostroke.loadtests.workloads.arrivals import changed_times, derive_seed, gamma_times
from twostroke.loadtests.workloads.prompts import block_pieces

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Quantiles:
    """A distribution by some of its quantiles. Between them logarithms grow evenly, which suits lengths: most lie near
    the shorter end of a wide stretch."""

    points: tuple[
        tuple[float, float], ...
    ]  # (share that is not longer, tokens above 0), both rising; shares from 0 to 1

    def at(self, share: float) -> float:
        """The length that `share` of all do not exceed."""
        index = bisect_left(self.points, share, key=lambda point: point[0])
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (below, low), (above, high) = self.points[index - 1], self.points[index]
        return low * math.pow(high / low, (share - below) / (above - below))


@dataclass(frozen=True)
class LogNormal:
    """Half of all are below `median`; `sigma` is the standard deviation of the logarithm."""

    median: float
    sigma: float

    def at(self, share: float) -> float:
        """The length that `share` of all do not exceed."""
        return self.median * math.exp(self.sigma * _NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12)))


@dataclass(frozen=True)
class Scale:
    """A workload's lengths in a smaller context: all by one factor, so that their proportions stay.

    The few requests that are longer still are shrunk on their own until prompt and answer just fit. Nothing is left out
    and nothing is cut off unseen.
    """

    factor: float  # at most 1
    max_context: int  # prompt and answer together

    def tokens(self, tokens: float) -> int:
        """One length, by the common factor; at least 1."""
        return max(1, round(tokens * self.factor))

    def request(self, input_tokens: float, output_tokens: float) -> tuple[int, int]:
        """A request's prompt and answer, which fit into the context together."""
        return shrunk(self.tokens(input_tokens), self.tokens(output_tokens), self.max_context)


def shrunk(prompt: int, answer: int, most: int) -> tuple[int, int]:
    """Both by one factor until they have `most` tokens together; as they are where they fit. At least 1 each."""
    if prompt + answer <= most:
        return prompt, answer
    answer = max(1, answer * most // (prompt + answer))
    return most - answer, answer


def scale_to(max_context: int, long_request: float) -> Scale:
    """The scale at which a request of `long_request` tokens (prompt and answer; say a workload's 99.9th percentile)
    fits. Raises LoadTestError for a context without room for a prompt and an answer."""
    if max_context < 2:
        raise LoadTestError(f"max_context is {max_context}: give the model's context in tokens")
    return Scale(min(1.0, max_context / long_request), max_context)


def normal_pair(first: float, second: float, spearman: float) -> tuple[float, float]:
    """Two independent shares (of [0, 1)) turned into shares with the rank correlation `spearman`, both still uniform.

    A Gaussian copula: its rank correlation is 6/pi asin(r/2) of the normal numbers' correlation r (Kruskal, JASA 1958).
    """
    correlation = 2.0 * math.sin(math.pi / 6.0 * spearman)
    one, other = (_NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12)) for share in (first, second))
    return first, _NORMAL.cdf(correlation * one + math.sqrt(1.0 - correlation**2) * other)


_SHARES = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 0.9999)
BLOCK_TOKENS = 512  # of Mooncake's hashes
RATE_HOLDS_S = 60.0  # so long a slowly changing rate stays as it is
RECENT = 500  # requests back that one may continue; half of Mooncake's continue one of the last 260 to 420


def _percentiles(*tokens: float) -> Quantiles:
    """The least (the 1st percentile stands in for it), p1, p5, p10, p25, p50, p75, p90, p95, p99, and the longest."""
    return Quantiles(tuple(zip(_SHARES, (tokens[0], *tokens), strict=True)))


@dataclass(frozen=True)
class Drift:
    """The rate is drawn anew each minute, of a gamma distribution with this coefficient of variation."""

    cv: float


@dataclass(frozen=True)
class OnOff:
    """Bursts and silence, both of exponential length; an interrupted Poisson process where arrivals within are Poisson.

    In the long run it varies as a Poisson process times 1 + 2 x rate within bursts x share of silence x tau, with
    1 / tau = 1 / on_s + 1 / off_s.
    """

    on_s: float
    off_s: float


@dataclass(frozen=True)
class Prefixes:
    """Prompts that begin as others did."""

    common_blocks: int  # all prompts begin with these
    continued_share: float  # of requests that go on from an earlier one
    candidates: int  # earlier requests that one is chosen from: the one with the longest prefix that fits


@dataclass(frozen=True)
class Shape:
    """One trace's parameters."""

    input_tokens: Quantiles
    output_tokens: Quantiles
    spearman: float  # rank correlation of prompt and answer
    rate: float  # requests a second
    cv: float = 1.0  # of the gaps between arrivals while the rate stays
    changes: Drift | OnOff | None = None  # of the rate
    prefixes: Prefixes | None = None  # None: prompts share nothing


SHAPES = {
    "azure-conv": Shape(
        _percentiles(29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),
        _percentiles(16, 41, 54, 85, 129, 395, 424, 451, 601, 1000),
        spearman=0.07,
        rate=5.53,
        cv=1.05,
        changes=Drift(0.21),
    ),
    "azure-code": Shape(
        _percentiles(17, 75, 147, 578, 1469, 2744, 5187, 7303, 7436, 7437),
        _percentiles(6, 6, 7, 9, 13, 24, 55, 90, 251, 1899),
        spearman=-0.02,
        rate=2.567,
        changes=OnOff(on_s=8.5, off_s=40.0),
    ),
    "mooncake-conversation": Shape(
        _percentiles(894, 901, 964, 2306, 6909, 15367, 27367, 39550, 85400, 126195),
        _percentiles(3, 10, 24, 156, 350, 472, 597, 698, 1118, 2000),
        spearman=0.07,
        rate=3.401,
        changes=Drift(0.095),
        prefixes=Prefixes(common_blocks=1, continued_share=0.42, candidates=8),
    ),
    "mooncake-synthetic": Shape(
        _percentiles(16, 22, 30, 277, 11587, 23175, 38611, 48904, 66456, 191378),
        _percentiles(2, 2, 4, 11, 69, 250, 389, 519, 768, 893),
        spearman=-0.52,
        rate=3.907,
        cv=1.01,
        prefixes=Prefixes(common_blocks=0, continued_share=0.68, candidates=40),
    ),
    # 196 requests a second on average. The source has no joint lengths: prompt and answer are taken as independent.
    "servegen": Shape(
        _percentiles(58, 64, 72, 267, 620, 1086, 2299, 2522, 5345, 35079),
        _percentiles(1, 1, 1, 8, 52, 208, 462, 544, 888, 10428),
        spearman=0.0,
        rate=195.8,
        cv=2.0,
    ),
}


def shape_named(name: str) -> Shape:
    """Raises LoadTestError with the names there are."""
    try:
        return SHAPES[name]
    except KeyError:
        raise LoadTestError(f"no shape {name!r} of synthetic requests; there are {', '.join(SHAPES)}") from None


def shape_times(shape: Shape, seed: int) -> Iterator[float]:
    """Endless moments of arrival, at the shape's own rate and as bursty as its trace."""
    draw = random.Random(f"shape arrivals {seed}")
    numbers = gamma_times(1.0, shape.cv, draw)
    return changed_times(_rates(shape, draw), numbers)


def _rates(shape: Shape, draw: random.Random) -> Iterator[tuple[float, float]]:
    """Endless: for so long, so many a second."""
    match shape.changes:
        case None:
            yield inf, shape.rate
        case Drift(cv=cv):
            while True:
                yield RATE_HOLDS_S, draw.gammavariate(cv**-2, shape.rate * cv**2)
        case OnOff(on_s=on_s, off_s=off_s):
            burst_rate = shape.rate * (on_s + off_s) / on_s
            # What a run begins with is as likely as it is long; exponential times know nothing of how long they last.
            bursting = draw.random() < on_s / (on_s + off_s)
            while True:
                yield draw.expovariate(1 / (on_s if bursting else off_s)), burst_rate if bursting else 0.0
                bursting = not bursting


def shape_turns(shape: Shape, max_context: int, seed: int) -> Iterator[SessionTurn]:
    """Endless requests, lengths brought into the context."""
    draw = random.Random(f"shape lengths {seed}")
    scale = scale_to(max_context, shape.input_tokens.at(0.999) + shape.output_tokens.at(0.5))
    history = _History(shape.prefixes, scale, seed) if shape.prefixes else None
    index = 0
    while True:
        of_input, of_output = normal_pair(draw.random(), draw.random(), shape.spearman)
        prompt, answer = scale.request(shape.input_tokens.at(of_input), shape.output_tokens.at(of_output))
        if history is None:
            pieces: tuple[Piece, ...] = (Piece(derive_seed(seed, "prompt", index), prompt),)
        else:
            pieces = history.prompt(prompt, index, draw)
        yield SessionTurn(pieces, answer)
        index += 1


class _History:
    """Earlier prompts, for later ones to go on from."""

    def __init__(self, prefixes: Prefixes, scale: Scale, seed: int) -> None:
        self._prefixes = prefixes
        self._block_tokens = scale.tokens(BLOCK_TOKENS)
        self._seed = seed
        self._common = [derive_seed(seed, "common block", index) for index in range(prefixes.common_blocks)]
        self._recent: deque[list[int]] = deque(maxlen=RECENT)  # the seeds of each prompt's whole blocks

    def prompt(self, tokens: int, index: int, draw: random.Random) -> tuple[Piece, ...]:
        """A prompt of so many tokens, which begins as an earlier one or not."""
        num_blocks = tokens // self._block_tokens
        before = self._common
        if self._recent and draw.random() < self._prefixes.continued_share:
            candidates = [draw.choice(self._recent) for _ in range(self._prefixes.candidates)]
            before = max(candidates, key=lambda blocks: (min(len(blocks), num_blocks), -len(blocks)))
        blocks = before[:num_blocks]
        blocks += [derive_seed(self._seed, "block", index, number) for number in range(len(blocks), num_blocks)]
        self._recent.append(blocks)
        return block_pieces(blocks, self._block_tokens, tokens, derive_seed(self._seed, "rest", index))
