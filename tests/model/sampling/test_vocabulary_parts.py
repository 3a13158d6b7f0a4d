"""Draws over ranks' parts of the vocabulary: what one rank would draw, for few bytes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from twostroke.model.parallel.form import Shard
from twostroke.model.parallel.tensor_parallel import GroupRanks, Rendezvous, SingleRank
from twostroke.model.sampling.sampler import Sampler, gather_logits, largest_of_ranks
from twostroke.model.step import Draw
from twostroke.protocol.requests import SamplingParams

CPU = torch.device("cpu")
VOCAB = 37  # which four ranks don't share evenly
NAN, INF = torch.nan, torch.inf


class CountingRanks(GroupRanks):
    """Counts what it hands to rank 0."""

    sent_bytes = 0

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.sent_bytes += x.nbytes
        return super().gather(x)


def rows() -> torch.Tensor:
    """Ordinary ones; equal ones across ranks and inside of one; broken ones."""
    logits = torch.randn((12, VOCAB), generator=torch.Generator().manual_seed(5))
    logits[1, [3, 4, 30]] = 9.0
    logits[2, [36, 12]] = 9.0
    logits[3, :] = 0.0
    logits[4, [20, 5]] = torch.tensor([0.0, -0.0])
    logits[4].clamp_(max=0.0)
    logits[5, 17] = NAN
    logits[6, [8, 33]] = INF
    logits[7, :] = -INF
    logits[8, :] = NAN
    logits[9, :36] = -INF
    logits[10, 0], logits[10, 1:] = -INF, NAN
    return logits


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_largest_of_all_ranks_is_what_a_sampler_of_whole_rows_draws(size: int) -> None:
    logits = rows()
    expected = Sampler(VOCAB)
    draw = Draw(SamplingParams(temperature=0.0), (), 0)
    tokens = [token.token_id for token in expected.sample(logits.clone(), [draw] * len(logits), [0] * len(logits))]
    rendezvous = Rendezvous("127.0.0.1")
    with ThreadPoolExecutor(size) as threads:
        shards = [Shard(rank, size) for rank in range(size)]
        groups = list(threads.map(lambda shard: CountingRanks(shard, rendezvous.address, CPU), shards))

        def found(group: GroupRanks) -> tuple[torch.Tensor | None, torch.Tensor]:
            part = logits[:, group.shard.vocabulary(VOCAB)]
            return largest_of_ranks(part, VOCAB, group), gather_logits(part, VOCAB, group)

        (drawn, whole), *others = threads.map(found, groups)
    assert drawn is not None
    assert all(other is None for other, _ in others)
    assert torch.equal(whole.nan_to_num(nan=1e9), logits.nan_to_num(nan=1e9))
    sampler = Sampler(VOCAB)
    assert [token.token_id for token in sampler.take(drawn, [draw] * len(logits))] == tokens
    assert sampler.num_broken_rows == expected.num_broken_rows > 0
    width = -(-VOCAB // size)
    assert all(group.sent_bytes == len(logits) * (24 + 4 * width * (size > 1)) for group in groups)


def test_one_rank_gathers_nothing() -> None:
    logits = rows()
    assert gather_logits(logits, VOCAB, SingleRank()) is logits


@pytest.mark.parametrize(
    ("sampling", "is_largest"),
    [
        ({}, True),
        ({"top_p": 0.3, "top_k": 5}, True),
        ({"temperature": 0.7, "top_k": 1}, True),
        ({"temperature": 0.7}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": ((3, 1.0),)}, False),
        ({"presence_penalty": 0.1}, False),
        ({"allowed_token_ids": (3,)}, False),
    ],
)
def test_greedy_draws_of_untouched_logits_need_the_largest_alone(sampling: dict[str, object], is_largest: bool) -> None:
    assert Draw(SamplingParams(**{"temperature": 0.0, **sampling}), (), 0).takes_largest == is_largest  # type: ignore[arg-type]
    assert not Draw(SamplingParams(temperature=0.0), (), 0, forbidden=(1,)).takes_largest
