"""One try of a prompt that is read alone: its log-probabilities, its embedding. One worker does it, of either role."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

from twostroke.protocol.errors import RequestError, TwostrokeError, WorkerFailed, WorkerLost
from twostroke.protocol.log_context import about
from twostroke.protocol.messages import Cancel
from twostroke.protocol.requests import GenerateRequest, PromptScores, TokenEvent
from twostroke.router.generate.attempt import AttemptDeps, AttemptObserver, out_of_time

_log = logging.getLogger(__name__)


class PromptScored(TokenEvent, frozen=True, array_like=True):
    """All that a prompt's reading gives, with the one token after it where that is wanted."""

    scores: PromptScores | None = None
    embedding: bytes = b""  # as in PrefillReply


class ScoreAttempt:
    """One try. The worker's token channel tells only that it lives: what it has to say comes with the call's reply."""

    def __init__(self, around: AttemptDeps, request: GenerateRequest, progress: AttemptObserver):
        """As Attempt. Raises WorkerLost without a channel."""
        self._channels = around.channels
        self._fleet = around.fleet
        self._request = request
        self._progress = progress
        self._worker = progress.path.decode.peer
        self._stream = around.channels.subscribe(self._worker, request.request_id, max_tokens=1)

    async def events(self, sent: Sequence[int], time_left_s: float) -> AsyncGenerator[TokenEvent, None]:
        """As Attempt.events: one, a PromptRead. Nothing is ever `sent` before."""
        call = asyncio.create_task(self._call())
        timer = asyncio.get_running_loop().call_later(time_left_s, self._stream.fail, out_of_time())
        try:
            yield await anext(self._stream)
        except (WorkerLost, RequestError) as error:
            self._progress.decode_failed(error)
            raise
        finally:
            timer.cancel()
            self._stream.close()
            if not call.done():
                self._channels.send(self._worker, Cancel(self._request.request_id))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _call(self) -> None:
        try:
            reply = await self._fleet.read(self._worker, self._request)
        except TwostrokeError as error:
            self._stream.fail(error)
        except Exception as error:
            _log.exception("the read call failed unexpectedly", extra=about(self._request.log_context))
            self._stream.fail(WorkerFailed(f"the read call failed: {type(error).__name__}"))
        else:
            event = reply.event
            self._progress.read(self._request, reply)
            self._stream.push(
                PromptScored(
                    event.request_id,
                    event.index,
                    event.tokens,
                    event.finish_reason,
                    scores=reply.scores,
                    embedding=reply.embedding,
                )
            )
