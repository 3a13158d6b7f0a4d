"""When requests are sent, on virtual time, and what those of a session say."""

from dataclasses import replace

import msgspec
import pytest

from tests.loadtests.generator.virtual_crew import FakeServer, VirtualCrew
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator.dispatcher import Conversation, Dispatcher, check_prompts
from twostroke.loadtests.plan import (
    SLO,
    Arrivals,
    Chat,
    Closed,
    Constant,
    Fixed,
    Piece,
    Plan,
    Poisson,
    Session,
    SessionTurn,
    Workload,
)
from twostroke.loadtests.workloads.prompts import text, token_ids
from twostroke.loadtests.workloads.sessions import sessions

BEGAN = 100.0


PLAN = Plan("http://nowhere", "m", 4096, Poisson(1.0), Fixed(5, 2), SLO(), seconds=10.0, vocabulary=4096)


def plan_with(arrivals: Arrivals, workload: Workload = PLAN.workload, seconds: float = 10.0, workers: int = 1) -> Plan:
    return msgspec.structs.replace(PLAN, arrivals=arrivals, workload=workload, seconds=seconds, num_workers=workers)


def dispatched(plan: Plan, server: FakeServer, worker: int = 0, until: float | None = None) -> FakeServer:
    dispatcher = Dispatcher(plan, worker, server.line, server.crew)
    dispatcher.prepare()
    sending = server.crew.run(lambda: dispatcher.run(BEGAN), until)
    if not sending.dead:  # ended from outside
        sending.throw()
    return server


def test_requests_are_sent_at_their_instants_however_slow_the_server_is() -> None:
    plan = plan_with(Poisson(5.0))
    server = dispatched(plan, FakeServer(VirtualCrew(), takes_s=60.0))
    scheduled = [session.at_s for session in sessions(plan)]
    assert len(scheduled) > 32  # more than are prepared ahead
    assert [at - BEGAN for at, _, _ in server.asked] == pytest.approx(scheduled)
    assert [record.scheduled_s for record in server.records] == scheduled
    assert all(record.lag_s == pytest.approx(0.0, abs=1e-9) for record in server.records)


def test_a_late_generator_is_seen_in_the_lag_and_in_the_time_to_first_token() -> None:
    server = dispatched(plan_with(Constant(1.0)), FakeServer(VirtualCrew(late_s=0.03)))
    assert all(record.lag_s >= 0.03 for record in server.records)
    assert all(record.ttft_s == pytest.approx(record.lag_s) for record in server.records)


def test_the_shares_of_all_processes_are_the_plan() -> None:
    plan = plan_with(Poisson(3.0), workers=3)
    sent = [
        [record.session for record in dispatched(plan, FakeServer(VirtualCrew()), worker).records]
        for worker in range(3)
    ]
    assert sorted(number for share in sent for number in share) == [session.index for session in sessions(plan)]
    assert all(number % 3 == worker for worker in range(3) for number in sent[worker])


def test_a_user_of_a_closed_loop_asks_again_when_it_has_its_answer_and_has_thought() -> None:
    server = dispatched(plan_with(Closed(users=2, think_s=0.5)), FakeServer(VirtualCrew(), takes_s=1.0))
    sent = [at - BEGAN for at, _, _ in server.asked]
    assert sent == pytest.approx([at for at in (0.0, 1.5, 3.0, 4.5, 6.0, 7.5, 9.0) for _ in range(2)])
    assert [record.scheduled_s for record in server.records] == pytest.approx(sent)


def test_a_user_of_a_closed_loop_that_is_refused_pauses_before_it_asks_again() -> None:
    server = FakeServer(VirtualCrew(), takes_s=1.0, refuses=frozenset({1, 2}))
    dispatched(plan_with(Closed(users=1), seconds=5.5), server)
    assert [at - BEGAN for at, _, _ in server.asked] == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert [record.status for record in server.records] == ["ok", "refused", "refused", "ok", "ok", "ok"]


def test_users_are_shared_out_among_the_processes() -> None:
    plan = plan_with(Closed(users=5), seconds=0.5, workers=2)
    for worker, users in ((0, 3), (1, 2)):
        assert len(dispatched(plan, FakeServer(VirtualCrew()), worker).records) == users


def test_turns_follow_each_other_with_the_answers_between_and_time_to_think() -> None:
    plan = plan_with(Constant(0.1), Chat(turns=4.0, think_s=2.0), seconds=1000.0)
    server = dispatched(plan, FakeServer(VirtualCrew(), takes_s=3.0))
    session = next(session for session in sessions(plan) if len(session.turns) > 2)
    records = [record for record in server.records if record.session == session.index]
    assert [record.turn for record in records] == list(range(len(session.turns)))
    for before, after, turn in zip(records, records[1:], session.turns[1:], strict=False):
        assert after.scheduled_s == pytest.approx(before.end_s + turn.think_s)
        assert after.sent_s == pytest.approx(after.scheduled_s)


