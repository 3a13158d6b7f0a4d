"""Who is suspected of a worker's death, who is guilty, and who is let go."""

import pytest
from msgspec.structs import replace

from twostroke.protocol.requests import Peer
from twostroke.protocol.verdicts import Verdict
from twostroke.router.health.suspects import PoisonRequest, Stay, Suspects, SuspectsConfig, fingerprint_of

D0, D1, D2 = Peer("d0", 1), Peer("d1", 1), Peer("d2", 1)


class Scene:
    """Suspects whose clock goes on by a second with every death."""

    def __init__(self, a_request, **config):
        self.now = 0.0
        self.suspects = Suspects(SuspectsConfig(**config), lambda: self.now)
        self._a_request = a_request

    def case(self, name: int):
        return self.suspects.open(self._a_request(token_ids=(name,), num_prompt_tokens=1))

    def dies(self, worker: Peer, **stays: tuple) -> None:
        """With these cases there."""
        for case, stay in stays.values():
            self.suspects.stay(case, worker, stay)
        self.suspects.died(worker)
        self.now += 1.0


@pytest.fixture
def scene(a_request):
    return Scene(a_request)


def test_who_got_no_token_is_suspected_and_who_streams_or_waits_for_its_kv_is_not(scene):
    fresh, streaming, waiting = (scene.case(i) for i in range(3))
    scene.dies(D0, a=(fresh, Stay.FRESH), b=(streaming, Stay.STREAMS), c=(waiting, Stay.AWAITS))
    assert [scene.suspects.is_suspect(case) for case in (fresh, streaming, waiting)] == [True, False, False]


def test_one_that_is_alone_at_a_second_death_is_guilty(scene):
    case = scene.case(1)
    scene.dies(D0, a=(case, Stay.FRESH))
    assert scene.suspects.accused_of(case) == ()
    scene.dies(D1, a=(case, Stay.FRESH))
    assert scene.suspects.accused_of(case) == (D0, D1)


def test_a_newcomer_beside_a_suspect_does_not_clear_it_and_is_not_accused(scene):
    case, newcomer = scene.case(1), scene.case(2)
    scene.dies(D0, a=(case, Stay.FRESH))
    scene.dies(D1, a=(case, Stay.FRESH), b=(newcomer, Stay.FRESH))
    assert scene.suspects.accused_of(case) == (D0, D1)
    assert scene.suspects.accused_of(newcomer) == ()


def test_two_suspects_at_one_death_are_both_tried_again(scene):
    one, two = scene.case(1), scene.case(2)
    for worker in (D0, D1):
        scene.dies(worker, a=(one, Stay.FRESH), b=(two, Stay.FRESH))
    assert scene.suspects.accused_of(one) == scene.suspects.accused_of(two) == ()
    scene.dies(D2, a=(two, Stay.FRESH))
    assert scene.suspects.accused_of(two) == (D1, D2)


def test_one_that_comes_to_a_worker_which_has_just_died_is_not_accused_of_that(scene):
    case, guilty = scene.case(1), scene.case(2)
    scene.dies(D0, a=(case, Stay.FRESH), b=(guilty, Stay.FRESH))
    scene.suspects.stay(guilty, D1, Stay.FRESH)
    scene.suspects.died(D1)
    scene.dies(D1, a=(case, Stay.FRESH))
    assert scene.suspects.accused_of(guilty) == (D0, D1)
    assert scene.suspects.accused_of(case) == ()


def test_a_token_of_its_own_clears_a_suspect(scene):
    case = scene.case(1)
    scene.dies(D0, a=(case, Stay.FRESH))
    scene.suspects.stay(case, D1, Stay.FRESH)
    scene.suspects.got_on(case, D1, 0)
    assert not scene.suspects.is_suspect(case)
    scene.dies(D2, a=(case, Stay.FRESH))
    assert scene.suspects.accused_of(case) == ()


def test_a_computed_prompt_clears_it_of_deaths_over_prompts_alone(scene):
    case = scene.case(1)
    scene.dies(D0, a=(case, Stay.FRESH))
    scene.suspects.prompt_done(case)
    assert not scene.suspects.is_suspect(case)
    scene.dies(D1, a=(case, Stay.FRESH))  # while it decoded
    scene.suspects.prompt_done(case)
    assert scene.suspects.is_suspect(case)


