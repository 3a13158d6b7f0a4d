"""The line that a worker logs of each call when it has ended, and of what a request alone has failed of.

One line a call, never one a token. No line has a word of a prompt or an answer.
"""

import logging
import traceback
from collections.abc import Awaitable
from typing import Any, TypeVar

from twostroke.model.step import BrokenLogits
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import CallCancelled, RequestError, TwostrokeError, loggable
from twostroke.protocol.requests import DecodeReply, GenerateRequest, PrefillReply, about

_log = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT", PrefillReply, DecodeReply)

_TOLD = ("finish_reason", "num_output_tokens", "num_cached_tokens", "queue_s", "prefill_s", "transfer_s")
"""The fields of replies that a line has."""


async def logged(call: str, request: GenerateRequest, clock: Clock, reply: Awaitable[ReplyT]) -> ReplyT:
    """Await the reply to a call, and log how it ended."""
    if not _log.isEnabledFor(logging.INFO):
        return await reply
    began, outcome = clock(), "was cancelled"
    told: dict[str, Any] = {}
    try:
        answer = await reply
        outcome = "was cancelled" if getattr(answer, "finish_reason", "") is None else "is done"
        found = {name: getattr(answer, name, None) for name in _TOLD}
        told = {name.removeprefix("num_"): _shown(value) for name, value in found.items() if value is not None}
        return answer
    except CallCancelled:
        raise
    except Exception as error:
        # The words of other errors may be private.
        outcome = f"failed: {loggable(error)}" if isinstance(error, TwostrokeError) else "failed"
        told = {"error": type(error).__name__}
        raise
    finally:
        numbers = {"prompt_tokens": request.num_prompt_tokens, "e2e_s": _shown(clock() - began)}
        _log.info("%s %s", call, outcome, extra=about(request.log_context, **numbers, **told))


def _shown(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def failed_alone(request: GenerateRequest, error: BaseException) -> RequestError:
    """Log what one request has failed of; returns what its client is told. The error's own words may be the prompt's,
    and go nowhere."""
    extra = about(request.log_context)
    if isinstance(error, BrokenLogits):
        _log.error("a request has failed: its logits were NaN or infinite", extra=extra)
        return RequestError("the model's logits were no numbers on this worker", code="broken_logits", status=503)
    name = type(error).__name__
    where = "".join(traceback.format_tb(error.__traceback__))
    _log.error("a request has failed alone: %s\n%s", name, where, extra=extra)
    return RequestError(f"the server failed to compute this request ({name})", code="request_failed", status=500)
