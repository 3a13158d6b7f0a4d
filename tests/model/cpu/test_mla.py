"""MLA on CPUs against the plain torch reference; what no kernel may read is NaN."""

import pytest
import torch

from tests.kernels.paged_cases import MLACase, latent_case, over_ranks
from tests.rigs import reference
from twostroke.model.architectures import context_index
from twostroke.model.backend import LayerNorm
from twostroke.model.cpu import mla
from twostroke.model.cpu.kernels.elementwise import write_index_keys, write_latents
from twostroke.model.cpu.kernels.launch import Launcher
from twostroke.model.cpu.linears import is_supported
from twostroke.model.parallel.tensor_parallel import ContextParts, GroupRanks

DTYPES = [torch.float32, torch.bfloat16]
DECODES = [(1, 1), (1, 16), (1, 17), (1, 600)]
CHUNKS = [(3, 3), (2, 70), (60, 60), (90, 150), (33, 200)]  # of few queries, which absorb, and of many
SHAPES = [
    {},
    {"heads": 16, "rank": 64, "rotary": 32, "key": 32, "value": 32},  # what tiles take
    {"heads": 2, "rank": 40, "rotary": 8, "key": 13, "value": 70, "block_size": 5},
]


def check(case: MLACase, chosen: torch.Tensor | None = None) -> None:
    attention = mla.CpuMLA(case.heads, Launcher())
    out = attention(case.q, case.cos_sin, case.kv_layer, case.layout, chosen)
    tolerance = 2e-5 if case.q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, case.expected(chosen), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_and_chunks_equal_the_reference(dtype: torch.dtype, shape: dict[str, int]) -> None:
    check(latent_case([*DECODES, *CHUNKS], dtype=dtype, **shape))


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_longer_than_what_is_attended_to(dtype: torch.dtype, shape: dict[str, int]) -> None:
    check(latent_case([*DECODES, *CHUNKS], dtype=dtype, behind=24, **shape))


@pytest.mark.parametrize("gathered_bytes", [1 << 20, 40_000], ids=["at once", "in parts"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_attend_to_chosen_tokens_alone(
    dtype: torch.dtype, shape: dict[str, int], gathered_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_index, "GATHERED_BYTES", gathered_bytes)
    case = latent_case([*DECODES, *CHUNKS], dtype=dtype, behind=24, **shape)
    check(case, case.some(20))


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_an_index_are_normalised_turned_and_written_behind_latents(dtype: torch.dtype) -> None:
    case = latent_case([(1, 40), (50, 131), (7, 7)], dtype=dtype, behind=24)
    keys, norm = torch.randn((58, 24)).to(dtype), LayerNorm(torch.rand(24) + 0.5, torch.randn(24), 1e-6)
    written, expected = case.kv_layer.clone(), case.kv_layer.clone()
    write_index_keys(Launcher(), keys, norm, case.cos_sin, written, case.layout)
    context_index.write_index_keys(keys, norm, case.cos_sin, expected, case.layout)
    launcher, replayed = Launcher(), case.kv_layer.clone()
    with launcher.recording() as program:
        write_index_keys(launcher, keys, norm, case.cos_sin, replayed, case.layout)
    program.replay()
    torch.testing.assert_close(replayed, written, rtol=0, atol=0, equal_nan=True)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(written, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_can_be_recorded(dtype: torch.dtype) -> None:
    if not is_supported(dtype):
        pytest.skip(f"on this CPU torch multiplies in {dtype}, and no step of latents is recorded")
    case, launcher = latent_case(DECODES, dtype=dtype), Launcher()
    attention = mla.CpuMLA(case.heads, launcher)
    with torch.inference_mode(), launcher.recording() as program:
        out = launcher.arena.borrow(attention(case.q, case.cos_sin, case.kv_layer, case.layout))
    program.replay()
    torch.testing.assert_close(out, attention(case.q, case.cos_sin, case.kv_layer, case.layout), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_context_are_merged(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "PART_TOKENS", 32)
    check(latent_case([(60, 60), (50, 131), (40, 192)], dtype=dtype))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_that_share_the_tokens_of_a_context_equal_the_reference(
    dtype: torch.dtype, shape: dict[str, int], ranks: int
) -> None:
    case = latent_case([*DECODES, *CHUNKS], dtype=dtype, **({"heads": 4} | shape))

    def attend(part: MLACase, group: GroupRanks) -> torch.Tensor:
        attention = mla.CpuMLA(part.heads, Launcher(), ContextParts(group))
        return attention(part.q, part.cos_sin, part.kv_layer, part.layout)

    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(over_ranks(case, ranks, attend), case.expected(), rtol=tolerance, atol=tolerance)


def test_a_cpu_without_our_instructions_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "is_supported", lambda dtype: False)
    check(latent_case([(1, 40), (50, 131)]))


@pytest.mark.parametrize("behind", [0, 24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_normalised_turned_and_written_where_they_belong(dtype: torch.dtype, behind: int) -> None:
    case = latent_case([(1, 40), (50, 131), (7, 7)], dtype=dtype, behind=behind)
    rows = torch.randn((58, 64)).to(dtype)
    norm, written, expected = torch.rand(48) + 0.5, case.kv_layer.clone(), case.kv_layer.clone()
    layout = case.layout
    layout.slots[3] = -1  # another rank's
    write_latents(Launcher(), rows, norm, 1e-6, case.cos_sin, written, layout)
    reference.write_latents(rows, norm, 1e-6, case.cos_sin, expected, layout.positions, layout.slots)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(written, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
