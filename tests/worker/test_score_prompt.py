"""Scoring and embedding of prompts by a worker of either role."""

import asyncio

import numpy as np
import pytest

from tests.simulation.fake_model import hidden_state, position_kv, scored
from tests.worker.worker_rig import Rig, a_request, begin, of_both_roles
from twostroke.protocol.errors import RequestError, WorkerLost
from twostroke.protocol.requests import PrefillReply, ScoringParams
from twostroke.worker.step_costs import COLD_STEPS, FIRST_SAMPLES

SCORES = ScoringParams(logprobs=2)
MEAN = ScoringParams(pooling="mean")


def assert_scored(reply: PrefillReply, num_tokens: int) -> None:
    """Compare with a step over the whole prompt, whose tokens are 0, 1, 2, ..."""
    kv = [b""]
    for token_id in range(num_tokens):
        kv.append(position_kv(kv[-1], token_id, 0))
    if reply.scores is not None:
        rows = [scored(kv[token_id], token_id, 2) for token_id in range(1, num_tokens)]
        ids, logprobs, ranks = zip(*rows, strict=True)
        assert np.frombuffer(reply.scores.token_ids, "<i4").reshape(-1, 2).tolist() == [list(row) for row in ids]
        assert np.frombuffer(reply.scores.logprobs, "<f4").reshape(-1, 3).tolist() == [list(row) for row in logprobs]
        assert np.frombuffer(reply.scores.ranks, "<i4").tolist() == list(ranks)
    else:
        whole = np.sum([hidden_state(one) for one in kv[1:]], axis=0)
        np.testing.assert_allclose(np.frombuffer(reply.embedding, "<f4"), whole / np.linalg.norm(whole), rtol=1e-4)


@of_both_roles(max_step_tokens=8)
@pytest.mark.parametrize("params", [SCORES, MEAN], ids=["scores", "mean"])
async def test_a_prompt_is_scored_in_chunks_whatever_is_cached(rig: Rig, params: ScoringParams) -> None:
    request = a_request(30, "first")
    await rig.ask(request)
    for name in ("r1", "r2"):
        reply = await rig.worker.score_prompt(a_request(30, name, reading=params, max_tokens=0))
        assert_scored(reply, 30)
        assert reply.num_cached_tokens == 0
        assert (reply.event.tokens, reply.event.finish_reason) == ((), "length")
    assert await rig.is_right(request, await rig.ask(a_request(30, "again"))) or rig.info.role == "decode"
    assert not any(name.startswith("r") for name in rig.events())


@of_both_roles(max_step_tokens=64)
async def test_a_worker_that_does_nothing_but_score_learns_what_that_takes(rig: Rig) -> None:
    for number in range(COLD_STEPS + FIRST_SAMPLES):
        await rig.worker.score_prompt(a_request(20 + number, f"r{number}", reading=SCORES, max_tokens=0))
    costs = rig.worker.stats().costs
    assert costs is not None
    await rig.ask(a_request(20, "one that is not scored", max_tokens=1))
    plain = rig.worker.stats().costs
    assert plain is not None
    assert plain.num_samples > costs.num_samples
    await rig.worker.score_prompt(a_request(40, "last", reading=SCORES, max_tokens=0))
    assert rig.worker.stats().costs == plain


@of_both_roles(max_step_tokens=8)
async def test_what_is_scored_enters_the_cache(rig: Rig) -> None:
    await rig.worker.score_prompt(a_request(30, "r", reading=SCORES, max_tokens=0))
    last = await rig.worker.score_prompt(a_request(30, "l", reading=ScoringParams(pooling="last"), max_tokens=1))
    assert last.num_cached_tokens == 28
    assert len(last.event.tokens) == 1


@of_both_roles(max_step_tokens=8)
async def test_many_prompts_are_scored_together_however_few_blocks_there_are(rig: Rig) -> None:
    """32 blocks of 4 tokens: three of these fit at a time."""
    calls = [begin(rig.worker.score_prompt(a_request(40, f"r{i}", reading=SCORES, max_tokens=0))) for i in range(6)]
    for reply in await asyncio.gather(*calls):
        assert_scored(reply, 40)


@of_both_roles(max_step_tokens=8)
async def test_a_reading_ends_where_its_router_or_its_engine_does(rig: Rig) -> None:
    cancelled = begin(rig.worker.score_prompt(a_request(100, "c", reading=SCORES, max_tokens=0)))
    await asyncio.sleep(0.002)
    cancelled.cancel()
    with pytest.raises(RequestError):
        await rig.worker.score_prompt(a_request(101, "long", reading=SCORES, max_tokens=0))
    rig.engine.fail_at_step = rig.engine.num_steps + 2
    with pytest.raises(WorkerLost):
        await rig.worker.score_prompt(a_request(60, "r", reading=SCORES, max_tokens=0))
