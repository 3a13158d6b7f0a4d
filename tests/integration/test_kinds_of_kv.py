"""Every kind of KV on its way: sent, swapped out, found again and damaged. No token changes by it.

Kinds are keys and values, whose heads ranks share unequally, a DeepSeek-like model's latents, whose experts are counted
on the way, latents beside the keys of an index, states of several families, and keys and values in FP8. Right are the
tokens of one worker of one rank with room for everything; in FP8 those of plain torch over a cache of such numbers.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.local_fleet import (
    GREEDY,
    VOCAB,
    Ask,
    Served,
    Shape,
    asking,
    check_cold_and_warm,
    flip_a_bit,
    of_one_worker,
    serve,
)
from tests.kernels.paged_cases import ReferenceBackend
from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts
from tests.model.conftest import make_decoder
from twostroke.kvtransfer.config import TransferConfig
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import FP8

PROMPTS = random_prompts(VOCAB, 1, (1, 15, 16, 17, 64, 100, 300))
PLENTY = Shape(None, num_blocks=512)


@dataclass(frozen=True)
class Kind:
    """A model with KV of one kind, and a fleet's sizes at which its requests give way."""

    checkpoint: dict[str, Any]
    num_tokens: int = 24
    tight: dict[str, Any] = field(default_factory=lambda: {"num_blocks": 40, "decode_step_tokens": 64})
    swap_bytes: int = 2**20
    kv_cache_dtype: str = "auto"


def with_states(family: str, **more: Any) -> Kind:
    tight = {"num_blocks": 60, "decode_step_tokens": 64, "prefill_step_tokens": 64}
    return Kind(FAMILY_SHAPES[family] | more, num_tokens=70, tight=tight, swap_bytes=2**22)


FOUR_HEADS = {"num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_hidden_layers": 8}
KINDS = {
    "keys and values": Kind({"num_attention_heads": 8, "num_key_value_heads": 2}),
    "latents": Kind(FAMILY_SHAPES["deepseek_v3_experts"]),
    "an index": Kind(FAMILY_SHAPES["glm_moe_dsa"]),
    "states": with_states("qwen3_5", **FOUR_HEADS),
    "states of granite4": with_states("granite4"),
    "states of nemotron_h": with_states("nemotron_h"),
    "states of lfm2": with_states("lfm2"),
    "FP8": Kind({"num_key_value_heads": 2}, kv_cache_dtype="fp8"),
}
SWAPPED, RECOMPUTED = ", swapped out", ", computed again"
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "alone, small chunks": {"decode_step_tokens": 37},
    "tcp": {"transport": "tcp", "prefill_step_tokens": 129},
    "tcp, unequal blocks": {"transport": "tcp", "prefill_step_tokens": 129, "decode_block_size": 8},
    "shm": {"transport": "shm"},
    "gloo": {"transport": "torch_distributed"},
    "tcp, 2 ranks to 1": {"transport": "tcp", "prefill_ranks": 2},
    "tcp, 2 ranks to 1, unequal blocks": {
        **{"transport": "tcp", "prefill_step_tokens": 129, "prefill_ranks": 2, "decode_block_size": 8},
    },
    "tcp, 4 ranks to 2, unequal blocks": {
        **{"transport": "tcp", "prefill_step_tokens": 129, "prefill_ranks": 4, "decode_ranks": 2},
        "decode_block_size": 8,
    },
    "shm, 1 rank to 2": {"transport": "shm", "prefill_step_tokens": 129, "decode_ranks": 2},
    "tcp, 1 rank to 2": {"transport": "tcp", "decode_ranks": 2},
    "tcp, 1 rank to 4": {"transport": "tcp", "decode_ranks": 4},
    "tcp, 2 ranks to 4": {"transport": "tcp", "prefill_ranks": 2, "decode_ranks": 4},
    "tcp, 2 stages to 1": {"transport": "tcp", "prefill_stages": 2},
    "shm, 4 ranks to 1": {"transport": "shm", "prefill_ranks": 4},
    "shm, 4 ranks to 2": {"transport": "shm", "prefill_ranks": 4, "decode_ranks": 2},
    "tcp, 1 rank to 2 of whole experts": {"transport": "tcp", "decode_ranks": 2, "whole_experts": "decode"},
    "shm, 1 rank to 2 that share contexts": {
        **{"transport": "shm", "decode_ranks": 2, "whole_experts": "decode", "shares_context": ("decode",)},
    },
    "shm, 4 ranks of whole experts to 1": {"transport": "shm", "prefill_ranks": 4, "whole_experts": "prefill"},
    "tcp, 2 ranks to 4 of whole experts": {
        **{"transport": "tcp", "prefill_ranks": 2, "decode_ranks": 4, "whole_experts": "decode"},
    },
    "tcp, 2 ranks that share contexts to 4": {
        **{"transport": "tcp", "prefill_ranks": 2, "decode_ranks": 4, "shares_context": ("prefill", "decode")},
    },
    "tcp, 4 ranks that share contexts to 2": {
        **{"transport": "tcp", "prefill_ranks": 4, "decode_ranks": 2, "shares_context": ("prefill",)},
    },
    "tcp, 4 ranks of whole experts to 2": {
        **{"transport": "tcp", "prefill_ranks": 4, "decode_ranks": 2, "whole_experts": "prefill"},
    },
}
RANKED, SHARED = "tcp, 2 ranks to 1", f"shm, 1 rank to 2 that share contexts{SWAPPED}"
CASES = {
    "keys and values": ("tcp, 2 ranks to 1, unequal blocks", "shm, 1 rank to 2"),
    "latents": (f"alone{SWAPPED}", "tcp, unequal blocks", "shm", RANKED, "tcp, 1 rank to 2 of whole experts", SHARED),
    "an index": (f"alone{SWAPPED}", "tcp, unequal blocks"),
    "states": (f"alone{SWAPPED}", f"alone{RECOMPUTED}", "tcp", f"shm{SWAPPED}", "gloo", RANKED),
    "states of granite4": (RANKED,),
    "states of nemotron_h": (f"shm{SWAPPED}",),
    "states of lfm2": ("tcp",),
    "FP8": ("alone, small chunks", f"alone{SWAPPED}", "tcp, unequal blocks", "shm", "gloo"),
}
# Each rank but the first of a worker is a process, which takes 4 s of a core to load torch.
MORE_CASES = {
    "keys and values": ("tcp, 4 ranks to 2, unequal blocks",),
    "latents": (
        *("tcp, 1 rank to 2", "tcp, 2 ranks to 4", "shm, 4 ranks to 1", "shm, 4 ranks of whole experts to 1"),
        *("tcp, 2 ranks to 4 of whole experts", "tcp, 4 ranks of whole experts to 2"),
        *("tcp, 2 ranks that share contexts to 4", "tcp, 4 ranks that share contexts to 2"),
    ),
    "an index": (RANKED,),
    "states": ("tcp, 1 rank to 4", "shm, 4 ranks to 2", "tcp, 2 stages to 1"),
    "FP8": (RANKED,),
}


