"""What is remembered of requests that take workers down, for how long, and what of it is worth telling."""

from twostroke.protocol.frames import MAX_PAYLOAD_BYTES
from twostroke.protocol.messages import Convicted, encode_message
from twostroke.protocol.verdicts import LONGEST_S, MOST_TOLD, Verdict, Verdicts


class Scene:
    """Verdicts at a time set by hand."""

    def __init__(self, **bounds):
        self.now = 1e6
        self.verdicts = Verdicts(lambda: self.now, **bounds)


def about(number: int, left_s: float = 600.0) -> Verdict:
    return Verdict(number.to_bytes(16, "big"), left_s)


def known(scene: Scene, count: int) -> list[int]:
    return [number for number in range(count) if scene.verdicts.holds(about(number).fingerprint)]


def test_a_verdict_holds_for_what_it_had_left_and_is_told_with_what_it_has_left():
    scene = Scene()
    assert scene.verdicts.learn([about(1, 10.0)]) == (about(1, 10.0),)
    scene.now += 4.0
    assert scene.verdicts.to_tell() == (about(1, 6.0),)
    scene.now += 5.9
    assert known(scene, 3) == [1]
    scene.now += 0.2
    assert known(scene, 3) == []
    assert scene.verdicts.to_tell() == ()


def test_what_is_told_again_a_moment_later_is_no_news_and_prolongs_nothing():
    scene = Scene()
    scene.verdicts.add(about(1, 10.0))
    for _ in range(50):
        (told,) = scene.verdicts.to_tell()
        scene.now += 0.19  # under way, in a circle; nobody takes that off
        assert not scene.verdicts.add(told)
    scene.now += 0.6
    assert known(scene, 3) == []


def test_a_request_that_is_found_guilty_again_is_news_and_so_is_one_whose_time_was_over():
    scene = Scene()
    scene.verdicts.add(about(1, 10.0))
    scene.now += 8.0
    assert scene.verdicts.add(about(1, 10.0))
    scene.now += 9.0
    assert known(scene, 3) == [1]
    scene.now += 2.0
    assert scene.verdicts.add(about(1, 0.5))


def test_only_so_many_are_remembered_and_who_was_told_first_goes_first():
    scene = Scene(most=3)
    for number in (0, 1, 2):
        scene.verdicts.add(about(number, 10.0))
    scene.verdicts.add(about(0, 100.0))
    scene.verdicts.add(about(3, 10.0))
    assert known(scene, 5) == [0, 2, 3]


def test_nothing_is_remembered_for_longer_than_allowed():
    scene = Scene(longest_s=60.0)
    scene.verdicts.add(about(1, LONGEST_S))
    scene.now += 61.0
    assert known(scene, 3) == []
    assert not Scene(longest_s=0.0).verdicts.add(about(1))


def test_all_that_one_message_may_tell_is_a_small_frame():
    scene = Scene(most=2 * MOST_TOLD)
    for number in range(2 * MOST_TOLD):
        scene.verdicts.add(about(number))
    told = scene.verdicts.to_tell()
    assert [verdict.fingerprint for verdict in told] == [about(MOST_TOLD + n).fingerprint for n in range(MOST_TOLD)]
    assert len(encode_message(Convicted(told))) < MAX_PAYLOAD_BYTES / 250
