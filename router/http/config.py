"""Settings of the HTTP side of a router."""

from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import Field, StringConstraints

from twostroke.protocol.settings import Count, Section

Origin = Annotated[str, StringConstraints(pattern=r"^(\*|https?://[^/\s,*]+)$", max_length=256)]
"""Origin as a browser sends it: scheme, host and, unless it is the scheme's own, port; no path. `*` is any."""
Host = Annotated[str, StringConstraints(pattern=r"^(\*|[^/\s,*:]+)$", max_length=253, to_lower=True)]
"""Host name of a request, without the port. `*` is any."""


class HttpConfig(Section):
    """Settings of what a router takes from clients, and of the page."""

    max_body_mib: Annotated[float, Ge(0.001), Le(1024)] = 8.0
    """A request's body; a larger one is refused with status 413."""
    body_timeout_s: Annotated[float, Gt(0), Le(3600)] = 60.0
    """Seconds from a request's head to the end of its body; later ones are refused with status 408. Ray Serve's
    HAProxy drops clients that are silent for 90 s in any case."""
    send_timeout_s: Annotated[float, Gt(0), Le(3600)] = 60.0
    """A client that takes nothing of its answer for so long is given up, and its request ends as if it had left."""
    max_choices_in_flight: Count = 4096
    """Choices of one replica; more are refused with status 429 before they are tokenised: each takes memory here and
    places at workers."""
    max_response_items: Count = 2**20
    """Tokens and log-probabilities that a router holds for one response: choices times tokens times log-probabilities a
    token, some 130 to 280 bytes each. More are refused with status 400; streams hold those of prompts alone. A chat
    that sets no limit of tokens gets one that fits."""
    strict: bool = False
    """Refuse requests with fields that are not known (status 400), instead of serving them without these
    (docs/api.md#common-fields)."""
    page: bool = True
    """The page at `/`, to talk to the model and to see requests on their way (docs/start.md#the-page); `twostroke serve
    --no-page` turns it off."""
    cors_origins: tuple[Origin, ...] = Field(default=(), strict=False)
    """Origins, such as `https://chat.example.org`, whose pages may use the API from a browser; `"*"`: any page. Nobody
    else's browser is served (docs/start.md#other-sites-pages)."""
    hosts: tuple[Host, ...] = Field(default=(), strict=False)
    """Names, such as `llm.example.org`, that a server without API keys may be called by; `"*"`: any. Addresses, names
    without a dot, those under `.localhost`, `.local`, `.internal` and `.svc`, and the machine's own are known; another
    name may be one that somebody's page has lead here (docs/start.md#other-sites-pages). With API keys any name is
    taken."""
