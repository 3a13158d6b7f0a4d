"""What both of OpenAI's generation endpoints answer alike: errors, usage, server-sent events, and how they are written.

Answers are TypedDicts: FastAPI documents them, msgspec writes them.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NotRequired, cast

import msgspec
from typing_extensions import TypedDict

from twostroke.protocol.errors import RequestError, TwostrokeError, public_error
from twostroke.router.observe.stages import Stages
from twostroke.router.openai.choices import Delta
from twostroke.router.openai.jobs import Job
from twostroke.router.openai.schemas import GenerationFields
from twostroke.router.text.tokenizer import TextTokenizer

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class ErrorBody(TypedDict):
    """What is wrong, for people and for programs."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorObject(TypedDict):
    """OpenAI's error object."""

    error: ErrorBody


def internal_error() -> RequestError:
    """What the client of a bug is told."""
    return RequestError("an internal error", code="internal_error", status=500)


def error_object(error: TwostrokeError) -> ErrorObject:
    """What the client is told of `error`."""
    shown = public_error(error)
    kind: Literal["invalid_request_error", "rate_limit_error", "server_error"] = "invalid_request_error"
    if shown.status == 429:
        kind = "rate_limit_error"
    elif shown.status >= 500:
        kind = "server_error"
    return {"error": {"message": str(shown), "type": kind, "param": shown.param, "code": shown.code}}


class PromptTokensDetails(TypedDict):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class StageTimes(TypedDict, total=False):
    """`usage.stages`, our extension: a choice's time in seconds; stages that did not happen are left out."""

    admit_s: float
    ttft_s: float
    prefill_queue_s: float
    prefill_s: float
    transfer_s: float
    decode_queue_s: float
    decode_s: float
    e2e_s: float
    resumes: int
    preemptions: int


class Usage(TypedDict):
    """`usage`, over all choices of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    stages: NotRequired[list[StageTimes]]


def stage_times(stages: Stages) -> StageTimes:
    """A choice's stages as the response shows them."""
    times = {name: getattr(stages, name) for name in StageTimes.__annotations__ if name.endswith("_s")}
    counts = {"resumes": stages.resumes, "preemptions": stages.num_preemptions}
    told = {name: seconds for name, seconds in times.items() if seconds is not None}
    return cast(StageTimes, told | {name: count for name, count in counts.items() if count})


class Format(ABC):
    """How one endpoint writes what choices bring. One object per response, which makes up the response's id."""

    id_prefix: ClassVar[str]

    def __init__(
        self,
        asked: GenerationFields,
        jobs: Sequence[Job],
        tokenizer: TextTokenizer,
        *,
        model: str,
        created: int,
        service_tier: str | None = None,
    ):
        """`created`: seconds since 1970. `service_tier`: the request's SLO class, where there is something to tell."""
        self._jobs = jobs
        self._tokenizer = tokenizer
        self._return_token_ids = bool(asked.return_token_ids)
        self._usage_in_chunks = asked.includes_usage  # null but for the last one, as in OpenAI's
        self._head = {"id": f"{self.id_prefix}-{secrets.token_hex(12)}", "created": created, "model": model}
        if service_tier is not None:
            self._head["service_tier"] = service_tier
        self._opened: set[int] = set()  # the choices that have had an event

    def events(self, delta: Delta, usage: Usage | None = None) -> bytes:
        """The server-sent events of one delta, with `usage` so far where it is given; empty where it tells nothing yet.

        Half a character, or what may begin a stop string, is no news.
        """
        if not (delta.text or delta.shown or delta.finish_reason or self._return_token_ids):
            return b""
        return self._event([self._part(delta)], usage)

    def usage_event(self, usage: Usage) -> bytes:
        """The last event, where the client asked for usage."""
        return self._event([], usage)

    @abstractmethod
    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        """The body of a response that is not streamed; `choices` are the deltas of each choice."""

    @abstractmethod
    def _part(self, delta: Delta) -> Mapping[str, Any]:
        """What a delta adds to its choice."""

    @abstractmethod
    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One event of a stream, without usage."""

    def _event(
        self, choices: Sequence[Mapping[str, Any]], usage: Usage | None, more: Mapping[str, Any] | None = None
    ) -> bytes:
        chunk = {**self._chunk(choices), **(more or {})}
        if usage is not None or self._usage_in_chunks:
            chunk["usage"] = usage
        return event(chunk)

    def _has_logprobs(self, index: int) -> bool:
        return self._jobs[index].request.sampling.logprobs is not None


def event(chunk: Any) -> bytes:
    """A server-sent event around the JSON of `chunk`."""
    return b"data: " + encode_json(chunk) + b"\n\n"


def joined(deltas: Iterable[Delta]) -> str:
    """The text of a whole choice."""
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: Iterable[Delta]) -> list[int]:
    """The tokens of a whole choice."""
    return [token_id for delta in deltas for token_id in delta.token_ids]
