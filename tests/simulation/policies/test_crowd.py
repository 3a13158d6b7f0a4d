"""More requests than there is room for, without SLO classes: no prompt is computed twice, but without safeguards."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.policies.crowd import NUM_REQUESTS, run_crowd
from twostroke.decode_worker.worker import DecodeWorker
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.transfer import OutgoingLane


def num_computed_twice() -> int:
    served = run_crowd(1).served
    assert len(served) == NUM_REQUESTS
    assert max(one.ttft_s for one in served) > 2.5, "hardly anybody waits"
    return sum(one.computed_twice for one in served)


def test_no_prompt_is_computed_twice_however_long_it_waits():
    assert num_computed_twice() == 0


def _hear_nothing(lane: OutgoingLane) -> None:
    """The target's request waits for room, and the source's patience ends."""


def _keep_nothing(receiver: KVReceiver, ticket: Any) -> None:
    """The request waits for room, and its offer does not."""


def _wait_for_two_seconds(worker: DecodeWorker, call: Any, _: Any) -> None:
    worker._offers.wait(call.ticket, 2.0, came=lambda: worker._offered(call), missing=lambda: worker._do_without(call))


@pytest.mark.parametrize(
    ("target", "name", "replacement"),
    [
        pytest.param(OutgoingLane, "awaited", _hear_nothing, id="sources give up KV that is awaited"),
        pytest.param(KVReceiver, "keep", _keep_nothing, id="offers don't wait with their requests"),
        pytest.param(DecodeWorker, "_expect", _wait_for_two_seconds, id="requests don't wait for long queues"),
    ],
)
def test_prompts_are_computed_twice_where(
    target: type, name: str, replacement: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(target, name, replacement)
    assert num_computed_twice() > 0
