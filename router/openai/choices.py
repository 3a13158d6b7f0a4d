"""Choices while they are generated: tokens become text, and several choices become one stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.requests import FinishReason, SampledToken, TokenEvent
from twostroke.router.generate.pipeline import Pipeline
from twostroke.router.observe.metrics import Outcome, RouterMetrics
from twostroke.router.observe.stages import Stages
from twostroke.router.observe.worker_metrics import SLOMetrics
from twostroke.router.openai.jobs import Job
from twostroke.router.slo.admission import Admission, Overloaded
from twostroke.router.slo.attainment import Verdict, verdict_of
from twostroke.router.slo.demand import Demand
from twostroke.router.text.detokenizer import StopStrings, new_detokenizer
from twostroke.router.text.tokenizer import TextTokenizer

MAX_QUEUED_DELTAS = 256


class ShownToken(msgspec.Struct, frozen=True):
    """A token with log-probabilities, and where its text begins in the choice's text (characters)."""

    sampled: SampledToken
    offset: int


class Delta(msgspec.Struct, frozen=True):
    """What one event adds to a choice."""

    index: int  # of the choice
    text: str
    token_ids: tuple[int, ...]
    shown: tuple[ShownToken, ...]  # empty unless log-probabilities are wanted
    finish_reason: FinishReason | None


class ChoiceRunner:
    """Runs single choices, and tells those who count what becomes of them. One object per router."""

    def __init__(
        self,
        *,
        tokenizer: TextTokenizer,
        pipeline: Pipeline,
        metrics: RouterMetrics,
        promises: SLOMetrics,
        demand: Demand,
        admission: Admission,
        clock: Clock,
    ):
        self._tokenizer = tokenizer
        self._pipeline = pipeline
        self._metrics = metrics
        self._promises = promises
        self._demand = demand
        self._admission = admission
        self._clock = clock

    async def deltas(self, job: Job, stages: Stages) -> AsyncGenerator[Delta, None]:
        """One choice, from tokens to text; always `aclose` it. Raises what `Pipeline.generate` raises."""
        writer = ChoiceWriter(job, self._tokenizer)
        outcome: Outcome = "abort"
        verdict: Verdict | None = None
        last: float | None = None
        self._metrics.begun(job.request.num_prompt_tokens)
        self._demand.arrived(job.request)
        try:
            async with aclosing(self._pipeline.generate(job.request, stages)) as events:
                async for event in events:
                    now = self._clock()
                    if last is not None:
                        self._metrics.inter_token_latency.observe(now - last)
                    last = now
                    delta = writer.add(event)
                    if delta.finish_reason is not None:
                        outcome = stages.finish_reason = delta.finish_reason
                        # A stop string ends the choice here, whatever the workers had sent beyond it.
                        stages.finish = now
                        stages.num_output_tokens = writer.num_tokens
                    yield delta
                    if delta.finish_reason is not None and event.finish_reason is None:
                        break  # a stop string: the workers don't know of it, and are told by closing
            verdict = verdict_of(job.request.promise, stages)
            self._admission.ended(job.request, stages)
        except Exception as error:  # bugs, too; a client that leaves is none
            outcome = "error"
            verdict = "missed"
            if isinstance(error, Overloaded):
                verdict = "refused"
                self._promises.refused(job.request, error.limit)
            raise
        finally:
            self._metrics.ended(stages, outcome)
            if outcome != "error":
                self._demand.ended(stages)
            if verdict is not None:
                self._promises.over(job.request, stages, verdict)


class ChoiceWriter:
    """Writes one choice's text. The token that stopped it is counted, but has neither text nor log-probability."""

    def __init__(self, job: Job, tokenizer: TextTokenizer):
        self._job = job
        self._text = new_detokenizer(tokenizer)
        self._stops = StopStrings(job.stop)
        self.num_tokens = 0
        """Tokens of the choice so far, the one that stopped it included."""
        self._num_chars = 0  # of the text with nothing held back

    def add(self, event: TokenEvent) -> Delta:
        """The text of an event's tokens. A finish reason in the delta ends the choice, whatever may still come."""
        stopped_by_token = event.finish_reason == "stop" and bool(event.tokens)
        last = len(event.tokens) - 1
        text = ""
        token_ids: list[int] = []
        shown: list[ShownToken] = []
        for i, token in enumerate(event.tokens):
            token_ids.append(token.token_id)
            self.num_tokens += 1
            if stopped_by_token and i == last:
                break
            if self._job.request.sampling.logprobs is not None:
                shown.append(ShownToken(token, self._num_chars))
            text += self._visible(self._text.add(token.token_id))
            if self._stops.stopped:
                break
        finish = event.finish_reason
        if finish is not None and not self._stops.stopped:
            text += self._visible(self._text.flush())
            text += self._stops.flush()
        if self._stops.stopped:
            finish = "stop"
        return Delta(self._job.index, text, tuple(token_ids), tuple(shown), finish)

    def _visible(self, text: str) -> str:
        self._num_chars += len(text)
        if self.num_tokens <= self._job.request.min_tokens:
            return text  # no stop string counts before that
        return self._stops.add(text)


Generate = Callable[[Job], AsyncGenerator[Delta, None]]


def run_choices(jobs: Sequence[Job], generate: Generate) -> AsyncGenerator[Delta, None]:
    """The deltas of all jobs as they come; always `aclose` it.

    The first choice of each prompt gets its first token before the others start: they then find the prompt in the
    prefix cache. The first failure ends all.
    """
    return generate(jobs[0]) if len(jobs) == 1 else _run_together(jobs, generate)


async def _run_together(jobs: Sequence[Job], generate: Generate) -> AsyncGenerator[Delta, None]:
    queue: asyncio.Queue[Delta | None] = asyncio.Queue(MAX_QUEUED_DELTAS)
    prompt_done = {job.group: asyncio.Event() for job in jobs}
    leaders = {job.group: job.index for job in reversed(jobs)}

    async def run(job: Job) -> None:
        done = prompt_done[job.group]
        if job.index != leaders[job.group]:
            await done.wait()
        async with aclosing(generate(job)) as deltas:
            async for delta in deltas:
                done.set()
                await queue.put(delta)

    async def run_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(run(job))
        finally:
            # Nobody may be reading any more, so this can't wait; a reader looks at the task as well.
            if not queue.full():
                queue.put_nowait(None)

    running = asyncio.create_task(run_all())
    try:
        async for delta in _drain(queue, running):
            yield delta
        await _reraise_first(running)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _drain(queue: "asyncio.Queue[Delta | None]", running: "asyncio.Task[None]") -> AsyncIterator[Delta]:
    while not (running.done() and queue.empty()):
        delta = await queue.get()
        if delta is None:
            return
        yield delta


async def _reraise_first(running: "asyncio.Task[None]") -> None:
    """One failure is what the client is told, not a group of them."""
    try:
        await running
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
