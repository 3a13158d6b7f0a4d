"""Answers with drafts are those without, on real engines: tokens, log-probabilities, ends; and drafts do take part.

Prompts repeat themselves, and so do the answers of random models. Rows are made to look cheap, so that every match is
drafted: whether that pays on this machine is no question of these tests.
"""

import asyncio
import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import Served, Shape, new_state, serve
from tests.model.architectures.test_conformance import FAMILY_SHAPES, SEEDS, SHAPES
from twostroke.protocol.requests import FinishReason, GenerateRequest, SampledToken, SamplingParams

STOP = 5

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": SamplingParams(temperature=0.0)},
    "cool": {"sampling": SamplingParams(temperature=0.3, seed=1)},
    "sampled": {"sampling": SamplingParams(seed=2, top_p=0.9, top_k=20)},
    "min_p": {"sampling": SamplingParams(seed=3, temperature=0.5, min_p=0.1)},
    "penalties": {"sampling": SamplingParams(temperature=0.0, repetition_penalty=1.05, frequency_penalty=0.02)},
    "presence": {"sampling": SamplingParams(temperature=0.2, seed=4, presence_penalty=0.1)},
    "bad words": {"sampling": SamplingParams(temperature=0.0, bad_words=((11, 12), (7,)))},
    "bias": {"sampling": SamplingParams(temperature=0.0, logit_bias=((3, 1.5), (STOP, 1.0)))},
    "allowed": {"sampling": SamplingParams(temperature=0.2, seed=5, allowed_token_ids=tuple(range(4, 40)))},
    "logprobs": {"sampling": SamplingParams(temperature=0.0, logprobs=3)},
    "stops": {"sampling": SamplingParams(temperature=0.0), "stop_token_ids": (STOP, 17)},
    "min tokens": {"sampling": SamplingParams(temperature=0.0), "stop_token_ids": (STOP, 17), "min_tokens": 20},
}


@dataclass(frozen=True)
class Answer:
    """All that a request gets."""

    tokens: tuple[SampledToken, ...]
    reason: FinishReason | None

    def is_like(self, other: "Answer") -> bool:
        """Return whether the answers are the same, log-probabilities up to fp32's rounding."""
        ids, others = ([token.token_id for token in one.tokens] for one in (self, other))
        logprobs, other_logprobs = (
            [value for token in one.tokens for value in (token.logprob, *(p for _, p in token.top))]
            for one in (self, other)
        )
        return (ids, self.reason) == (others, other.reason) and logprobs == pytest.approx(other_logprobs, abs=1e-4)


async def ask(served: Served, prompt: tuple[int, ...], max_tokens: int, kind: dict[str, Any]) -> Answer:
    request = GenerateRequest("", "", prompt, len(prompt), max_tokens=max_tokens, **kind)
    tokens: list[SampledToken] = []
    reason = None
    async with contextlib.aclosing(served.pipeline.generate(new_state(request))) as events:
        async for event in events:
            assert event.index == len(tokens)
            tokens += event.tokens
            reason = event.finish_reason or reason
    return Answer(tuple(tokens), reason)


async def ask_all(served: Served) -> list[Answer]:
    """Return the answers to a repetitive prompt for each kind of request, all at once."""
    prompts = [
        tuple((7 * number + place % (3 + number)) % 90 + 1 for place in range(40)) for number in range(len(KINDS))
    ]
    return list(
        await asyncio.gather(
            *(ask(served, prompt, 60, kind) for prompt, kind in zip(prompts, KINDS.values(), strict=True))
        )
    )


OFF = {"speculation": {"method": "off"}}
BASE = Shape(None, num_blocks=512)
SHAPES_OF_FLEETS = {
    "aggregated": BASE,
    "disaggregated": replace(BASE, transport="tcp"),
    "blocks of 4": replace(BASE, block_size=4),
    "pressure": replace(BASE, num_blocks=40, block_size=4, decode={"preemption": "recompute"}),
    "swap": replace(
        BASE, num_blocks=40, block_size=4, swap_bytes=2**20, decode={"preemption": "swap", "swap_gib": 1.0}
    ),
    "KV in FP8": replace(BASE, kv_cache_dtype="fp8"),
    "ranks": replace(BASE, transport="tcp", decode_ranks=2),
    "stages": replace(BASE, transport="tcp", decode_stages=2),
}
# The plain model in every fleet; layers that keep something else than all keys and values in one.
FAMILIES = {
    "gemma3": "blocks of 4",
    "deepseek_v3_experts": "pressure",
    "gemma4": "aggregated",
    "llama4": "aggregated",
    "gpt_oss": "aggregated",
    "deepseek_v32": "aggregated",
    "glm4_moe": "aggregated",
    "mistral_window": "disaggregated",
}
IN_MAKE_TEST = ("gemma3", "deepseek_v3_experts", "gemma4")
CASES = [
    *(pytest.param("gqa", name, id=name) for name in SHAPES_OF_FLEETS),
    *(
        pytest.param(name, fleet, id=name, marks=[] if name in IN_MAKE_TEST else pytest.mark.models)
        for name, fleet in FAMILIES.items()
    ),
]


async def answers_of(folder: Path, shape: Shape) -> tuple[list[Answer], int, int]:
    """Return all answers, the drafted tokens and those accepted."""
    async with serve(folder, shape) as served:
        first = await ask_all(served)
        again = await ask_all(served)
        assert all(one.is_like(other) for one, other in zip(first, again, strict=True)), (
            "with earlier answers to draw on"
        )
        await served.idle()
        stats = served.fleet.stats("decode")
        assert sum(stats.accepted_by_position) == stats.accepted_tokens <= stats.draft_tokens
        return first, stats.draft_tokens, stats.accepted_tokens


@pytest.mark.parametrize(("model", "fleet"), CASES)
async def test_drafts_change_no_answer(model: str, fleet: str, write_checkpoint: Any, cheap_rows: None) -> None:
    folder = write_checkpoint(seed=SEEDS.get(model, 0), **(SHAPES | FAMILY_SHAPES)[model])
    shape = SHAPES_OF_FLEETS[fleet]
    plain, drafted, _ = await answers_of(folder, replace(shape, decode={**shape.decode, **OFF}))
    assert drafted == 0
    answers, drafted, accepted = await answers_of(folder, shape)
    for name, answer, expected in zip(KINDS, answers, plain, strict=True):
        assert answer.is_like(expected), name
    assert accepted > 200, f"{accepted} of {drafted}"
