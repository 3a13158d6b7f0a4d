"""One attempt at scoring a prompt: its log-probabilities, its embedding. One worker of either role does it."""

import asyncio
import logging
from collections.abc import AsyncGenerator

from twostroke.protocol.errors import RequestError, TwostrokeError, WorkerFailed, WorkerLost
from twostroke.protocol.messages import Cancel
from twostroke.protocol.requests import GenerateRequest, TokenEvent, about
from twostroke.router.generate.attempt import AttemptDeps, out_of_time
from twostroke.router.request_state import AttemptLog, DecodeFailed, PromptScored, ScoreDone

_log = logging.getLogger(__name__)


class ScoreAttempt:
    """An attempt whose result comes with the call's reply; the token channel only tells that the worker lives."""

    def __init__(self, deps: AttemptDeps, log: AttemptLog, request: GenerateRequest):
        """Raises WorkerLost without a channel to the worker."""
        self._channels = deps.channels
        self._fleet = deps.fleet
        self._log = log
        self._request = request
        self._worker = log.attempt.path.decode.peer
        self._stream = deps.channels.subscribe(self._worker, request.request_id, max_tokens=1)

    async def events(self, time_left_s: float) -> AsyncGenerator[TokenEvent, None]:
        """Yield one PromptScored. Raises WorkerLost or RequestError."""
        call = asyncio.create_task(self._call())
        timer = asyncio.get_running_loop().call_later(time_left_s, self._stream.fail, out_of_time())
        try:
            yield await anext(self._stream)
        except (WorkerLost, RequestError) as error:
            self._log.emit(DecodeFailed(error))
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
            reply = await self._fleet.score_prompt(self._worker, self._request)
        except TwostrokeError as error:
            self._stream.fail(error)
        except Exception as error:
            _log.exception("the score call failed unexpectedly", extra=about(self._request.log_context))
            self._stream.fail(WorkerFailed(f"the score call failed: {type(error).__name__}"))
        else:
            event = reply.event
            self._log.emit(ScoreDone(self._log.clock(), reply))
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
