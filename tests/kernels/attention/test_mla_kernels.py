"""MLA by Triton's kernels against the plain torch reference; what no kernel may read is NaN."""

import threading
from typing import Any

import pytest
import torch

from tests.kernels.paged_cases import MLACase, assert_close, latent_case, over_ranks
from tests.rigs import reference
from twostroke.model.architectures import context_index
from twostroke.model.cuda import mla
from twostroke.model.cuda.kernels.launch import H100, Architecture, GpuTarget
from twostroke.model.cuda.kernels.mla import write_latents
from twostroke.model.parallel.tensor_parallel import ContextParts, GroupRanks

pytestmark = pytest.mark.usefixtures("interpreter")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Few enough programs that contexts are split.
SMALL = GpuTarget(Architecture.SMALL, multiprocessors=3)


def check(case: MLACase, target: GpuTarget, chosen: torch.Tensor | None = None) -> None:
    attention = mla.CudaMLA(case.heads, target)
    out = attention(case.q.clone(), case.cos_sin, case.kv_layer, case.layout, chosen)
    assert_close(out, case.expected(chosen), scale=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [H100, SMALL])
def test_decodes_and_chunks_equal_the_reference(dtype: torch.dtype, target: GpuTarget) -> None:
    check(latent_case([(1, 1), (1, 16), (1, 150), (3, 3), (20, 50)], dtype=dtype), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_be_longer_than_what_is_attended_to(dtype: torch.dtype) -> None:
    check(latent_case([(1, 1), (1, 150), (20, 50)], dtype=dtype, behind=24), SMALL)


@pytest.mark.parametrize("gathered_bytes", [1 << 20, 40_000], ids=["at once", "in parts"])
def test_queries_attend_to_chosen_tokens_alone(gathered_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_index, "GATHERED_BYTES", gathered_bytes)
    case = latent_case([(1, 1), (1, 16), (1, 150), (20, 50)], behind=24)
    check(case, SMALL, case.some(20))


@pytest.mark.parametrize("lengths", [(500, 9, 1, 30, 17), (3, 0, 300, 200, 0), (64,) * 5, (260,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decodes_of_skewed_lengths_and_padding_rows_equal_the_reference(
    lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    case = latent_case([(1, max(1, length)) for length in lengths], dtype=dtype)
    case.layout.context_lens.copy_(torch.tensor(lengths))
    check(case, SMALL)


@pytest.mark.parametrize("shape", [{"heads": 20}, {"rank": 40, "rotary": 8, "key": 13, "value": 70, "block_size": 5}])
def test_heads_of_any_number_and_width(shape: dict[str, Any]) -> None:
    check(latent_case([(1, 70), (9, 40)], **shape), SMALL)


def test_parts_of_contexts_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "PART_TOKENS", 64)  # of three chunks: one block each
    check(latent_case([(40, 40), (17, 75), (2, 90)]), SMALL)


@pytest.mark.parametrize("behind", [0, 24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_normalised_turned_and_written_where_they_belong(dtype: torch.dtype, behind: int) -> None:
    case = latent_case([(1, 40), (20, 31), (7, 7)], dtype=dtype, behind=behind)
    layout = case.layout
    layout.slots[3] = -1  # a padding row of a captured graph
    rows = torch.randn((28, 64)).to(dtype)
    norm, written, expected = torch.rand(48) + 0.5, case.kv_layer.clone(), case.kv_layer.clone()
    write_latents(rows, norm, 1e-6, case.cos_sin, written, layout)
    reference.write_latents(rows, norm, 1e-6, case.cos_sin, expected, layout.positions, layout.slots)
    assert_close(written, expected, scale=2.0)


class OneAtATime(ContextParts):
    """Ranks as threads, of which one runs between exchanges: Triton's interpreter is for one thread."""

    running = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("of_all_heads", "merged", "whole_blocks"):
            return found

        def exchange(*arguments: torch.Tensor) -> torch.Tensor:
            self.running.release()
            try:
                result: torch.Tensor = found(*arguments)
                return result
            finally:
                self.running.acquire()

        return exchange


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_share_the_tokens_of_a_context_equal_the_reference(
    ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla, "PART_TOKENS", 64)
    # The first context has tokens on one rank alone, and with so few programs the longest is split.
    case = latent_case([(1, 1), (1, 16), (1, 150), (3, 3), (20, 50)], heads=4, dtype=dtype)

    def attend(part: MLACase, group: GroupRanks) -> torch.Tensor:
        parts = OneAtATime(group)
        with parts.running:
            return mla.CudaMLA(part.heads, SMALL, parts)(part.q, part.cos_sin, part.kv_layer, part.layout)

    assert_close(over_ranks(case, ranks, attend), case.expected(), scale=4.0)
