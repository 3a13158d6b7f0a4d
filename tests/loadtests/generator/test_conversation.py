"""What a session's requests say."""

from dataclasses import replace

import msgspec
import pytest

from tests.loadtests.generator.fake_server import FakeServer
from tests.loadtests.generator.virtual_crew import VirtualCrew
from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.conversation import Conversation, check_prompts
from twostroke.loadtests.plan import SLO, Chat, Fixed, Piece, Plan, Poisson, Session, Turn
from twostroke.loadtests.workloads.prompts import text, token_ids

PLAN = Plan(
    url="http://nowhere",
    model="m",
    max_context=4096,
    arrivals=Poisson(1.0),
    workload=Fixed(5, 2),
    slo=SLO(),
    seconds=10.0,
    vocabulary=4096,
)
ONE_TURN = Session(3, 0.0, (Turn((Piece(1, 5), Piece(2, 4)), 2, kind="short"),))
SYSTEM, FIRST, SECOND = Piece(1, 4), Piece(2, 3), Piece(3, 3)
TWO_TURNS = Session(4, 0.0, (Turn((SYSTEM, FIRST), 2), Turn((SECOND,), 2, think_s=1.0)))


def asked(plan: Plan, session: Session) -> FakeServer:
    server = FakeServer(VirtualCrew())

    def talk() -> None:
        conversation = Conversation(plan, session, server.line)
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
    server = FakeServer(VirtualCrew())
    plan = msgspec.structs.replace(PLAN, prompts="text", ignore_eos=False, service_tier="gold")
    conversation = Conversation(plan, ONE_TURN, replace(server.line, asks_stages=False))

    def talk() -> None:
        conversation.prepare()
        conversation.send(0.0, 0.0)

    server.crew.run(talk)
    body = server.asked[0][2]
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
