"""The knowledge with which the chooser chooses."""

import msgspec
import pytest

from tests.router.routing.knowing import COSTS, LAYOUT, PROMPT, TIERS, Rig, info, request
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import BlocksChanged
from twostroke.protocol.requests import DecodeReply, Peer, PrefillReply, SampledToken, ScoringParams, TokenEvent
from twostroke.protocol.stats import QueuedWork
from twostroke.router.request_state import AttemptEnded, DecodeDone, PrefillDone, StreamMove


def waiting(tokens):
    return (QueuedWork("standard", 0, 0.0, tokens, 1),)


async def test_a_prompt_goes_to_the_worker_that_has_told_of_its_blocks():
    rig = Rig(pulls=False)
    rig.tell_blocks("p1", PROMPT[:320])
    path, hold = rig.take(request())
    assert (path.prefill.peer.worker_id, path.new_tokens) == ("p1", 80)
    assert path.estimate.prefill_s == pytest.approx(0.01 + 0.08)
    assert rig.chooser.in_flight == 2
    hold.release()
    assert rig.chooser.in_flight == 0


async def test_the_next_of_a_burst_follows_its_prefix_though_no_worker_has_told_of_it():
    rig = Rig(pulls=False)
    first, _ = rig.take(request())
    second, _ = rig.take(request((*PROMPT, 1)))
    assert (second.prefill, second.new_tokens) == (first.prefill, 1), "the decode worker has none of it yet"
    assert second.estimate.queue_s == pytest.approx(400 * (0.001 + 0.01 / 500)), "behind the first"


async def test_once_a_prompt_is_read_its_decode_worker_is_expected_to_hold_it():
    rig = Rig()
    path, hold = rig.take(request())
    hold.prompt_computed()
    hold.release()
    again = rig.chooser.choose(request((*PROMPT, 1)))
    assert (again.prefill, again.decode, again.new_tokens) == (None, path.decode, 1)


async def test_a_burst_of_strangers_is_spread_over_all_workers():
    rig = Rig(roles="fixed")
    paths = [rig.take(request(tuple(range(n, n + 400))))[0] for n in range(0, 4000, 1000)]
    assert sorted(path.prefill.peer.worker_id for path in paths) == ["p0", "p0", "p1", "p1"]
    assert sorted(path.decode.peer.worker_id for path in paths) == ["d0", "d0", "d1", "d1"]


async def test_a_resumed_request_is_looked_up_with_what_was_sent_of_its_answer():
    rig = Rig()
    sent = tuple(range(1000, 1112))
    rig.tell_blocks("d1", (*PROMPT, *sent))
    path, _ = rig.take(request(), sent, {rig.infos["d0"].peer})
    assert (path.prefill, path.decode.peer.worker_id, path.new_tokens) == (None, "d1", 1)


async def test_an_answer_that_has_ended_is_expected_where_it_was_written_but_for_its_last_token():
    rig = Rig(pulls=False)
    path, hold = rig.take(request())
    written = tuple(range(1000, 1048))
    rig.emit(path, AttemptEnded(0.0, None, has_decoded=True), written)
    hold.release()
    following = rig.chooser.choose(request((*PROMPT, *written, *range(15))))
    assert (following.prefill, following.decode) == (None, path.decode)
    assert following.new_tokens == 400 + 48 + 15 - (400 + 32), "the block with its last token is not held"


@pytest.mark.parametrize(
    ("error", "moves", "teaches"), [(None, False, True), (None, True, False), (WorkerLost("dead"), False, False)]
)
async def test_only_attempts_that_end_an_answer_teach_how_long_answers_are(error, moves, teaches):
    rig = Rig()
    path, hold = rig.take(request())
    before = rig.chooser._answer_tokens
    move = StreamMove(path.decode, "crowded") if moves else None
    rig.emit(path, AttemptEnded(0.0, error, True, move), (1, 2, 3))
    hold.release()
    assert (rig.chooser._answer_tokens < before) == teaches


async def test_other_tenants_prefixes_are_not_found():
    rig = Rig()
    rig.tell_blocks("p1", PROMPT, salt=b"tenant")
    assert rig.chooser.choose(request()).new_tokens == 400
    assert rig.chooser.choose(request(cache_salt=b"tenant")).new_tokens == 1


async def test_workers_of_other_block_sizes_are_found_by_their_own_names():
    rig = Rig(pulls=False)
    rig.infos["p1"] = info("p1", layout=msgspec.structs.replace(LAYOUT, block_size=64))
    rig.tell_blocks("p0", PROMPT[:160])
    rig.tell_blocks("p1", PROMPT[:384], block_size=64)
    path = rig.chooser.choose(request())
    assert (path.prefill.peer.worker_id, path.new_tokens) == ("p1", 16)


