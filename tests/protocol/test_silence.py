import asyncio

from twostroke.protocol.clock import Silence


class Clock:
    """Real time, and what a test adds to it: a process that was stopped."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.skipped_s


async def test_a_peer_that_says_nothing_outlasts_the_limit() -> None:
    silence = Silence(Clock(), 0.02)
    await asyncio.wait_for(silence.outlast(), 20)
    assert silence.is_too_long
    silence.end()
    assert silence.length_s < 0.02


async def test_what_this_process_slept_through_is_forgiven() -> None:
    clock = Clock()
    silence = Silence(clock, 30.0)
    pause = asyncio.create_task(silence.pause(0.01))
    await asyncio.sleep(0)
    clock.skipped_s = 1000.0
    await pause
    assert not silence.is_too_long
    assert silence.length_s < 20


async def test_a_pause_that_is_a_little_late_forgives_nothing() -> None:
    clock = Clock()
    silence = Silence(clock, 30.0)
    for _ in range(5):
        pause = asyncio.create_task(silence.pause(0.0))
        await asyncio.sleep(0)
        clock.skipped_s += 9.0
        await pause
    assert silence.is_too_long
