"""What both of OpenAI's generation endpoints say alike: errors, usage, server-sent events."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from twostroke.protocol.errors import RequestError, TwostrokeError
from twostroke.router.observe.stages import Stages
from twostroke.router.openai.choices import Delta

encode_json = msgspec.json.Encoder().encode
INTERNAL_ERROR = RequestError("an internal error", code="internal_error", status=500)
DONE = b"data: [DONE]\n\n"


class PromptTokensDetails(msgspec.Struct):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class StageTimes(msgspec.Struct, omit_defaults=True):
    """`usage.stages`, our extension: a choice's time in seconds; stages that did not happen are left out."""

    admit_s: float | None = None
    ttft_s: float | None = None
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    decode_queue_s: float | None = None
    decode_s: float | None = None
    e2e_s: float | None = None
    resumes: int = 0
    preemptions: int = 0


class Usage(msgspec.Struct, omit_defaults=True):
    """`usage`, over all choices of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    stages: list[StageTimes] | None = None


def stage_times(stages: Stages) -> StageTimes:
    """A choice's stages as the response shows them."""
    return StageTimes(
        admit_s=stages.admit_s,
        ttft_s=stages.ttft_s,
        prefill_queue_s=stages.prefill_queue_s,
        prefill_s=stages.prefill_s,
        transfer_s=stages.transfer_s,
        decode_queue_s=stages.decode_queue_s,
        decode_s=stages.decode_s,
        e2e_s=stages.e2e_s,
        resumes=stages.resumes,
        preemptions=stages.num_preemptions,
    )


class Format(Protocol):
    """How one endpoint writes what choices bring. One object per response."""

    def opening(self, index: int) -> bytes | None:
        """An event before the first of choice `index`, if the endpoint has one."""

    def chunk(self, delta: Delta) -> bytes:
        """The event of one delta."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last event, where the client asked for usage."""

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        """The body of a response that is not streamed; `choices` are the deltas of each choice."""


def event(chunk: Any) -> bytes:
    """A server-sent event around the JSON of `chunk`."""
    return b"data: " + encode_json(chunk) + b"\n\n"


def joined(deltas: Iterable[Delta]) -> str:
    """The text of a whole choice."""
    return "".join(delta.text for delta in deltas)


class ErrorBody(msgspec.Struct):
    """What is wrong, for people and for programs."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorObject(msgspec.Struct):
    """OpenAI's error object."""

    error: ErrorBody


def error_object(error: TwostrokeError) -> ErrorObject:
    """OpenAI's error object. Only a RequestError's own words go out; others may speak of our insides."""
    if not isinstance(error, RequestError):
        text = "the server lost the workers of this request; try again"
        return ErrorObject(ErrorBody(text, "server_error", None, "worker_lost"))
    kind: Literal["invalid_request_error", "rate_limit_error", "server_error"] = "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status >= 500:
        kind = "server_error"
    return ErrorObject(ErrorBody(str(error), kind, error.param, error.code))


def error_status(error: TwostrokeError) -> int:
    """The HTTP status of an error."""
    return error.status if isinstance(error, RequestError) else 503
