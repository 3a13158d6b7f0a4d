"""Whose turn it is among routers."""

import pytest

from twostroke.protocol.turns import Turns


class Scene:
    def __init__(self):
        self.given: list[tuple[str, int]] = []
        self.turns = Turns(lambda router, number: self.given.append((router, number)))


@pytest.fixture
def scene():
    return Scene()


def test_one_router_has_its_turn_and_the_others_follow_as_they_came(scene):
    for router in ("b", "a", "c"):
        scene.turns.ask(router, 7)
    assert scene.given == [("b", 7)]
    scene.turns.end("b")
    scene.turns.end("a")
    assert scene.given == [("b", 7), ("a", 7), ("c", 7)]
    scene.turns.end("c")
    scene.turns.ask("a", 8)
    assert scene.given[3:] == [("a", 8)]


def test_who_gives_up_waiting_is_left_out_and_ends_nobody_elses_turn(scene):
    for router in ("a", "b", "c"):
        scene.turns.ask(router, 1)
    scene.turns.end("b")
    scene.turns.end("nobody")
    assert scene.given == [("a", 1)]
    scene.turns.end("a")
    assert scene.given == [("a", 1), ("c", 1)]


def test_nobody_is_next_at_a_worker_that_ends(scene):
    for router in ("a", "b"):
        scene.turns.ask(router, 1)
    scene.turns.close()
    scene.turns.end("a")
    scene.turns.end("b")
    scene.turns.ask("c", 1)
    assert scene.given == [("a", 1)]


def test_who_asks_again_keeps_its_place_and_is_answered_by_its_last_number(scene):
    for router, number in (("a", 1), ("b", 1), ("c", 1), ("b", 2), ("a", 2)):
        scene.turns.ask(router, number)
    scene.turns.end("a")
    assert scene.given == [("a", 1), ("a", 2), ("b", 2)]
