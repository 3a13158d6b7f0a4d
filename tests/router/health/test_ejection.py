"""Who is left out, for how long, and how they come back."""

from twostroke.router.health.ejection import Ejection, EjectionConfig

ALL = ["a", "b", "c", "d"]


class Scene:
    """An Ejection whose clock is set by hand, and that draws no jitter."""

    def __init__(self, draw: float = 0.0, **config):
        self.now = 0.0
        self.ejection = Ejection[str](EjectionConfig(**config), clock=lambda: self.now, draw=lambda: draw)

    def fail(self, worker: str, times: int = 5) -> None:
        for _ in range(times):
            self.ejection.failed(worker)

    def out(self) -> set[str]:
        return set(self.ejection.ejected(ALL))


def test_a_worker_that_fails_often_enough_in_a_row_is_left_out_for_a_while():
    scene = Scene()
    scene.fail("a", 4)
    assert scene.out() == set()
    scene.fail("a", 1)
    assert scene.out() == {"a"}
    scene.now = 2.1
    assert scene.out() == set()


def test_a_success_between_failures_starts_the_row_anew():
    scene = Scene()
    scene.fail("a", 4)
    scene.ejection.succeeded("a")
    scene.fail("a", 4)
    assert scene.out() == set()


def test_a_worker_that_fails_every_other_request_is_left_out_by_its_rate():
    scene = Scene()
    for _ in range(10):
        scene.fail("a", 1)
        scene.ejection.succeeded("a")
    assert scene.out() == set(), "twenty outcomes are needed"
    scene.fail("a", 1)
    assert scene.out() == {"a"}


def test_half_of_all_are_left_out_at_most_and_a_single_one_never():
    scene = Scene()
    for worker in ALL:
        scene.fail(worker)
    assert len(scene.out()) == 2
    assert scene.ejection.ejected(["a"]) == frozenset()


def test_one_request_finds_out_whether_the_worker_can_do_it_again():
    scene = Scene()
    scene.fail("a")
    scene.now = 3.0
    scene.ejection.begin("a")
    assert scene.out() == {"a"}, "others wait for what comes of it"
    scene.ejection.succeeded("a")
    assert scene.out() == set()


def test_a_failed_probe_leaves_the_worker_out_for_twice_as_long():
    scene = Scene()
    scene.fail("a")
    scene.now = 3.0
    scene.ejection.begin("a")
    scene.fail("a", 1)
    scene.now = 6.9
    assert scene.out() == {"a"}
    scene.now = 7.1
    assert scene.out() == set()


def test_a_probe_whose_client_leaves_tells_nothing_and_the_next_request_is_one():
    scene = Scene()
    scene.fail("a")
    scene.now = 3.0
    scene.ejection.begin("a")
    scene.ejection.unresolved("a")
    assert scene.out() == set()
    scene.ejection.begin("a")
    assert scene.out() == {"a"}


def test_a_lost_connection_is_one_failure_however_many_requests_tell_of_it():
    scene = Scene()
    for _ in range(100):
        scene.ejection.lost("a")
    assert scene.out() == set()
    for second in range(1, 5):
        scene.now = float(second)
        scene.ejection.lost("a")
    assert scene.out() == {"a"}


def test_the_time_is_shortened_at_random_and_bounded():
    scene = Scene(draw=1.0, first_s=2.0, most_s=3.0)
    scene.fail("a")
    scene.now = 1.1
    assert scene.out() == set()
    for _ in range(10):
        scene.ejection.begin("a")
        scene.fail("a", 1)
        scene.now += 1.6
        assert scene.out() == set()


def test_ten_requests_in_a_row_make_up_for_what_was():
    scene = Scene()
    scene.fail("a")
    scene.now = 3.0
    for _ in range(10):
        scene.ejection.begin("a")
        scene.ejection.succeeded("a")
    scene.fail("a")
    scene.now = 5.1
    assert scene.out() == set(), "two seconds again, not four"


def test_those_that_are_gone_are_forgotten():
    scene = Scene()
    scene.fail("a")
    scene.ejection.keep_where(lambda worker: worker != "a")
    assert scene.out() == set()