def test_nothing_is_sent_after_the_run_s_time_but_answers_are_awaited() -> None:
    plan = plan_with(Constant(0.5), Chat(turns=50.0, think_s=1.0))
    server = dispatched(plan, FakeServer(VirtualCrew(), takes_s=4.0))
    assert max(record.sent_s for record in server.records) < plan.seconds
    assert max(record.end_s for record in server.records) > plan.seconds
    assert {record.status for record in server.records} == {"ok"}


def test_who_is_refused_asks_no_more() -> None:
    plan = plan_with(Constant(0.001), Chat(turns=50.0, think_s=1.0), seconds=1000.5)
    server = dispatched(plan, FakeServer(VirtualCrew(), refuses=frozenset({1})))
    first = server.records[0].session
    assert [record.status for record in server.records if record.session == first] == ["ok", "refused"]


def test_a_run_that_is_ended_has_a_record_of_all_that_was_sent() -> None:
    server = dispatched(plan_with(Constant(1.0)), FakeServer(VirtualCrew(), takes_s=2.5), until=BEGAN + 5.2)
    assert [record.status for record in server.records].count("unfinished") == 3
    assert len(server.records) == len(server.asked)
    unfinished = [record for record in server.records if record.status == "unfinished"]
    assert all(len(record.token_s) == 1 and record.end_s == pytest.approx(5.0, abs=0.3) for record in unfinished)


def test_what_goes_wrong_within_a_session_is_not_swallowed() -> None:
    server = FakeServer(VirtualCrew())

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    server.post = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a bug"):
        dispatched(plan_with(Constant(1.0)), server)
    assert server.crew.now() < BEGAN + 1.5  # at once, not when all is sent


def test_users_of_a_closed_loop_stop_when_a_record_can_t_be_written() -> None:
    server = FakeServer(VirtualCrew())
    line = replace(server.line, on_record=full)
    plan = plan_with(Closed(users=2))
    dispatcher = Dispatcher(plan, 0, line, server.crew)
    dispatcher.prepare()
    with pytest.raises(OSError, match="full"):
        server.crew.run(lambda: dispatcher.run(BEGAN))
    assert len(server.asked) == 2


def full(_: object) -> None:
    raise OSError("full")


ONE_TURN = Session(3, 0.0, (SessionTurn((Piece(1, 5), Piece(2, 4)), 2, kind="short"),))
SYSTEM, FIRST, SECOND = Piece(1, 4), Piece(2, 3), Piece(3, 3)
TWO_TURNS = Session(4, 0.0, (SessionTurn((SYSTEM, FIRST), 2), SessionTurn((SECOND,), 2, think_s=1.0)))


def asked(plan: Plan, session: Session, *, asks_stages: bool = True) -> FakeServer:
    server = FakeServer(VirtualCrew())

    def talk() -> None:
        conversation = Conversation(plan, session, replace(server.line, asks_stages=asks_stages), server.crew)
        for _ in session.turns:
            conversation.prepare()
            conversation.send(server.crew.now(), 0.0)

    server.crew.run(talk)
    return server


def test_a_completion_has_the_pieces_token_ids_and_asks_for_exactly_the_planned_tokens() -> None:
    ((_, path, body),) = asked(PLAN, ONE_TURN).asked
    assert path == "/v1/completions"
    assert body == {
        "model": "m",
        "prompt": token_ids(ONE_TURN.turns[0].prompt, 4096),
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_stages": True,
    }


def test_other_servers_are_asked_nothing_but_what_the_plan_says() -> None:
    plan = msgspec.structs.replace(PLAN, prompts="text", ignore_eos=False, service_tier="gold")
    ((_, _, body),) = asked(plan, ONE_TURN, asks_stages=False).asked
    assert body.keys() == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options", "service_tier"}
    assert body["prompt"] == text(ONE_TURN.turns[0].prompt)


def test_a_chat_goes_on_from_the_server_s_own_answers() -> None:
    (_, path, first), (_, _, second) = asked(PLAN, TWO_TURNS).asked
    assert path == "/v1/chat/completions"
    assert first["messages"] == [
        {"role": "system", "content": text([SYSTEM])},
        {"role": "user", "content": text([FIRST])},
    ]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": "answer 0!"},
        {"role": "user", "content": text([SECOND])},
    ]


def test_a_chat_of_one_turn_is_a_chat() -> None:
    ((_, path, _),) = asked(msgspec.structs.replace(PLAN, workload=Chat()), ONE_TURN).asked
    assert path == "/v1/chat/completions"


def test_a_record_has_what_was_planned_and_what_came() -> None:
    (record,) = asked(PLAN, ONE_TURN).records
    assert (record.session, record.turn, record.kind, record.status) == (3, 0, "short", "ok")
    assert (record.planned_input_tokens, record.planned_output_tokens) == (9, 2)
    assert (record.input_tokens, record.output_tokens) == (7, 2)
    assert record.token_s == (0.0, 1.0)
    assert record.end_s == 1.0


def test_token_ids_of_an_unknown_vocabulary_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(LoadTestError, match="--vocabulary"):
        check_prompts(msgspec.structs.replace(PLAN, vocabulary=0))
