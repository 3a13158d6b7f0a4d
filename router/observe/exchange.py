"""One HTTP request from its first byte to the last of its answer, for the access log and for traces.

Both take numbers and names from here, never a word of a prompt, an answer or a key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from twostroke.protocol.errors import TwostrokeError
from twostroke.router.observe.stages import Stages
from twostroke.router.openai.common import error_object
from twostroke.router.openai.jobs import Job

CLIENT_GONE = 499
"""The status in logs of a request whose client left before it was answered."""


EXCHANGE = "twostroke.exchange"
"""In the scope of a request: its Exchange, where there is a service."""


@dataclass(slots=True)
class Exchange:
    """Moments are the service's clock, in seconds."""

    request_id: str
    method: str
    path: str  # as asked for
    began: float
    headers: Mapping[str, str]  # of W3C trace context
    route: str | None = None  # as in OPERATIONS; None for an unknown path
    status: int = CLIENT_GONE
    ended: float = 0.0
    tenant: str | None = None  # the name of the API key that asks, where keys are configured
    code: str | None = None  # of the error that it was answered with, or that ended its stream
    is_stream: bool = False
    jobs: Sequence[Job] = field(default=())
    stages: Sequence[Stages] = field(default=())  # of each job

    def fails(self, error: TwostrokeError) -> None:
        """The client is told of `error`."""
        self.code = error_object(error).error.code

    def generates(self, jobs: Sequence[Job], stages: Sequence[Stages], *, is_stream: bool) -> None:
        """The request has been understood; `stages` fill up on its way."""
        self.jobs, self.stages, self.is_stream = jobs, stages, is_stream

    def prompt_tokens(self) -> int:
        """Prompts count once, however many choices each has."""
        return sum({job.group: job.request.num_prompt_tokens for job in self.jobs}.values())

    def output_tokens(self) -> int:
        """Of all choices."""
        return sum(stages.num_output_tokens for stages in self.stages)


def exchange_of(request: Request) -> Exchange:
    """The exchange that the request is a part of. For an app with `Exchanges`, whose service is there."""
    exchange: Exchange = request.scope[EXCHANGE]
    return exchange
