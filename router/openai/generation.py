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
from twostroke.router.generate.score import PromptScored
from twostroke.router.observe.access_log import HttpExchange
from twostroke.router.observe.metrics import Outcome, RouterMetrics
from twostroke.router.observe.stages import SequenceStages
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
from twostroke.router.openai.jobs import ChatParsing, ChoiceJob, PromptToScore
from twostroke.router.openai.schemas import MAX_CHOICES, GenerationFields
from twostroke.router.openai.scoring import ShownToken, echoed, prompt_logprobs
from twostroke.router.slo.admission import Admission, Overloaded
from twostroke.router.slo.attainment import SLOVerdict, verdict_of
from twostroke.router.slo.demand import Demand
from twostroke.router.text.detokenizer import StopStrings, new_detokenizer
from twostroke.router.text.prediction import PredictedTokens
from twostroke.router.text.response_parser import Parsed
from twostroke.router.text.tokenizer import TextTokenizer

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

    async def deltas(self, job: ChoiceJob, stages: SequenceStages) -> AsyncGenerator[ChoiceDelta, None]:
        """One choice, from tokens to text; always `aclose` it. Raises what `Pipeline.generate` raises."""
        writer = ChoiceWriter(job, self.tokenizer)
        outcome: Outcome = "abort"
        verdict: SLOVerdict | None = None
        last: float | None = None
        self.metrics.begun(job.request)
        self.demand.arrived(job.request)
        try:
            if job.prompt is None:
                generated = self.pipeline.generate(job.request, stages)
            else:
                generated = self._score_first(job, job.prompt, stages)
            async with aclosing(generated) as events:
                async for event in events:
                    now = self.clock()
                    if last is not None:
                        self.metrics.inter_token_latency.observe(now - last)
                    last = now
                    # A prompt may have tens of thousands of tokens, for which no stream is to stand still.
                    is_scored = isinstance(event, PromptScored)
                    delta = await asyncio.to_thread(writer.add, event) if is_scored else writer.add(event)
                    stages.num_reasoning_tokens, stages.num_unparsed = writer.num_reasoning_tokens, writer.num_unparsed
                    if writer.predicted is not None:
                        stages.num_predicted = writer.predicted.num_accepted
                        stages.num_mispredicted = writer.predicted.num_rejected
                    if delta.finish_reason is not None:
                        outcome = "length" if delta.finish_reason == "length" else "stop"
                        stages.finish_reason = outcome
                        # A stop string ends the choice here, whatever the workers had sent beyond it.
                        stages.finish = now
                        stages.num_output_tokens = writer.num_tokens
                    yield delta
                    if delta.finish_reason is not None and event.finish_reason is None:
                        break  # a stop string: the workers learn of it by closing
            verdict = verdict_of(job.request.promise, stages.ttft_s, stages.tpot_s)
            self.admission.ended(job.request, stages.num_output_tokens, stages.predicted, stages.tpot_s)
        except Exception as error:  # bugs, too; a client that leaves is none
            outcome, verdict = "error", "missed"
            if isinstance(error, Overloaded):
                verdict = "refused"
                self.metrics.overloaded(job.request, error.limit)
            raise
        finally:
            self.metrics.ended(job.request, stages, outcome, verdict)
            if outcome != "error":
                self.demand.ended(stages.num_cached_tokens, stages.num_output_tokens)

    async def _score_first(
        self, job: ChoiceJob, prompt: PromptToScore, stages: SequenceStages
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the prompt's scores, then the choice's tokens where there are to be any; always `aclose` it."""
        is_all = job.request.max_tokens == prompt.request.max_tokens
        scoring = (
            stages if is_all else SequenceStages(stages.arrive, follows=stages.follows, log_context=stages.log_context)
        )
        if prompt.scored is None:  # else another choice of the prompt has had it scored
            async with aclosing(self.pipeline.generate(prompt.request, scoring)) as events:
                async for event in events:
                    assert isinstance(event, PromptScored)
                    prompt.scored = event
        assert prompt.scored is not None
        if is_all:
            yield prompt.scored
            return
        yield msgspec.structs.replace(prompt.scored, finish_reason=None)
        stages.follows = stages.follows or scoring.attempts > 0
        async with aclosing(self.pipeline.generate(job.request, stages)) as events:
            async for event in events:
                yield event
        if scoring.attempts:  # tokens were cached later because scoring had computed them
            stages.num_cached_tokens, stages.num_tier_tokens = scoring.num_cached_tokens, scoring.num_tier_tokens
            stages.tries[:0] = scoring.tries


class ChoiceWriter:
    """Writes one choice's text. The token that stopped it is counted, but has neither text nor log-probability."""

    def __init__(self, job: ChoiceJob, tokenizer: TextTokenizer):
        self._job = job
        self._tokenizer = tokenizer
        self._text = new_detokenizer(tokenizer, shows_special=job.shows_special)
        self._stops = StopStrings(job.stop, job.shows_stop)
        self.num_tokens = 0
        """Tokens of the choice so far, the one that stopped it included."""
        self.num_reasoning_tokens = 0
        """Tokens of reasoning, marks included."""
        self._num_chars = len(job.echo)  # of the text with nothing held back
        self._chat = None if job.chat is None else _ChatText(job.chat)
        self.predicted = PredictedTokens(job.request.prediction) if job.request.prediction else None

    @property
    def num_unparsed(self) -> int:
        """Regions that look like calls and could not be parsed."""
        return 0 if self._chat is None else self._chat.num_unparsed

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
            if self.predicted is not None:
                self.predicted.add(token.token_id)
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
        reasoning, calls = self._chat.taken()
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
        self.num_reasoning_tokens += was_reasoning or self._chat.is_reasoning
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
    """Reasoning and tool calls of a chat's answer, collected until they are taken."""

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

    def taken(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
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


Generate = Callable[[ChoiceJob], AsyncGenerator[ChoiceDelta, None]]


def run_choices(jobs: Sequence[ChoiceJob], generate: Generate) -> AsyncGenerator[ChoiceDelta, None]:
    """The deltas of all jobs as they come; always `aclose` it.

    The first choice of each prompt gets its first token before the others start: they then find the prompt in the
    prefix cache. The first failure ends all.
    """
    return generate(jobs[0]) if len(jobs) == 1 else _run_together(jobs, generate)


async def _run_together(jobs: Sequence[ChoiceJob], generate: Generate) -> AsyncGenerator[ChoiceDelta, None]:
    queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(MAX_QUEUED_DELTAS)
    prompt_done = {job.group: asyncio.Event() for job in jobs}
    leaders = {job.group: job.index for job in reversed(jobs)}
    places = asyncio.Semaphore(MAX_CHOICES)

    async def run(job: ChoiceJob) -> None:
        """Put the job's deltas into the queue, then None, or what it failed with."""
        done = prompt_done[job.group]
        if job.index != leaders[job.group]:
            await done.wait()
        try:
            async with places, aclosing(generate(job)) as deltas:
                async for delta in deltas:
                    done.set()
                    await queue.put(delta)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(run(job)) for job in jobs]
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
    """Runs the jobs of one request and writes them in the endpoint's format; `exchange` hears of it."""

    def __init__(
        self,
        runner: ChoiceRunner,
        body: GenerationFields | EmbeddingRequest,
        jobs: Sequence[ChoiceJob],
        writer: ResponseWriter,
        exchange: HttpExchange,
    ):
        self._runner = runner
        self._body = body
        self._jobs = jobs
        self._writer = writer
        self._exchange = exchange
        leaders = list({job.group: job for job in reversed(jobs)}.values())  # the first choice of each prompt
        # A response is judged once, since half of one is useless: by its longest prompt, which is the latest.
        judged = max(jobs, key=lambda job: job.request.num_prompt_tokens)
        self._stages = [  # fill up on the way
            SequenceStages(exchange.began, follows=job is not judged, log_context=exchange.log_context(job.index))
            for job in jobs
        ]
        exchange.generates(
            [job.request for job in jobs],
            self._stages,
            [self._stages[job.index] for job in leaders],
            sum(job.request.num_prompt_tokens for job in leaders),
            is_stream=bool(body.stream),
        )

    @property
    def most_tokens(self) -> int:
        """Most tokens that all choices may use, prompts included."""
        return self._exchange.num_prompt_tokens + sum(job.request.max_tokens for job in self._jobs)

    def used_tokens(self) -> int:
        """Return the tokens used so far: outputs, and the prompts of choices that were begun."""
        begun = any(stages.attempts for stages in self._stages)
        return (self._exchange.num_prompt_tokens if begun else 0) + self._exchange.num_output_tokens

    async def whole(self) -> bytes:
        """The body of the response. Raises TwostrokeError where a choice fails."""
        choices: list[list[ChoiceDelta]] = [[] for _ in self._jobs]
        async with aclosing(run_choices(self._jobs, self._deltas)) as deltas:
            async for delta in deltas:
                choices[delta.index].append(delta)
        if any(job.prompt is not None for job in self._jobs):  # megabytes, for which no stream is to stand still
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
            async with aclosing(run_choices(self._jobs, self._deltas)) as deltas:
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

    def _deltas(self, job: ChoiceJob) -> AsyncGenerator[ChoiceDelta, None]:
        return self._runner.deltas(job, self._stages[job.index])

    def _failed(self, error: Exception) -> TwostrokeError:
        """Log `error`, and return what the client of a stream that has begun is told."""
        is_one = len(self._stages) == 1  # else it is not known here whose failure it was
        extra = about(self._stages[0].log_context if is_one else self._exchange.log_context())
        if isinstance(error, TwostrokeError):
            _log.warning("a stream failed after it had begun: %s", loggable(error), extra=extra)
        else:
            _log.error("a stream met a bug after it had begun", exc_info=error, extra=extra)
            error = internal_error()
        self._exchange.fails(error)
        return error

    def _usage(self) -> Usage:
        """Return the usage so far."""
        num_prompt_tokens, num_output_tokens = self._exchange.num_prompt_tokens, self._exchange.num_output_tokens
        usage: Usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": (num_cached := self._exchange.num_cached_tokens)},
        }
        if num_tier := self._exchange.num_tier_tokens:
            by_place: CachedTokensDetails = {"memory": num_cached - num_tier, "tiers": num_tier}
            usage["prompt_tokens_details"]["cached_tokens_details"] = by_place
        if any(job.chat is not None and job.chat.opened.has_reasoning for job in self._jobs):
            num_reasoning_tokens = sum(stages.num_reasoning_tokens for stages in self._stages)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
        if any(job.request.prediction for job in self._jobs):
            details = usage.setdefault("completion_tokens_details", {})
            details["accepted_prediction_tokens"] = sum(stages.num_predicted for stages in self._stages)
            details["rejected_prediction_tokens"] = sum(stages.num_mispredicted for stages in self._stages)
        if self._body.return_stages:
            usage["stages"] = [stage_times(stages) for stages in self._stages]
        return usage
