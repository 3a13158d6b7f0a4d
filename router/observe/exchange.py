"""One HTTP request from its first byte to the last of its answer, for the access log, for traces and for counters.

They take numbers and names from here, never a word of a prompt, an answer or a key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from twostroke.protocol.errors import TwostrokeError, public_error
from twostroke.protocol.requests import GenerateRequest
from twostroke.router.observe.stages import Stages

CLIENT_GONE = 499
"""The status in logs of a request whose client left before it was answered."""

EXCHANGE = "twostroke.exchange"
"""In the scope of a request: its Exchange."""


@dataclass(slots=True)
class Exchange:
    """Moments are the service's clock, in seconds."""

    request_id: str
    method: str
    path: str  # as asked for
    began: float
    headers: Mapping[str, str]  # of W3C trace context
    route: str | None = None  # as it is declared; None for an unknown path
    status: int = CLIENT_GONE
    ended: float = 0.0
    tenant: str | None = None  # the name of the API key that asks, where keys are configured
    code: str | None = None  # of the error that it was answered with, or that ended its stream
    refusal: TwostrokeError | None = None  # the error that it was answered with, where errors are counted
    is_stream: bool = False
    requests: Sequence[GenerateRequest] = field(default=())  # one for each choice
    stages: Sequence[Stages] = field(default=())  # likewise
    num_prompt_tokens: int = 0  # prompts count once, however many choices each has

    def fails(self, error: TwostrokeError) -> None:
        """The client is told of `error`."""
        self.code = public_error(error).code

    def refuses(self, error: TwostrokeError) -> None:
        """The client is answered with `error`, and it is counted."""
        self.fails(error)
        self.refusal = error

    def generates(
        self, requests: Sequence[GenerateRequest], stages: Sequence[Stages], num_prompt_tokens: int, *, is_stream: bool
    ) -> None:
        """The request has been understood; `stages` fill up on its way."""
        self.requests, self.stages = requests, stages
        self.num_prompt_tokens, self.is_stream = num_prompt_tokens, is_stream

    @property
    def num_output_tokens(self) -> int:
        """Of all choices."""
        return sum(stages.num_output_tokens for stages in self.stages)


def exchange_of(request: HTTPConnection) -> Exchange:
    """The exchange that the request is a part of. For an app with `Exchanges`."""
    exchange: Exchange = request.scope[EXCHANGE]
    return exchange
