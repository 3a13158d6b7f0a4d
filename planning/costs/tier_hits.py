"""Prompt tokens whose KV a prefix cache and KV tiers hold, and what reading them spares. Pure.

**The replay** takes a trace's prompts in their order, each as blocks with names; equal names mean equal prefixes. A
prompt's blocks are found one after the other, each in the first place that holds it: the GPU cache, then the tiers in
their order. The first block that none holds ends the search. The last token is always computed.

- Every place is an LRU by bytes. Of a prompt the beginning counts as used last, so ends leave first.
- The GPU cache takes every prompt. A tier takes a block at its second use in the trace, and renews it at each later
  use, wherever it was found. Names of blocks are remembered for ever.
- All workers' caches count as one, and so do their disks: the router sends a prompt to the worker that holds it.
- Only prompts are replayed: KV of an answer is new where it first comes back in a prompt.

So each place holds what was used last, whatever the sizes of the others. A larger place holds all that a smaller one
does (Mattson et al., Evaluation techniques for storage hierarchies, 1970), and what the first k places hold together
never shrinks where any place grows.

**The costs.** If the share f of each prompt is found, a prompt of n tokens computes (1 - f) n of them after f n others.
A product of a token then costs 1 - f of what it did, and attention 1 - f^2. A read takes a worker's time as computing
does, which is slow where reads go on beside computing.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from twostroke.protocol.stats import StepCosts
from twostroke.worker.profile import WorkerProfile

CACHE = "gpu"
"""Name of the GPU cache among the places that hold KV."""

PromptBlock = tuple[Hashable, int]
"""Name of a block, and its tokens."""


@dataclass(frozen=True)
class TierSize:
    """Capacity of a KV tier, of all workers together."""

    name: str
    num_bytes: float  # infinite: unbounded


class _RecentBlocks:
    """The blocks that were used last, as many as have room."""

    def __init__(self, num_bytes: float) -> None:
        self._left = num_bytes
        self._bytes: OrderedDict[Hashable, float] = OrderedDict()  # by name, the least recent first

    def __contains__(self, name: Hashable) -> bool:
        return name in self._bytes

    def use(self, name: Hashable, num_bytes: float) -> None:
        self._left += self._bytes.pop(name, 0.0) - num_bytes
        self._bytes[name] = num_bytes
        while self._left < 0:
            self._left += self._bytes.popitem(last=False)[1]


MIN_USES = 2
"""Use of a block at which tiers take it, as workers write."""


def found_shares(
    prompts: Iterable[Sequence[PromptBlock]],
    token_bytes: float,
    cache_bytes: float,
    tiers: Sequence[TierSize],
    min_uses: int = MIN_USES,
) -> dict[str, float]:
    """Return the share of all prompt tokens that is found in the GPU cache and in each tier, by name, in their order.

    `token_bytes` are those of a token's KV. A name has the same tokens wherever it stands. Tiers take blocks at their
    use number `min_uses`.
    """
    places = [_RecentBlocks(cache_bytes), *(_RecentBlocks(one.num_bytes) for one in tiers)]
    found = [0] * len(places)
    uses: Counter[Hashable] = Counter()
    num_tokens = 0
    for blocks in prompts:
        length = sum(tokens for _, tokens in blocks)
        num_tokens += length
        left = length - 1
        for name, tokens in blocks:
            number = next((number for number, place in enumerate(places) if name in place), None)
            if number is None:
                break
            found[number] += min(tokens, left)
            left -= tokens
        for name, tokens in reversed(blocks):
            uses[name] += 1
            for place in places if uses[name] >= min_uses else places[:1]:
                place.use(name, tokens * token_bytes)
    names = (CACHE, *(one.name for one in tiers))
    return {name: tokens / max(1, num_tokens) for name, tokens in zip(names, found, strict=True)}


@dataclass(frozen=True)
class PrefixHits:
    """Shares of prompt tokens by the place that holds their KV, and what a worker makes of them."""

    found: Mapping[str, float]
    unread: tuple[str, ...]  # tiers from which a worker computes what it could read, since that is quicker

    @property
    def computed(self) -> float:
        """Share of prompt tokens that is computed."""
        return max(0.0, 1.0 - sum(share for name, share in self.found.items() if name not in self.unread))


def with_hits(
    profile: WorkerProfile, found: Mapping[str, float], bytes_per_s: Mapping[str, float], prompt: float
) -> tuple[WorkerProfile, PrefixHits]:
    """Return the worker whose prompts are found to these shares, and what it reads.

    `bytes_per_s` tells how quickly a worker reads from each tier; what is in the GPU cache costs nothing. A tier is
    read where that is quicker than computing at prompts of `prompt` tokens, the mean. Every prompt is found to the same
    share, and is computed in as many steps as without hits.
    """
    costs = profile.costs
    share, read_token_s, unread = found.get(CACHE, 0.0), 0.0, list[str]()
    for name in sorted(bytes_per_s, key=lambda name: -bytes_per_s[name]):
        more = found.get(name, 0.0)
        read_s = profile.kv_bytes / bytes_per_s[name]
        spared_s = costs.token_s + costs.pair_s * prompt * (share + more / 2)
        if more and read_s >= spared_s:
            unread.append(name)
            continue
        share += more
        read_token_s += more * read_s
    changed = replace(
        profile,
        costs=_found_to(costs, share, read_token_s),
        beside=None if profile.beside is None else _found_to(profile.beside, share, read_token_s),
    )
    return changed, PrefixHits(dict(found), tuple(unread))


def _found_to(costs: StepCosts, share: float, read_token_s: float) -> StepCosts:
    computed = max(0.0, 1.0 - share)
    return replace(
        costs,
        token_s=costs.token_s * computed + read_token_s,
        pair_s=costs.pair_s * computed * (1.0 + share),
    )
