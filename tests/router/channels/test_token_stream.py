import pytest

from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.requests import SampledToken, TokenEvent
from twostroke.router.channels.token_stream import join_fresh


def event(index, *tokens, finish=None):
    return TokenEvent("r", index, tuple(SampledToken(token) for token in tokens), finish)


@pytest.mark.parametrize(
    ("events", "sent", "joined"),
    [
        ([event(0, 7)], [], event(0, 7)),
        ([event(0, 7), event(0, 7), event(1, 8)], [], event(0, 7, 8)),
        ([event(0, 7)], [7], None),
        ([event(0, 7, 8, 9)], [7, 8], event(2, 9)),
        ([event(0, 7, finish="stop")], [7], event(1, finish="stop")),
        ([event(2, 9, finish="length"), event(3, 1)], [7, 8], event(2, 9, finish="length")),
        ([event(0, 7, finish="stop")], [7, 8, 9], None),
    ],
)
def test_joining_keeps_each_token_once(events, sent, joined):
    assert join_fresh(events, sent) == joined


@pytest.mark.parametrize(
    ("events", "sent"),
    [
        ([event(0, 8)], [7]),
        ([event(0, 7, 9, 10)], [7, 8]),
        ([event(0, 7), event(0, 8)], []),
        ([event(0, 8, finish="stop")], [7]),
        ([event(1, 8)], []),
        ([event(-1, 8)], [8]),
    ],
    ids=["another", "another later", "another at once", "another at the end", "a gap", "no index"],
)
def test_what_does_not_go_on_from_what_was_sent_is_a_lost_worker(events, sent):
    with pytest.raises(WorkerLost):
        join_fresh(events, sent)
