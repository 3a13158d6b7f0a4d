"""How many tokens requests have, and how a workload's lengths are brought into a model's context. Pure."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from statistics import NormalDist

from twostroke.loadtests.errors import LoadTestError

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
