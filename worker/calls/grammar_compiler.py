"""Compiles the grammars of a worker's requests, each in a task that ends with its call."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from twostroke.model.step import Constraint
from twostroke.protocol.clock import Clock
from twostroke.protocol.grammars import Grammars
from twostroke.worker.calls.worker_call import DecodeCall, PrefillCall
from twostroke.worker.speculation.forced_text import ForcedText

GrammarCall = PrefillCall | DecodeCall


@dataclass(eq=False)
class GrammarCompiler:
    """Keeps a call's job from being admitted until its grammar is ready."""

    grammars: Grammars
    drafts: bool  # forced text is a source of drafts here
    clock: Clock
    on_ready: Callable[[], None]
    on_failed: Callable[[GrammarCall, BaseException], None]  # with a RequestError where the client is at fault
    _tasks: "set[asyncio.Task[None]]" = field(default_factory=set, init=False)

    def begin(self, call: GrammarCall) -> None:
        """Compile a new call's grammar. Does nothing for a call without one."""
        if not call.request.grammar:
            return
        call.job.awaits_grammar = True
        compiling = asyncio.create_task(self._compile(call), name=f"grammar of {call.request.request_id}")
        self._tasks.add(compiling)
        compiling.add_done_callback(self._tasks.discard)
        call.compiling = compiling

    async def close(self) -> None:
        """End all tasks."""
        for compiling in self._tasks:
            compiling.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _compile(self, call: GrammarCall) -> None:
        """Let a call be admitted once its grammar is ready."""
        job, grammars = call.job, self.grammars
        try:
            key = (call.request.grammar, call.request.cache_salt, call.request.client)
            matcher = await grammars.matcher(*key)
            job.sequence.constraint = Constraint(matcher, partial(grammars.renewed, *key), call.request.stop_token_ids)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # llguidance may panic, which is no Exception
            self.on_failed(call, error)
            return
        job.awaits_grammar = False
        self.on_ready()
        if self.drafts and not job.is_prefill_only:
            matcher = await grammars.byte_matcher(*key)
            job.sequence.forced_text = ForcedText(matcher, grammars.tokenizer, self.clock)
