"""Blocked requests: how many a process remembers, for how long, and which of them it tells others."""

from twostroke.protocol.messages import RequestsBlocked, encode_message
from twostroke.protocol.network import MAX_PAYLOAD_BYTES
from twostroke.protocol.requests import LONGEST_S, MAX_IN_MESSAGE, BlockedRequest, BlockedRequests


class Scene:
    """Blocked requests at a time set by hand."""

    def __init__(self, **bounds):
        self.now = 1e6
        self.known = BlockedRequests(lambda: self.now, **bounds)


def about(number: int, left_s: float = 600.0) -> BlockedRequest:
    return BlockedRequest(number.to_bytes(16, "big"), left_s)


def known(scene: Scene, count: int) -> list[int]:
    return [number for number in range(count) if scene.known.blocks(about(number).fingerprint)]


def test_a_request_is_blocked_for_the_time_it_had_left_and_told_with_the_time_it_has_left():
    scene = Scene()
    assert scene.known.learn([about(1, 10.0)]) == (about(1, 10.0),)
    scene.now += 4.0
    assert scene.known.latest() == (about(1, 6.0),)
    scene.now += 5.9
    assert known(scene, 3) == [1]
    scene.now += 0.2
    assert known(scene, 3) == []
    assert scene.known.latest() == ()


def test_a_repetition_a_moment_later_is_no_news_and_prolongs_nothing():
    scene = Scene()
    scene.known.learn([about(1, 10.0)])
    for _ in range(50):
        (told,) = scene.known.latest()
        scene.now += 0.19  # under way, in a circle; nobody takes that off
        assert not scene.known.learn([told])
    scene.now += 0.6
    assert known(scene, 3) == []


def test_a_request_that_is_blocked_again_is_news_and_so_is_one_whose_time_was_over():
    scene = Scene()
    scene.known.learn([about(1, 10.0)])
    scene.now += 8.0
    assert scene.known.learn([about(1, 10.0)])
    scene.now += 9.0
    assert known(scene, 3) == [1]
    scene.now += 2.0
    assert scene.known.learn([about(1, 0.5)])


def test_only_so_many_are_remembered_and_the_oldest_are_dropped_first():
    scene = Scene(most=3)
    for number in (0, 1, 2):
        scene.known.learn([about(number, 10.0)])
    scene.known.learn([about(0, 100.0)])
    scene.known.learn([about(3, 10.0)])
    assert known(scene, 5) == [0, 2, 3]


def test_no_request_is_blocked_for_longer_than_allowed():
    scene = Scene(longest_s=60.0)
    scene.known.learn([about(1, LONGEST_S)])
    scene.now += 61.0
    assert known(scene, 3) == []
    assert not Scene(longest_s=0.0).known.learn([about(1)])


def test_the_largest_message_is_a_small_frame():
    scene = Scene(most=2 * MAX_IN_MESSAGE)
    for number in range(2 * MAX_IN_MESSAGE):
        scene.known.learn([about(number)])
    told = scene.known.latest()
    assert [request.fingerprint for request in told] == [
        about(MAX_IN_MESSAGE + n).fingerprint for n in range(MAX_IN_MESSAGE)
    ]
    assert len(encode_message(RequestsBlocked(told))) < MAX_PAYLOAD_BYTES / 250
