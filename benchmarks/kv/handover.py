"""How much of a transfer a request feels: from the end of its prefill to its first decode step.

Two real workers in processes of their own, the router's pipeline before them, no Ray. Moments are the engines' own: the
end of the step that drew the first token, the beginning of the first decode step. What lies between is everything that
disaggregation adds to a request: the last layers' bytes, digests, commit, the decode worker's wake-up, and the wait for
its step under way.
"""

import asyncio
import itertools
import random
import statistics
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from twostroke.benchmarks.workers.fleet import Served, serve
from twostroke.benchmarks.workers.process import Settings
from twostroke.cluster.config.sections import TransportChoice
from twostroke.model.cache.kv_cache import kv_block_bytes
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.protocol.errors import TransferFailed

BLOCK_SIZE = 16
SECRET = "a secret of this bench alone"
FIRST_TOKEN_ID = 300


@dataclass(frozen=True)
class Handover:
    """One request's, in seconds."""

    prefill_s: float
    handover_s: float


@dataclass(frozen=True)
class Exposed:
    """Medians over all requests of one prompt length, over a link on which KV takes half as long as its prefill."""

    prompt_tokens: int
    prefill_s: float
    handover_s: float
    bytes_per_s: int  # the link's

    @property
    def share(self) -> float:
        """Of the prefill's time."""
        return self.handover_s / self.prefill_s


class Prompts:
    """Prompts that share no prefix: each begins with a token that no other begins with."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._first = itertools.cycle(range(FIRST_TOKEN_ID, vocab_size))
        self._draw = random.Random(0)

    def draw(self, num_tokens: int) -> list[int]:
        rest = (self._draw.randrange(FIRST_TOKEN_ID, self._vocab_size) for _ in range(num_tokens - 1))
        return [next(self._first), *rest]


async def measure_exposed(folder: Path, prompt_tokens: int, rounds: int) -> Exposed:
    """Prefill times over a free link first, then over one that is throttled accordingly."""
    free = await _run(folder, prompt_tokens, rounds, max_bytes_per_s=None)
    prefill_s = statistics.median(one.prefill_s for one in free)
    config = load_model_config(folder)
    kv_bytes = -(-prompt_tokens // BLOCK_SIZE) * kv_block_bytes(config, BLOCK_SIZE, torch.bfloat16)
    rate = int(kv_bytes / (prefill_s / 2))
    paced = await _run(folder, prompt_tokens, rounds, max_bytes_per_s=rate)
    return Exposed(
        prompt_tokens,
        statistics.median(one.prefill_s for one in paced),
        statistics.median(one.handover_s for one in paced),
        rate,
    )


async def measure_handovers(
    folder: Path, *, transport: TransportChoice, prompt_tokens: int, max_tokens: int, concurrency: int, requests: int
) -> list[Handover]:
    """Of `requests` requests, `concurrency` at a time, over a free link."""
    async with _served(folder, prompt_tokens, concurrency, transport, None) as served:
        prompts = Prompts(load_model_config(folder).vocab_size)
        await _send(served, prompts, 2 * concurrency, concurrency, prompt_tokens, max_tokens)  # warms everything up
        return await _send(served, prompts, requests, concurrency, prompt_tokens, max_tokens)


async def _run(folder: Path, prompt_tokens: int, rounds: int, *, max_bytes_per_s: int | None) -> list[Handover]:
    async with _served(folder, prompt_tokens, 1, "tcp", max_bytes_per_s) as served:
        prompts = Prompts(load_model_config(folder).vocab_size)
        await _send(served, prompts, 1, 1, prompt_tokens, 2)
        return await _send(served, prompts, rounds, 1, prompt_tokens, 2)


def _served(
    folder: Path, prompt_tokens: int, concurrency: int, transport: TransportChoice, max_bytes_per_s: int | None
) -> AbstractAsyncContextManager[Served]:
    prefill = Settings(
        role="prefill",
        model=str(folder),
        dtype="bfloat16",
        num_blocks=2 * (concurrency + 1) * (-(-prompt_tokens // BLOCK_SIZE) + 8),
        block_size=BLOCK_SIZE,
        transport=transport,
        secret=SECRET,
        tcp_max_bytes_per_s=max_bytes_per_s,
    )
    return serve(prefill, msgspec.structs.replace(prefill, role="decode"))


async def _send(
    served: Served, prompts: Prompts, requests: int, concurrency: int, prompt_tokens: int, max_tokens: int
) -> list[Handover]:
    """Raises TransferFailed where any transfer did: then there is no handover to speak of."""
    left = iter([prompts.draw(prompt_tokens) for _ in range(requests)])

    async def client() -> list[int]:
        done: list[int] = []
        for prompt in left:
            await served.generate(prompt, max_tokens)
            done.append(prompt[0])
        return done

    names = list(itertools.chain(*await asyncio.gather(*(client() for _ in range(concurrency)))))
    source, target = await asyncio.gather(served.prefill.notes(), served.decode.notes())
    if source.stats.transfers_failed or target.stats.transfers_failed:
        raise TransferFailed(f"{target.stats.transfers_failed} transfers failed")
    handovers: list[Handover] = []
    for name in map(str, names):
        read, written = source.moments[name], target.moments[name]
        handovers.append(
            Handover(read.first_token_drawn - read.first_step_began, written.first_step_began - read.first_token_drawn)
        )
    return handovers
