"""One response under way: its choices, as server-sent events or as one body."""

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing

from twostroke.protocol.errors import TwostrokeError
from twostroke.router.http.service import RouterService
from twostroke.router.observe.stages import Stages
from twostroke.router.openai.choices import Delta, run_choices
from twostroke.router.openai.common import (
    DONE,
    INTERNAL_ERROR,
    Format,
    PromptTokensDetails,
    Usage,
    error_object,
    event,
    stage_times,
)
from twostroke.router.openai.jobs import Job

_log = logging.getLogger(__name__)


class Generation:
    """Runs the jobs of one request and writes them in the endpoint's format."""

    def __init__(
        self,
        service: RouterService,
        jobs: Sequence[Job],
        form: Format,
        *,
        include_usage: bool,
        return_stages: bool,
        return_token_ids: bool,
        arrive: float,
        on_failure: Callable[[TwostrokeError], None],
    ):
        """`on_failure` is told of the error that ends a stream after it has begun."""
        self._service = service
        self._jobs = jobs
        self._form = form
        self._include_usage = include_usage
        self._return_stages = return_stages
        self._return_token_ids = return_token_ids
        self._on_failure = on_failure
        # A response is judged once, since half of one helps nobody: by its longest prompt, which is the latest.
        judged = max(jobs, key=lambda job: job.request.num_prompt_tokens)
        self._stages = [Stages(arrive, follows=job is not judged) for job in jobs]

    @property
    def stages(self) -> Sequence[Stages]:
        """Of each choice; they fill up on the way."""
        return self._stages

    @property
    def most_tokens(self) -> int:
        """What all choices may come to use, prompts included."""
        return self._prompt_tokens() + sum(job.request.max_tokens for job in self._jobs)

    def used_tokens(self) -> int:
        """What has been used so far: outputs, and the prompts of choices that were begun."""
        begun = any(stages.attempts for stages in self._stages)
        return (self._prompt_tokens() if begun else 0) + sum(stages.num_output_tokens for stages in self._stages)

    async def whole(self) -> bytes:
        """The body of the response. Raises TwostrokeError where a choice fails."""
        choices: list[list[Delta]] = [[] for _ in self._jobs]
        async with aclosing(run_choices(self._jobs, self._generate)) as deltas:
            async for delta in deltas:
                choices[delta.index].append(delta)
        return self._form.whole(choices, self._usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; always `aclose` it.

        Fails like `whole` before the first event. Later, the last event has the error object, and no [DONE] follows.
        """
        opened: set[int] = set()
        began = False
        try:
            async with aclosing(run_choices(self._jobs, self._generate)) as deltas:
                async for delta in deltas:
                    opening = None
                    if delta.index not in opened:
                        opened.add(delta.index)
                        opening = self._form.opening(delta.index)
                    written = (opening or b"") + (self._form.chunk(delta) if self._says_something(delta) else b"")
                    if written:
                        began = True
                        yield written
        except TwostrokeError as error:
            if not began:
                raise
            _log.warning("a stream failed after it had begun: %s", error)
            yield self._failed(error)
            return
        except Exception:
            if not began:
                raise
            _log.exception("a stream met a bug after it had begun")
            yield self._failed(INTERNAL_ERROR)
            return
        yield (self._form.usage_chunk(self._usage()) if self._include_usage else b"") + DONE

    def _generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        return self._service.generate(job, self._stages[job.index])

    def _failed(self, error: TwostrokeError) -> bytes:
        self._on_failure(error)
        return event(error_object(error))

    def _says_something(self, delta: Delta) -> bool:
        """Half a character, or what may begin a stop string, is no news."""
        return bool(delta.text or delta.shown or delta.finish_reason or self._return_token_ids)

    def _usage(self) -> Usage:
        prompt_tokens = self._prompt_tokens()
        completion_tokens = sum(stages.num_output_tokens for stages in self._stages)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                sum(self._stages[job.index].num_cached_tokens for job in self._leaders())
            ),
            stages=[stage_times(stages) for stages in self._stages] if self._return_stages else None,
        )

    def _leaders(self) -> Iterable[Job]:
        """The first choice of each prompt: prompts count once, however many choices each has."""
        return {job.group: job for job in reversed(self._jobs)}.values()

    def _prompt_tokens(self) -> int:
        return sum(job.request.num_prompt_tokens for job in self._leaders())
