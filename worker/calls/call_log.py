"""The log line of each call that has ended, and of a request that failed alone.

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

_LOGGED_FIELDS = ("finish_reason", "num_output_tokens", "num_cached_tokens", "queue_s", "prefill_s", "transfer_s")
"""The fields of replies that stand in the log line."""


async def logged(call: str, request: GenerateRequest, clock: Clock, reply: Awaitable[ReplyT]) -> ReplyT:
    """Await the reply to a call, and log how it ended."""
    if not _log.isEnabledFor(logging.INFO):
        return await reply
    began, outcome = clock(), "was cancelled"
    fields: dict[str, Any] = {}
    try:
        answer = await reply
        outcome = "was cancelled" if getattr(answer, "finish_reason", "") is None else "is done"
        found = {name: getattr(answer, name, None) for name in _LOGGED_FIELDS}
        fields = {name.removeprefix("num_"): _rounded(value) for name, value in found.items() if value is not None}
        return answer
    except CallCancelled:
        raise
    except Exception as error:
        # The messages of other errors may be private.
        outcome = f"failed: {loggable(error)}" if isinstance(error, TwostrokeError) else "failed"
        fields = {"error": type(error).__name__}
        raise
    finally:
        numbers = {"prompt_tokens": request.num_prompt_tokens, "e2e_s": _rounded(clock() - began)}
        _log.info("%s %s", call, outcome, extra=about(request.log_context, **numbers, **fields))


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def failed_alone(request: GenerateRequest, error: BaseException) -> RequestError:
    """Log why one request has failed, and return the error for its client.

    The error's own message may quote the prompt, and is neither logged nor returned.
    """
    extra = about(request.log_context)
    if isinstance(error, BrokenLogits):
        _log.error("a request has failed: its logits were NaN or infinite", extra=extra)
        return RequestError("the model's logits were no numbers on this worker", code="broken_logits", status=503)
    name = type(error).__name__
    where = "".join(traceback.format_tb(error.__traceback__))
    _log.error("a request has failed alone: %s\n%s", name, where, extra=extra)
    return RequestError(f"the server failed to compute this request ({name})", code="request_failed", status=500)