@dataclass(frozen=True)
class Case:
    """A kind's checkpoint, and the right answers."""

    name: str
    folder: Path
    ask: Ask
    expected: list[list[int]]

    def shape(self, way: str) -> Shape:
        kind = KINDS[self.name]
        ways = WAYS[way.removesuffix(SWAPPED).removesuffix(RECOMPUTED)]
        shape = replace(PLENTY, kv_cache_dtype=kind.kv_cache_dtype, **ways)
        if way.endswith((SWAPPED, RECOMPUTED)):
            shape = replace(shape, **kind.tight)
        if way.endswith(SWAPPED):
            shape = replace(shape, swap_bytes=kind.swap_bytes, decode={"preemption": "swap", "swap_gib": 1.0})
        return shape


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, write_checkpoint: Any, generate: Any) -> Case:
    kind = KINDS[request.param]
    folder, ask = write_checkpoint(seed=3, **kind.checkpoint), asking(PROMPTS, kind.num_tokens)
    if request.param != "FP8":
        return Case(request.param, folder, ask, of_one_worker(folder, ask, PLENTY))
    in_fp8, whole = (by_reference(folder, generate, dtype) for dtype in (torch.float8_e4m3fn, None))
    assert in_fp8 != whole, "else nothing is shown"
    return Case(request.param, folder, ask, in_fp8)


def by_reference(folder: Path, generate: Any, kv_dtype: torch.dtype | None) -> list[list[int]]:
    decoder, cache = make_decoder(folder, ReferenceBackend(), num_blocks=256, block_size=16, kv_dtype=kv_dtype)
    runner = ModelRunner(decoder, Sampler(VOCAB), cache, 1024)
    answers: list[list[int]] = generate(runner, PROMPTS, KINDS["FP8"].num_tokens, chunk=300, block_size=16)
    return answers


ALL = [
    pytest.param(kind, way, marks=marks)
    for kinds, marks in ((CASES, ()), (MORE_CASES, pytest.mark.models))
    for kind, ways in kinds.items()
    for way in ways
]


