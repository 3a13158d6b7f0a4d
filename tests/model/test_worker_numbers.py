"""What workers tell of themselves, of both kinds where they tell the same."""

import asyncio
from typing import Any

import pytest

from tests.simulation.worker_rig import Rig, a_request, begin, play
from twostroke.protocol.requests import GenerateRequest, Promise
from twostroke.protocol.stats import LEAST_STRETCH, QueuedWork
from twostroke.worker.numbers import queued_work
from twostroke.worker.step_costs import COLD_STEPS, FIRST_SAMPLES, StepContent

CHAT = Promise("chat", priority=2, share=0.5, tpot_s=0.05)
BATCH = Promise("batch", priority=0, share=0.1)


def call(rig: Rig, request: GenerateRequest) -> "asyncio.Task[Any]":
    if rig.info.role == "prefill":
        return begin(rig.worker.prefill(request, None))
    return begin(rig.worker.decode(request, None))


def test_what_is_queued_is_summed_up_by_class_the_highest_priority_first() -> None:
    late = Promise("chat", priority=2, share=0.5, ttft_left_s=-1.0)
    assert queued_work([(BATCH, 100), (CHAT, 7), (BATCH, 1), (late, 3)]) == (
        QueuedWork("chat", 2, 0.5, tokens=10, requests=2),
        QueuedWork("batch", 0, 0.1, tokens=101, requests=2),
    )
    assert queued_work([]) == ()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_both_kinds_tell_the_tokens_queued_by_class(role: str) -> None:
    async def script(rig: Rig) -> None:
        classes = [BATCH, CHAT, BATCH, CHAT]
        calls = [
            call(rig, a_request(10 + number, f"r{number}", promise=promise)) for number, promise in enumerate(classes)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stats = rig.worker.stats()
        assert [(one.class_name, one.tokens, one.requests) for one in stats.queued] == [
            ("chat", 11 + 13, 2),
            ("batch", 10 + 12, 2),
        ]
        assert stats.num_waiting_tokens == 46
        await asyncio.gather(*calls)
        assert rig.worker.stats().queued == ()
        assert rig.worker.stats().num_waiting_tokens == 0

    play(script, role=role)


def test_a_decode_worker_tells_its_contexts_and_the_tightest_promise_among_those_who_decode() -> None:
    async def script(rig: Rig) -> None:
        loose = Promise("batch", tpot_s=0.2)
        calls = [
            call(rig, a_request(10, "a", promise=CHAT, max_tokens=30)),
            call(rig, a_request(7, "b", promise=loose, max_tokens=60)),
            call(rig, a_request(5, "c", max_tokens=60)),
        ]
        assert rig.worker.stats().tightest_tpot_s is None
        await asyncio.sleep(0.02)
        assert len(rig.events()) == 3, "all have begun to decode"
        stats = rig.worker.stats()
        assert stats.tightest_tpot_s == 0.05
        heard = 10 + 7 + 5 + sum(len(tokens) for tokens in rig.events().values())
        assert heard <= stats.context_tokens <= heard + 10, "some may be on their way"
        await calls[0]
        assert rig.worker.stats().tightest_tpot_s == 0.2
        await asyncio.gather(*calls)
        stats = rig.worker.stats()
        assert (stats.tightest_tpot_s, stats.context_tokens) == (None, 0)

    play(script, role="decode", num_blocks=64)


def test_a_promise_that_nobody_could_keep_is_told_as_what_the_worker_makes_of_it() -> None:
    async def script(rig: Rig) -> None:
        for number in range(COLD_STEPS + FIRST_SAMPLES):
            await call(rig, a_request(5 + number, f"r{number}", max_tokens=3))
        hopeless = call(rig, a_request(10, "a", promise=Promise("chat", tpot_s=1e-6), max_tokens=30))
        await asyncio.sleep(0.02)
        assert len(rig.events()["a"]) > 0
        stats = rig.worker.stats()
        assert stats.costs is not None
        alone_s = stats.costs.base_s + stats.costs.decode_s(1, stats.context_tokens)
        assert stats.tightest_tpot_s == pytest.approx(LEAST_STRETCH * alone_s)
        await hopeless

    play(script, role="decode", num_blocks=64)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_learn_what_their_own_steps_cost(role: str) -> None:
    async def script(rig: Rig) -> None:
        assert rig.worker.stats().costs is None
        for number in range(COLD_STEPS + FIRST_SAMPLES):
            await call(rig, a_request(5 + number, f"r{number}", max_tokens=3))
        stats = rig.worker.stats()
        assert stats.costs is not None
        assert stats.costs.num_samples >= FIRST_SAMPLES
        mean_s = stats.step_seconds / stats.steps
        content = StepContent(12, 72.0, 0, 0)
        predicted_s = stats.costs.base_s + stats.costs.prompt_s(content.prompt_tokens)
        assert mean_s / 3 < predicted_s < 3 * mean_s

    play(script, role=role)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_is_told_has_learnt_from_all_steps(role: str) -> None:
    async def script(rig: Rig) -> None:
        for number in range(COLD_STEPS + FIRST_SAMPLES + 3):
            await call(rig, a_request(5 + number, f"r{number}", max_tokens=1))
            stats = rig.worker.stats()
            assert stats.costs is None or stats.costs.num_samples == stats.steps - COLD_STEPS
        assert stats.costs is not None

    play(script, role=role)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_draining_worker_tells_its_routers_at_once(role: str) -> None:
    async def script(rig: Rig) -> None:
        running = call(rig, a_request(60, max_tokens=20))
        await asyncio.sleep(0.51)
        told = len(rig.numbers)
        assert not any(stats.is_draining for stats in rig.numbers)
        draining = begin(rig.worker.drain())
        await asyncio.sleep(0.05)
        assert [stats.is_draining for stats in rig.numbers[told:]] == [True]
        await running
        await draining

    play(script, role=role)
