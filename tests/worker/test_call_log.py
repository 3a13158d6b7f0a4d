"""The line that a worker logs of each call: one, whatever becomes of it, with what the router knows the request by."""

import asyncio
import json
import logging

import pytest

from tests.worker.worker_rig import ROUTER, Rig, a_request, begin, of_both_roles
from twostroke.model.step import BrokenLogits
from twostroke.protocol.errors import RequestError
from twostroke.protocol.messages import Cancel
from twostroke.protocol.requests import LogContext, ScoringParams
from twostroke.router.observe.log_format import JsonLines
from twostroke.worker import calls

CONTEXT = LogContext("a client's", "0af7651916cd43dd8448eb211c80319c", 0, 2, "prefill-0", "decode-0")


def told(caplog: pytest.LogCaptureFixture) -> tuple[str, dict[str, object]]:
    """The message of the one line of a call, and all its fields."""
    (line,) = [JsonLines({}).format(one) for one in caplog.records if one.name == calls.__name__]
    fields = json.loads(line)
    return fields["message"], fields


@of_both_roles()
async def test_a_call_that_is_done_makes_one_line_however_many_tokens_it_had(
    rig: Rig, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="twostroke")
    await rig.ask(a_request(max_tokens=12, log_context=CONTEXT))
    message, fields = told(caplog)
    assert message == f"{role} is done"
    assert {name: fields[name] for name in CONTEXT.fields()} == {
        "request_id": "a client's",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "choice": 0,
        "attempt": 2,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
    }
    assert fields["prompt_tokens"] == 10
    if role == "decode":
        assert (fields["finish_reason"], fields["output_tokens"]) == ("length", 12)
    else:
        assert fields["prefill_s"] == fields["e2e_s"] > 0


@of_both_roles()
@pytest.mark.parametrize("how", ["cancelled", "refused", "by the router", "router gone", "score"])
async def test_a_call_that_ends_otherwise_makes_one_line_too(
    rig: Rig, role: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="twostroke")
    if how == "score":
        await rig.worker.score_prompt(
            a_request(max_tokens=0, scoring=ScoringParams(pooling="last"), log_context=CONTEXT)
        )
    else:
        call = begin(rig.ask(a_request(60, log_context=CONTEXT, grammar="none here" if how == "refused" else "")))
        await asyncio.sleep(0.0015)
        match how:
            case "cancelled":
                call.cancel()
            case "by the router":
                rig.router.send(Cancel("r"))
            case "router gone":
                rig.fabric.cut(ROUTER)
        await asyncio.gather(call, return_exceptions=True)
    message, fields = told(caplog)
    expected = {
        "cancelled": f"{role} was cancelled",
        "refused": f"{role} failed: grammar_unsupported",
        "by the router": f"{role} was cancelled",
        "router gone": f"{role} failed: router {ROUTER} is gone",
        "score": "score is done",
    }
    assert (message, fields["request_id"]) == (expected[how], "a client's")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("the princess's whereabouts"), ""),
        (RequestError("Invalid type: the princess's", code="invalid_grammar"), ": invalid_grammar"),
    ],
)
def test_what_a_bug_or_a_wrong_request_says_is_not_told(
    error: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="twostroke")

    async def failing() -> None:
        raise error

    with pytest.raises(type(error), match="princess"):
        asyncio.run(calls.logged("decode", a_request(), lambda: 0.0, failing()))  # type: ignore[type-var]
    message, fields = told(caplog)
    assert (message, fields["error"]) == (f"decode failed{words}", type(error).__name__)


@pytest.mark.parametrize("error", [BrokenLogits("of the prompt"), RuntimeError("of the prompt")])
def test_what_a_request_alone_has_failed_of_names_the_request(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    calls.failed_alone(a_request(log_context=CONTEXT), error)
    message, fields = told(caplog)
    assert (fields["request_id"], fields["attempt"]) == ("a client's", 2)
    assert "of the prompt" not in message
