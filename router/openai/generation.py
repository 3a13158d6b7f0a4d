"""One response under way: its choices, from tokens to text, and written as server-sent events or as one body.

`Generation` runs the jobs of a request side by side (`run_choices`), each by `ChoiceRunner.deltas`.
"""

import asyncio
import logging
import secrets
import string
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TwostrokeError, loggable
from twostroke.protocol.requests import FinishReason, TokenEvent, about
from twostroke.router.generate.pipeline import Pipeline
from twostroke.router.observe.metrics import Outcome, RouterMetrics
from twostroke.router.observe.request_log import RequestLog
from twostroke.router.openai.answers import (
    CachedTokensDetails,
    ChoiceDelta,
    ResponseWriter,
    StreamWriter,
    ToolCallDelta,
    Usage,
    internal_error,
    stage_times,
)
from twostroke.router.openai.embeddings import EmbeddingRequest
from twostroke.router.openai.schemas import MAX_CHOICES, GenerationFields
from twostroke.router.openai.scoring import ShownToken, echoed, prompt_logprobs
from twostroke.router.request_state import ChatParsing, ChoiceJob, PromptScored, PromptToScore, RequestState
from twostroke.router.slo.admission import Admission, Overloaded
from twostroke.router.slo.classes import Demand, SLOVerdict, verdict_of
from twostroke.router.text.prediction import PredictedTokens
from twostroke.router.text.response_parser import Parsed
from twostroke.router.text.tokenizer import StopStrings, TextTokenizer, new_detokenizer

_log = logging.getLogger(__name__)

MAX_QUEUED_DELTAS = 256

_CALL_ID_CHARS = string.ascii_letters + string.digits


@dataclass
class ChoiceRunner:
    """Runs single choices, and counts their results. One object per router."""

    tokenizer: TextTokenizer
    pipeline: Pipeline
    metrics: RouterMetrics
    demand: Demand
    admission: Admission
    clock: Clock

    async def deltas(self, state: RequestState) -> AsyncGenerator[ChoiceDelta, None]:
        """One choice, from tokens to text; always `aclose` it. Raises what `Pipeline.generate` raises."""
        writer, request = ChoiceWriter(state, self.tokenizer), state.request
        outcome: Outcome = "abort"
        verdict: SLOVerdict | None = None
        last: float | None = None
        self.metrics.begun(request)
        self.demand.arrived(request)
        try:
            prompt = state.job.prompt
            generated = self.pipeline.generate(state) if prompt is None else self._score_first(state, prompt)
            async with aclosing(generated) as events:
                async for event in events:
                    now = self.clock()
                    if last is not None:
                        self.metrics.inter_token_latency.observe(now - last)
                    last = now
                    # A prompt may have tens of thousands of tokens, for which no stream is to stand still.
                    is_scored = isinstance(event, PromptScored)
                    delta = await asyncio.to_thread(writer.add, event) if is_scored else writer.add(event)
                    if delta.finish_reason is not None:
                        outcome = "length" if delta.finish_reason == "length" else "stop"
                        if outcome == "stop":
                            state.stop(writer.num_tokens, now)
                    yield delta
                    if delta.finish_reason is not None and event.finish_reason is None:
                        break  # a stop string: the workers learn of it by closing
            verdict = verdict_of(request.promise, state.ttft_s, state.tpot_s)
            self.admission.ended(request, state.num_output_tokens, state.predicted, state.tpot_s)
        except Exception as error:  # bugs, too; a client that leaves is none
            outcome, verdict = "error", "missed"
            if isinstance(error, Overloaded):
                verdict = "refused"
                self.metrics.overloaded(request, error.limit)
            raise
        finally:
            self.metrics.ended(state, outcome, verdict)
            if outcome != "error":
                self.demand.ended(state.num_cached_tokens, state.num_output_tokens)

    async def _score_first(self, state: RequestState, prompt: PromptToScore) -> AsyncGenerator[TokenEvent, None]:
        """Yield the prompt's scores, then the choice's tokens where there are to be any; always `aclose` it."""
        is_all = state.request.scoring is not None
        if prompt.scored is None:  # else another choice of the prompt has had it scored
            scoring = state
            if not is_all:
                job = ChoiceJob(prompt.request, state.job.index)
                scoring = state.scoring = RequestState(job, state.arrive, state.log_context, state.follows)
            async with aclosing(self.pipeline.generate(scoring)) as events:
                async for event in events:
                    assert isinstance(event, PromptScored)
                    prompt.scored = event
        elif is_all:
            state.add_tokens(prompt.scored, self.clock())
        assert prompt.scored is not None
        if is_all:
            yield prompt.scored
            return
        yield msgspec.structs.replace(prompt.scored, finish_reason=None)
        async with aclosing(self.pipeline.generate(state)) as events:
            async for event in events:
                yield event