def test_a_stream_whose_next_worker_dies_at_once_was_only_moved(scene):
    case = scene.case(1)
    scene.suspects.stay(case, D0, Stay.STREAMS)
    scene.suspects.died(D0)
    scene.dies(D1, a=(case, Stay.FRESH))
    assert scene.suspects.accused_of(case) == ()


def test_suspects_take_turns_on_a_worker_and_those_of_one_fingerprint_everywhere(scene):
    one, two, sibling, innocent = scene.case(1), scene.case(2), scene.case(1), scene.case(3)
    scene.dies(D0, a=(one, Stay.FRESH), b=(two, Stay.FRESH))
    scene.suspects.stay(innocent, D1, Stay.FRESH)
    assert scene.suspects.may_try(one, [D1])
    scene.suspects.stay(one, D1, Stay.HELD)
    assert not scene.suspects.may_try(two, [D1])
    assert scene.suspects.may_try(two, [D2])
    assert not scene.suspects.may_try(sibling, [D2])
    scene.suspects.stay(one, D1, Stay.STREAMS)
    assert scene.suspects.may_try(two, [D1])


def test_a_worker_that_lives_after_all_proves_nothing(scene):
    case = scene.case(1)
    scene.dies(D0, a=(case, Stay.FRESH))
    scene.dies(D1, a=(case, Stay.FRESH))
    scene.suspects.forgive(case, D0)
    assert scene.suspects.accused_of(case) == ()
    assert scene.suspects.is_suspect(case)


def test_the_guilty_are_refused_for_a_while(scene):
    case = scene.case(1)
    scene.suspects.convict(case)
    with pytest.raises(PoisonRequest) as caught:
        scene.case(1)
    assert (caught.value.status, caught.value.code) == (422, "poison_request")
    scene.case(2)
    scene.now = 601.0
    scene.case(1)


def test_what_another_router_has_found_guilty_is_refused_here_too_and_suspected_no_more(scene):
    case, other = scene.case(1), scene.case(2)
    scene.dies(D0, a=(case, Stay.FRESH), b=(other, Stay.FRESH))
    scene.suspects.hear([Verdict(case.fingerprint, 300.0)])
    with pytest.raises(PoisonRequest):
        scene.suspects.check(case)
    assert not scene.suspects.is_suspect(case)
    assert scene.suspects.is_suspect(other)
    scene.suspects.check(other)
    scene.now += 301.0
    scene.suspects.check(case)


def test_other_routers_verdicts_hold_no_longer_than_its_own_would(a_request):
    scene = Scene(a_request, refuse_s=60.0)
    case = scene.case(1)
    scene.suspects.hear([Verdict(case.fingerprint, 600.0)])
    scene.now = 59.0
    with pytest.raises(PoisonRequest):
        scene.case(1)
    scene.now = 61.0
    scene.case(1)


def test_a_verdict_is_told_with_the_time_that_it_has_left(scene):
    case = scene.case(1)
    assert scene.suspects.convict(case) == (Verdict(case.fingerprint, 600.0),)
    scene.now = 100.0
    assert scene.suspects.verdicts() == (Verdict(case.fingerprint, 500.0),)


def test_only_so_many_are_remembered(a_request):
    scene = Scene(a_request, max_refused=2)
    for name in range(3):
        scene.suspects.convict(scene.case(name))
    scene.case(0)
    with pytest.raises(PoisonRequest):
        scene.case(2)


def test_old_deaths_are_forgotten(scene):
    case, other = scene.case(1), scene.case(2)
    scene.dies(D0, a=(case, Stay.FRESH))
    scene.now += 200.0
    scene.dies(D1, a=(other, Stay.FRESH))
    assert not scene.suspects.is_suspect(case)
    assert scene.suspects.num_suspects == 1


def test_seed_and_length_make_no_other_request_and_all_else_does(a_request):
    one = a_request()
    same = [a_request(sampling=replace(one.sampling, seed=1)), a_request(max_tokens=1), a_request(request_id="x")]
    others = [
        a_request(token_ids=(1,)),
        a_request(sampling=replace(one.sampling, top_k=3)),
        a_request(stop_token_ids=(5,)),
        a_request(cache_salt=b"a tenant's"),
    ]
    assert {fingerprint_of(each) for each in same} == {fingerprint_of(one)}
    assert len({fingerprint_of(each) for each in (one, *others)}) == 5
