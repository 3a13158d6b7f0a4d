"""One response under way: its choices, as server-sent events or as one body."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from twostroke.protocol.errors import TwostrokeError
from twostroke.router.observe.access_log import Exchange
from twostroke.router.observe.stages import Stages
from twostroke.router.openai.answers import DONE, Format, Usage, error_object, event, internal_error, stage_times
from twostroke.router.openai.choices import ChoiceRunner, Delta, run_choices
from twostroke.router.openai.jobs import Job
from twostroke.router.openai.schemas import GenerationFields

_log = logging.getLogger(__name__)


class Generation:
    """Runs the jobs of one request and writes them in the endpoint's format; `exchange` hears of it."""

    def __init__(
        self, runner: ChoiceRunner, asked: GenerationFields, jobs: Sequence[Job], form: Format, exchange: Exchange
    ):
        self._runner = runner
        self._asked = asked
        self._jobs = jobs
        self._form = form
        self._exchange = exchange
        self._leaders = list({job.group: job for job in reversed(jobs)}.values())  # the first choice of each prompt
        # A response is judged once, since half of one helps nobody: by its longest prompt, which is the latest.
        judged = max(jobs, key=lambda job: job.request.num_prompt_tokens)
        self._stages = [Stages(exchange.began, follows=job is not judged) for job in jobs]  # fill up on the way
        exchange.requests, exchange.stages = [job.request for job in jobs], self._stages
        exchange.num_prompt_tokens = sum(job.request.num_prompt_tokens for job in self._leaders)
        exchange.is_stream = bool(asked.stream)

    @property
    def most_tokens(self) -> int:
        """What all choices may come to use, prompts included."""
        return self._exchange.num_prompt_tokens + sum(job.request.max_tokens for job in self._jobs)

    def used_tokens(self) -> int:
        """What has been used so far: outputs, and the prompts of choices that were begun."""
        begun = any(stages.attempts for stages in self._stages)
        return (self._exchange.num_prompt_tokens if begun else 0) + self._exchange.num_output_tokens

    async def whole(self) -> bytes:
        """The body of the response. Raises TwostrokeError where a choice fails."""
        choices: list[list[Delta]] = [[] for _ in self._jobs]
        async with aclosing(run_choices(self._jobs, self._deltas)) as deltas:
            async for delta in deltas:
                choices[delta.index].append(delta)
        return self._form.whole(choices, self._usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; always `aclose` it.

        Fails like `whole` before the first event. Later, the last event has the error object, and no [DONE] follows.
        """
        began = False
        in_chunks = self._asked.has_usage_in_every_chunk
        try:
            async with aclosing(run_choices(self._jobs, self._deltas)) as deltas:
                async for delta in deltas:
                    written = self._form.events(delta, self._usage() if in_chunks else None)
                    if written:
                        began = True
                        yield written
        except Exception as error:
            if not began:
                raise
            yield self._failed(error)
            return
        yield (self._form.usage_event(self._usage()) if self._asked.includes_usage else b"") + DONE

    def _deltas(self, job: Job) -> AsyncGenerator[Delta, None]:
        return self._runner.deltas(job, self._stages[job.index])

    def _failed(self, error: Exception) -> bytes:
        """The event that ends a stream which has begun."""
        if isinstance(error, TwostrokeError):
            _log.warning("a stream failed after it had begun: %s", error)
        else:
            _log.error("a stream met a bug after it had begun", exc_info=error)
            error = internal_error()
        self._exchange.fails(error)
        return event(error_object(error))

    def _usage(self) -> Usage:
        """What has been used so far."""
        num_prompt_tokens, num_output_tokens = self._exchange.num_prompt_tokens, self._exchange.num_output_tokens
        usage: Usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(self._stages[job.index].num_cached_tokens for job in self._leaders)
            },
        }
        if self._asked.return_stages:
            usage["stages"] = [stage_times(stages) for stages in self._stages]
        return usage