class ChoiceWriter:
    """Writes one choice's text. The token that stopped it is counted, but has neither text nor log-probability."""

    def __init__(self, state: RequestState, tokenizer: TextTokenizer):
        self._state = state
        self._job = job = state.job
        self._tokenizer = tokenizer
        self._text = new_detokenizer(tokenizer, shows_special=job.shows_special)
        self._stops = StopStrings(job.stop, job.shows_stop)
        self.num_tokens = 0
        """Tokens of the choice so far, the one that stopped it included."""
        self._num_chars = len(job.echo)  # of the text with nothing held back
        self._chat = None if job.chat is None else _ChatText(job.chat)
        self._predicted = PredictedTokens(job.request.prediction) if job.request.prediction else None

    @property
    def _is_over(self) -> bool:
        return self._chat is not None and self._chat.is_over

    def add(self, event: TokenEvent) -> ChoiceDelta:
        """The text of an event's tokens. A finish reason in the delta ends the choice, whatever may still come."""
        stopped_by_token = event.finish_reason == "stop" and bool(event.tokens)
        last = len(event.tokens) - 1
        text = ""
        token_ids: list[int] = []
        shown: list[ShownToken] = []
        scores = event.scores if isinstance(event, PromptScored) else None
        if scores is not None and self._job.echoes_logprobs:
            alternatives = self._job.request.sampling.logprobs or 0
            shown += echoed(scores, self._job.request.token_ids, alternatives, self._tokenizer, self._job.echo)
        for i, token in enumerate(event.tokens):
            token_ids.append(token.token_id)
            self.num_tokens += 1
            if self._predicted is not None:
                self._predicted.add(token.token_id)
            is_end = stopped_by_token and i == last
            # Where the prompt's are shown, too, harnesses count on one for each token.
            if self._job.request.sampling.logprobs is not None and (self._job.echoes_logprobs or not is_end):
                shown.append(ShownToken(token, self._num_chars))
            if is_end:
                break
            text += self._visible(self._read(token.token_id))
            if self._stops.stopped or self._is_over:
                break
        finish: FinishReason | Literal["tool_calls"] | None = event.finish_reason
        if finish is not None and not self._stops.stopped:
            text += self._visible(self._rest(is_cut=finish == "length"))
            text += self._stops.flush()
        if self._stops.stopped or self._is_over:
            finish = "stop"
        if self._predicted is not None:
            self._state.num_predicted = self._predicted.num_accepted
            self._state.num_mispredicted = self._predicted.num_rejected
        delta = ChoiceDelta(
            self._job.index, text, tuple(token_ids), tuple(shown), finish, stop_string=self._stops.found
        )
        if isinstance(event, PromptScored):
            found = None
            if scores is not None and self._job.prompt_logprobs is not None:
                found = prompt_logprobs(scores, self._job.request.token_ids, self._job.prompt_logprobs, self._tokenizer)
            delta = msgspec.structs.replace(delta, prompt_logprobs=found, embedding=event.embedding)
        if self._chat is None:
            return delta
        if finish == "stop" and self._chat.has_called:
            finish = "tool_calls"
        reasoning, calls = self._chat.drain()
        self._state.num_unparsed = self._chat.num_unparsed
        return msgspec.structs.replace(delta, finish_reason=finish, reasoning=reasoning, tool_calls=calls)

    def _read(self, token_id: int) -> str:
        """Return the text that a token adds, or, of a chat, the content."""
        text = self._text.add(token_id)
        if self._chat is None:
            return text
        was_reasoning = self._chat.is_reasoning
        if self._tokenizer.is_special(token_id):
            content = self._chat.add(self._text.flush())  # no character goes on beyond it
            content += self._chat.add(self._tokenizer.piece(token_id).text, is_control=True)
        else:
            content = self._chat.add(text)
        self._state.num_reasoning_tokens += was_reasoning or self._chat.is_reasoning
        return content

    def _rest(self, *, is_cut: bool) -> str:
        text = self._text.flush()
        return text if self._chat is None else self._chat.add(text) + self._chat.finish(is_cut=is_cut)

    def _visible(self, text: str) -> str:
        self._num_chars += len(text)
        if self.num_tokens <= self._job.request.min_tokens:
            return text  # no stop string counts before that
        return self._stops.add(text)