@pytest.mark.parametrize(("case", "way"), ALL, indirect=["case"])
async def test_no_way_of_kv_changes_a_token(case: Case, way: str) -> None:
    shape = case.shape(way)
    async with serve(case.folder, shape) as served:
        hits = await check_cold_and_warm(served, case.ask, case.expected)
        stats = served.fleet.stats("decode")
        check_kind(case.name, served, shape)
    if shape.num_blocks == PLENTY.num_blocks:
        assert hits["prefill" if shape.transport else "decode"] >= 288, "the longest prompt's full blocks at least"
    assert case.name.startswith("states") or hits["decode"] > 0
    assert (stats.swaps > 0) == way.endswith(SWAPPED)


def check_kind(name: str, served: Served, shape: Shape) -> None:
    """Check that the model's KV is of this kind, and what its workers tell of its experts."""
    layouts = [info.layout for info in served.fleet.infos]
    if name == "FP8":
        assert {layout.dtype for layout in layouts} == {FP8}
    elif name.startswith("states"):
        assert all(layout.state_numbers for layout in layouts)
    else:
        assert {layout.kinds for layout in layouts} == {2 if name == "keys and values" else 1}
    if name == "latents":
        parts = served.fleet.parts.values()
        assert sum(one.rank.loaded.parallel.shard.has_whole_experts for one in parts) == (
            shape.whole_experts is not None
        )
        assert {one.deps.expert_share for one in parts} == {3 / 8}
        sharing = {info.role for info in served.fleet.infos if info.layout.context_ranks > 1}
        assert sharing == set(shape.shares_context)
        dense, *routed = served.fleet.stats("decode").expert_skews
        assert dense == 0
        assert all(1 < skew < 8 / 3 + 1e-9 for skew in routed), "of eight experts each token takes three"


FLIPPED = [
    pytest.param(kind, way, marks=pytest.mark.models if way == RANKED else ())
    for kind, ways in {"latents": ("tcp, unequal blocks", RANKED), "states": ("tcp", RANKED)}.items()
    for way in ways
]


@pytest.mark.parametrize(("case", "way"), FLIPPED, indirect=["case"])
async def test_a_flipped_bit_is_found_by_its_checksum(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flipped = flip_a_bit(monkeypatch)
    async with serve(case.folder, case.shape(way)) as served:
        assert await case.ask(served) == case.expected
        await served.idle()
        stats = served.fleet.stats("decode")
    (block_bytes,) = flipped
    assert case.name == "states" or block_bytes >= 8 * (32 + 8) * 4, "latents with the rotary part of keys, in fp32"
    assert stats.transfer_digest_failures == 1
    assert stats.transfers_failed >= 1


@pytest.mark.parametrize("case", ["states"], indirect=True)
async def test_a_prompt_that_shares_a_beginning_computes_the_rest_alone(case: Case) -> None:
    first, second = PROMPTS[-1], [*PROMPTS[-1][:288], *PROMPTS[-2]]
    async with serve(case.folder, PLENTY) as served:
        await served.generate(first, 70, GREEDY)
        before = served.fleet.stats("decode").computed_tokens
        answer = await served.generate(second, 70, GREEDY)
        computed = served.fleet.stats("decode").computed_tokens - before
    async with serve(case.folder, PLENTY) as served:
        assert await served.generate(second, 70, GREEDY) == answer
    assert computed == len(PROMPTS[-2])


@pytest.mark.parametrize("shape", ["qwen3_5", "granite4"])
async def test_of_4096_shared_tokens_less_than_a_block_is_computed_again(shape: str, write_checkpoint: Any) -> None:
    folder = write_checkpoint(seed=3, **FAMILY_SHAPES[shape] | {"max_position_embeddings": 8192})
    shared, first, second = random_prompts(96, 2, (4096, 33, 50))
    async with serve(folder, replace(PLENTY, num_blocks=4096)) as served:
        await served.generate(shared + first, 4, GREEDY)
        stats = served.fleet.stats
        before, block = stats("decode").computed_tokens, served.fleet.infos[0].layout.block_size
        answer = await served.generate(shared + second, 4, GREEDY)
        computed = stats("decode").computed_tokens - before
    assert computed < len(second) + block + len(answer)


@pytest.mark.parametrize("case", ["states"], indirect=True)
async def test_states_are_not_encoded(case: Case) -> None:
    with pytest.raises(ConfigError, match="encoding: int8 is for keys and values"):
        async with serve(case.folder, replace(PLENTY, transport="tcp", transfers=TransferConfig(encoding="int8"))):
            pass