async def test_a_worker_that_restarts_holds_nothing_and_its_load_is_forgotten():
    rig = Rig(pulls=False)
    rig.tell_blocks("p1", PROMPT)
    assert rig.chooser.choose(request()).new_tokens == 1
    rig.infos["p1"] = info("p1", peer=Peer("p1", 2))
    assert rig.chooser.choose(request()).new_tokens == 400


async def test_missed_news_of_blocks_is_asked_for_again():
    rig = Rig()
    assert rig.tell_blocks("p0", PROMPT)
    assert not rig.blocks.heard(rig.infos["p0"].peer, BlocksChanged(5, b"", b""))


# --- KV tiers ---


async def test_a_prompt_goes_to_the_worker_that_has_told_of_it_in_its_tiers():
    rig = Rig(pulls=False)
    rig.tell("p1", tiers=TIERS)
    rig.tell_blocks("p1", PROMPT[:320], in_tiers=True)
    path = rig.chooser.choose(request())
    assert (path.prefill.peer.worker_id, path.source, path.new_tokens) == ("p1", None, 80)
    assert path.estimate.tier_read_s == pytest.approx(0.005 + 0.032)
    assert rig.view.find(rig.infos["p1"].peer).cached_tokens == 0
    other = rig.chooser.choose(request(tuple(range(1000, 1400))))
    assert (other.estimate.tier_read_s, other.new_tokens) == (0, 400)


async def test_blocks_of_tiers_count_for_nothing_until_a_worker_tells_what_reading_them_takes():
    rig = Rig(pulls=False)
    rig.tell_blocks("p1", PROMPT[:320], in_tiers=True)
    assert rig.chooser.choose(request()).new_tokens == 400
    rig.tell("p1", tiers=TIERS)
    assert rig.chooser.choose(request()).new_tokens == 80
    rig.tell("p1")
    assert rig.chooser.choose(request()).new_tokens == 400


async def test_what_the_tiers_of_a_worker_hold_is_forgotten_when_it_leaves_or_restarts():
    rig = Rig(pulls=False)
    rig.tell("p1", tiers=TIERS)
    rig.tell_blocks("p1", PROMPT[:320], in_tiers=True)
    assert rig.chooser.choose(request()).new_tokens == 80
    left = rig.infos.pop("p1")
    assert rig.chooser.choose(request()).new_tokens == 400
    for rig.infos["p1"] in (left, info("p1", peer=Peer("p1", 2))):
        rig.tell("p1", tiers=TIERS)
        assert rig.chooser.choose(request()).new_tokens == 400


async def test_missed_news_of_tiers_is_asked_for_again_and_costs_no_news_of_the_cache():
    rig = Rig()
    peer = rig.infos["p0"].peer
    assert rig.tell_blocks("p0", PROMPT)
    assert rig.tell_blocks("p0", PROMPT, in_tiers=True)
    assert not rig.tier_blocks.heard(peer, BlocksChanged(5, b"", b"", is_tier=True))
    assert rig.blocks.heard(peer, BlocksChanged(1, b"", b""))


async def test_a_prompt_whose_tokens_are_all_scored_is_computed_whatever_tiers_hold():
    rig = Rig()
    rig.tell("p1", tiers=TIERS)
    rig.tell_blocks("p1", PROMPT[:320], in_tiers=True)
    for logprobs, new_tokens in ((None, 80), (1, 400)):
        path = rig.chooser.choose(request(scoring=ScoringParams(logprobs)))
        assert path.new_tokens == new_tokens


async def test_until_all_roles_have_told_their_costs_workers_are_chosen_by_load_and_pull_what_spares_enough():
    rig = Rig(pull_min_tokens=100)
    for name in ("d0", "d1"):
        rig.infos[name] = info(name, peer=Peer(name, 2))
        rig.tell(name, costs=None, num_running=name == "d0")
    rig.tell("p0", queued=waiting(50))
    rig.tell_blocks("p0", PROMPT[:320])
    path = rig.chooser.choose(request())
    assert path.estimate is None
    assert rig.choose() == ("p1", "d1", "p0")
    assert rig.choose(PROMPT[:80]) == ("p1", "d1", None)
    del rig.infos["p1"]
    assert rig.choose(failed={rig.infos["p0"].peer}) == (None, "d1", None), "no pull from one that has failed"
    rig.tell_blocks("d0", PROMPT[:320])
    assert rig.choose(failed={rig.infos["p0"].peer}) == (None, "d1", "d0")