class _ChatText:
    """Reasoning and tool calls of a chat's answer, collected until they are drained."""

    def __init__(self, how: ChatParsing):
        self._parser = how.parser()
        self._includes_reasoning = how.includes_reasoning
        self._reasoning = ""
        self._calls: list[ToolCallDelta] = []
        self.has_called = False

    def add(self, text: str, *, is_control: bool = False) -> str:
        """The content that `text` adds."""
        return self._take(self._parser.add(text, is_control=is_control)) if text else ""

    @property
    def is_reasoning(self) -> bool:
        """Return whether the next text is reasoning."""
        return self._parser.is_reasoning

    @property
    def is_over(self) -> bool:
        """True when the answer has the only call that it may have."""
        return self._parser.is_over

    @property
    def num_unparsed(self) -> int:
        """Regions that look like calls and could not be parsed."""
        return self._parser.num_unparsed

    def finish(self, *, is_cut: bool) -> str:
        """The content that was held back."""
        return self._take(self._parser.finish(is_cut=is_cut))

    def drain(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Return the reasoning and calls since the last call of this method."""
        found = self._reasoning, tuple(self._calls)
        self._reasoning, self._calls = "", []
        return found

    def _take(self, parsed: Parsed) -> str:
        if self._includes_reasoning:
            self._reasoning += parsed.reasoning
        for call in parsed.calls:
            call_id = _call_id() if call.name else ""
            self._calls.append(ToolCallDelta(call.index, call_id, call.name, call.arguments))
            self.has_called = True
        return parsed.content


def _call_id() -> str:
    """Nine letters and digits: Mistral's templates take no others."""
    return "".join(secrets.choice(_CALL_ID_CHARS) for _ in range(9))


Generate = Callable[[RequestState], AsyncGenerator[ChoiceDelta, None]]


def run_choices(choices: Sequence[RequestState], generate: Generate) -> AsyncGenerator[ChoiceDelta, None]:
    """The deltas of all choices as they come; always `aclose` it.

    The first choice of each prompt gets its first token before the others start: they then find the prompt in the
    prefix cache. The first failure ends all.
    """
    return generate(choices[0]) if len(choices) == 1 else _run_together(choices, generate)


async def _run_together(choices: Sequence[RequestState], generate: Generate) -> AsyncGenerator[ChoiceDelta, None]:
    queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(MAX_QUEUED_DELTAS)
    prompt_done = {one.job.group: asyncio.Event() for one in choices}
    leaders = {one.job.group: one for one in reversed(choices)}
    places = asyncio.Semaphore(MAX_CHOICES)

    async def run(choice: RequestState) -> None:
        """Put the choice's deltas into the queue, then None, or what it failed with."""
        done = prompt_done[choice.job.group]
        if choice is not leaders[choice.job.group]:
            await done.wait()
        try:
            async with places, aclosing(generate(choice)) as deltas:
                async for delta in deltas:
                    done.set()
                    await queue.put(delta)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(run(one)) for one in choices]
    try:
        num_running = len(tasks)
        while num_running:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                num_running -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Generation:
    """Runs the jobs of one request and writes them in the endpoint's format; `log` keeps their records."""

    def __init__(
        self,
        runner: ChoiceRunner,
        body: GenerationFields | EmbeddingRequest,
        jobs: Sequence[ChoiceJob],
        writer: ResponseWriter,
        log: RequestLog,
    ):
        self._runner = runner
        self._body = body
        self._writer = writer
        self._log = log
        # A response is judged once, since half of one is useless: by its longest prompt, which is the latest.
        judged = max(jobs, key=lambda job: job.request.num_prompt_tokens)
        self._choices = [RequestState(job, log.began, log.log_context(job.index), job is not judged) for job in jobs]
        log.generates(self._choices, is_stream=bool(body.stream))

    @property
    def most_tokens(self) -> int:
        """Most tokens that all choices may use, prompts included."""
        return self._log.num_prompt_tokens + sum(one.request.max_tokens for one in self._choices)

    def used_tokens(self) -> int:
        """Return the tokens used so far: outputs, and the prompts of choices that were begun."""
        begun = any(one.all_attempts for one in self._choices)
        return (self._log.num_prompt_tokens if begun else 0) + self._log.num_output_tokens

    async def whole(self) -> bytes:
        """The body of the response. Raises TwostrokeError where a choice fails."""
        choices: list[list[ChoiceDelta]] = [[] for _ in self._choices]
        async with aclosing(run_choices(self._choices, self._runner.deltas)) as deltas:
            async for delta in deltas:
                choices[delta.index].append(delta)
        if any(one.job.prompt is not None for one in self._choices):  # megabytes, for which no stream is to stand still
            return await asyncio.to_thread(self._writer.whole, choices, self._usage())
        return self._writer.whole(choices, self._usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; always `aclose` it.

        Fails like `whole` before the first event. Later, the stream ends with the format's failure.
        """
        body, writer = self._body, self._writer
        if isinstance(body, EmbeddingRequest) or not isinstance(writer, StreamWriter):
            raise TypeError("this endpoint does not stream")
        began, in_chunks = False, body.has_usage_in_every_chunk
        try:
            async with aclosing(run_choices(self._choices, self._runner.deltas)) as deltas:
                async for delta in deltas:
                    written = writer.events(delta, self._usage() if in_chunks else None)
                    if written:
                        began = True
                        yield written
        except Exception as error:
            if not began:
                raise
            yield writer.failure(self._failed(error))
            return
        yield writer.ending(self._usage())

    def _failed(self, error: Exception) -> TwostrokeError:
        """Log `error`, and return what the client of a stream that has begun is told."""
        is_one = len(self._choices) == 1  # else it is not known here whose failure it was
        extra = about(self._choices[0].log_context if is_one else self._log.log_context())
        if isinstance(error, TwostrokeError):
            _log.warning("a stream failed after it had begun: %s", loggable(error), extra=extra)
        else:
            _log.error("a stream met a bug after it had begun", exc_info=error, extra=extra)
            error = internal_error()
        self._log.fails(error)
        return error

    def _usage(self) -> Usage:
        """Return the usage so far."""
        num_prompt_tokens, num_output_tokens = self._log.num_prompt_tokens, self._log.num_output_tokens
        usage: Usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": (num_cached := self._log.num_cached_tokens)},
        }
        if num_tier := self._log.num_tier_tokens:
            by_place: CachedTokensDetails = {"memory": num_cached - num_tier, "tiers": num_tier}
            usage["prompt_tokens_details"]["cached_tokens_details"] = by_place
        if any(one.job.chat is not None and one.job.chat.opened.has_reasoning for one in self._choices):
            num_reasoning_tokens = sum(one.num_reasoning_tokens for one in self._choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
        if any(one.request.prediction for one in self._choices):
            details = usage.setdefault("completion_tokens_details", {})
            details["accepted_prediction_tokens"] = sum(one.num_predicted for one in self._choices)
            details["rejected_prediction_tokens"] = sum(one.num_mispredicted for one in self._choices)
        if self._body.return_stages:
            usage["stages"] = [stage_times(one) for one in self._choices]
        return usage
