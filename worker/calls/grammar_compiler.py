"""Compiles the grammars of a worker's requests, each in a task that ends with its request."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from twostroke.model.step import Constraint
from twostroke.protocol.clock import Clock
from twostroke.protocol.grammars import Grammars
from twostroke.worker.scheduling.job import WorkerJob
from twostroke.worker.speculation.forced_text import ForcedText


@dataclass(eq=False)
class GrammarCompiler:
    """Keeps a request from being admitted until its grammar is ready."""

    grammars: Grammars
    drafts: bool  # forced text is a source of drafts here
    clock: Clock
    on_ready: Callable[[], None]
    on_failed: Callable[[WorkerJob, BaseException], None]  # with a RequestError where the client is at fault
    _tasks: "set[asyncio.Task[None]]" = field(default_factory=set, init=False)

    def begin(self, job: WorkerJob) -> None:
        """Compile a new request's grammar. Does nothing for one without."""
        if not job.request.grammar:
            return
        job.awaits_grammar = True
        compiling = asyncio.create_task(self._compile(job), name=f"grammar of {job.request.request_id}")
        self._tasks.add(compiling)
        compiling.add_done_callback(self._tasks.discard)
        job.compiling = compiling

    async def close(self) -> None:
        """End all tasks."""
        for compiling in self._tasks:
            compiling.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _compile(self, job: WorkerJob) -> None:
        """Let a request be admitted once its grammar is ready."""
        grammars = self.grammars
        try:
            key = (job.request.grammar, job.request.cache_salt, job.request.client)
            matcher = await grammars.matcher(*key)
            job.sequence.constraint = Constraint(matcher, partial(grammars.renewed, *key), job.request.stop_token_ids)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # llguidance may panic, which is no Exception
            self.on_failed(job, error)
            return
        job.awaits_grammar = False
        self.on_ready()
        if self.drafts and not job.is_prefill_only:
            matcher = await grammars.byte_matcher(*key)
            job.sequence.forced_text = ForcedText(matcher, grammars.tokenizer, self.clock)