async def test_a_worker_that_has_not_told_its_costs_is_taken_for_one_like_the_others():
    rig = Rig()
    rig.infos["p2"] = info("p2")
    rig.tell("p2", costs=None)
    rig.tell("p0", costs=msgspec.structs.replace(COSTS, token_s=0.003))
    taken = {rig.choose()[0] for _ in range(4)}
    assert taken == {"p1", "p2"}, "one with the quicker one's"


async def test_a_worker_whose_channel_drops_is_left_until_it_is_back():
    rig = Rig()
    down = {rig.infos["d0"].peer, rig.infos["p0"].peer}
    for worker in down:
        rig.view.on_connection(worker, False)
    assert {rig.choose() for _ in range(4)} == {("p1", "d1", None)}
    for worker in down:
        rig.view.on_connection(worker, True)
    for name in rig.infos:
        rig.tell(name)
    assert {rig.choose()[1] for _ in range(4)} == {"d0", "d1"}


async def test_ejected_workers_are_taken_for_want_of_others():
    rig = Rig(roles="fixed")
    ejected = {rig.infos["d0"].peer, rig.infos["p0"].peer}
    assert {rig.choose(ejected=ejected) for _ in range(4)} == {("p1", "d1", None)}
    del rig.infos["d1"]
    assert rig.choose(ejected=ejected)[1] == "d0"


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
async def test_other_policies_predict_nothing(policy):
    rig = Rig(policy=policy)
    assert rig.chooser.choose(request()).estimate is None
    rig.tell("p0", queued=waiting(5000))
    taken = [rig.choose()[0] for _ in range(4)]
    assert sorted(taken) == (["p1"] * 4 if policy == "least_loaded" else ["p0", "p0", "p1", "p1"])


async def test_a_pull_that_took_longer_than_expected_makes_the_next_less_likely():
    rig = Rig(decodes_alone=False)
    rig.tell_blocks("d0", PROMPT)
    rig.tell("d0", num_running=20)
    path = rig.chooser.choose(request((*PROMPT, 1)))
    assert path.source.peer.worker_id == "d0"
    event = TokenEvent("r", 0, (SampledToken(1),))
    before = rig.chooser._view.rates.of(path.prefill.peer)
    rig.emit(path, PrefillDone(0.0, PrefillReply(event, 16, 0.0, 9.0), 401))
    assert rig.chooser._view.rates.of(path.prefill.peer) == before, "nothing has come: it was computed"
    rig.emit(path, PrefillDone(0.0, PrefillReply(event, 400, 0.0, 9.0), 401))
    assert rig.chooser._view.rates.of(path.prefill.peer) < before


async def test_so_does_a_pull_to_a_decode_worker_that_computes_the_prompt():
    rig = Rig()
    del rig.infos["p0"], rig.infos["p1"]
    rig.tell_blocks("d0", PROMPT)
    rig.tell("d0", num_running=20)
    path = rig.chooser.choose(request((*PROMPT, 1)))
    assert (path.prefill, path.decode.peer.worker_id, path.source.peer.worker_id) == (None, "d1", "d0")
    before = rig.chooser._view.rates.of(path.decode.peer)
    rig.emit(path, DecodeDone(DecodeReply(9, "stop", 16, 9.0, 0.0, 0), 401, has_transfer=True))
    rig.emit(path, DecodeDone(DecodeReply(9, "stop", 400, 0.0, 0.0, 0), 401, has_transfer=True))
    assert rig.chooser._view.rates.of(path.decode.peer) == before, "nothing has come, or it was there already"
    rig.emit(path, DecodeDone(DecodeReply(9, "stop", 400, 9.0, 0.0, 0), 401, has_transfer=True))
    assert rig.chooser._view.rates.of(path.decode.peer) < before


async def test_a_busy_decode_worker_leaves_a_prompt_to_another_prefill_worker_where_that_is_much_quicker():
    rig = Rig()
    p0, d0 = rig.infos["p0"].peer, rig.infos["d0"].peer
    assert not rig.chooser.is_quicker_by_a_pair(request(), d0, {p0}), "it is idle"
    rig.tell("d0", queued=waiting(2000))
    assert not rig.chooser.is_quicker_by_a_pair(request(), d0, {p0, rig.infos["p1"].peer}), "there is no other"
    rig.choose()
    assert rig.chooser.is_quicker_by_a_pair(request(), d0, {p0})
    rig.tell("p1", queued=waiting(2000))
    rig.choose()
    assert not rig.chooser.is_quicker_by_a_pair(request(), d0, {p0})
