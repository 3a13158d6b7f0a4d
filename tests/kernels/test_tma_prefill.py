import pytest
import torch

from tests.kernels.paged_cases import PagedCase, assert_close, paged_case
from twostroke.model.cuda.kernels.launch import A100, B200, H100, Architecture, Target
from twostroke.model.cuda.kernels.prefill_attention import paged_attention_reference
from twostroke.model.cuda.kernels.tma_prefill import (
    LEAST_QUERY_LEN,
    TmaPrefillConfig,
    tma_prefill_attention,
    tma_prefill_config,
)

pytestmark = pytest.mark.usefixtures("interpreter")
# Few enough programs that each works off several tiles.
SMALL_HOPPER = Target(Architecture.HOPPER, multiprocessors=3, specializes_warps=True)


def check(case: PagedCase, config: TmaPrefillConfig, target: Target = SMALL_HOPPER) -> None:
    layout = case.layout
    tensors = (layout.query_starts, layout.context_lens, layout.block_tables)
    out = torch.full_like(case.q.flatten(1), float("nan"))
    tma_prefill_attention(case.q, case.kv_layer, *tensors, len(case.q), out, target, config)
    assert_close(out, paged_attention_reference(case.q, case.kv_layer, *tensors))


def config_of(target: Target, dim: int, block_size: int, dtype: torch.dtype = torch.float16) -> TmaPrefillConfig:
    config = tma_prefill_config(target, dim, dtype, block_size, 4096)
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("dim", "block_size", "dtype"),
    [
        (64, 64, torch.bfloat16),
        (64, 128, torch.float16),
        (80, 64, torch.float16),
        (96, 128, torch.bfloat16),
        (128, 64, torch.float16),
        (128, 128, torch.bfloat16),
        (256, 64, torch.float16),
        (256, 128, torch.bfloat16),
        (16, 192, torch.float16),
    ],
)
def test_tma_prefill_equals_its_reference_with_the_tables_own_tiles(
    dim: int, block_size: int, dtype: torch.dtype
) -> None:
    case = paged_case([(2, 2), (90, 170)], heads=2, groups=1, dim=dim, block_size=block_size, dtype=dtype)
    check(case, config_of(H100, dim, block_size, dtype))


def test_tma_prefill_equals_its_reference_with_blackwells_tiles() -> None:
    check(paged_case([(90, 170)], heads=2, groups=2, block_size=64, dtype=torch.float16), config_of(B200, 64, 64))


@pytest.mark.parametrize(("block_size", "block_n"), [(64, 64), (64, 32), (128, 128), (128, 64)])
def test_tma_prefill_is_right_at_the_edges_of_blocks_and_tiles(block_size: int, block_n: int) -> None:
    lengths = [(n, n) for n in (1, block_size - 1, block_size, block_size + 1, 127, 128, 129)]
    lengths += [(1, block_size), (1, block_size + 1), (3, 2 * block_size - 1), (130, 2 * block_size + 131)]
    case = paged_case(lengths, heads=1, groups=1, dim=16, block_size=block_size, dtype=torch.float16)
    check(case, TmaPrefillConfig(block_n, num_warps=4, num_stages=2, specialized=True))


def test_tma_prefill_is_right_after_a_cached_prefix_of_any_alignment() -> None:
    lengths = [(2, prefix + 2) for prefix in range(66)]
    case = paged_case(lengths, heads=1, groups=1, dim=16, block_size=64, dtype=torch.float16)
    check(case, TmaPrefillConfig(64, num_warps=4, num_stages=2, specialized=True))


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (7, 1)])
def test_tma_prefill_gives_each_head_its_groups_keys(heads: int, groups: int) -> None:
    lengths = [(1, 9), (18, 18), (17, 140)]
    case = paged_case(lengths, heads=heads, groups=groups, dim=16, block_size=64, dtype=torch.float16)
    check(case, config_of(H100, 16, 64))


def test_tma_prefill_passes_over_sequences_without_queries() -> None:
    case = paged_case([(0, 0), (5, 20), (0, 70), (130, 133), (0, 0)], dim=16, block_size=64, dtype=torch.float16)
    check(case, config_of(H100, 16, 64))


def test_tma_prefill_leaves_the_rows_before_its_sequences_alone() -> None:
    case = paged_case([(1, 70), (1, 3), (66, 66), (5, 90)], heads=2, groups=1, block_size=64, dtype=torch.float16)
    layout = case.layout
    out = torch.full_like(case.q.flatten(1), float("nan"))
    chunks = (layout.query_starts[2:], layout.context_lens[2:], layout.block_tables[2:])
    tma_prefill_attention(case.q, case.kv_layer, *chunks, 71, out, SMALL_HOPPER, config_of(H100, 64, 64))
    assert out[:2].isnan().all()
    whole = (layout.query_starts, layout.context_lens, layout.block_tables)
    assert_close(out[2:], paged_attention_reference(case.q, case.kv_layer, *whole)[2:])


def test_tma_prefill_neither_overflows_on_large_scores_nor_loses_the_largest() -> None:
    case = paged_case([(40, 50), (33, 133)], block_size=64, dtype=torch.float16)
    case.q.mul_(300)
    check(case, config_of(H100, 64, 64))


def test_what_tma_is_not_for_is_left_to_the_other_kernel() -> None:
    def config(
        target: Target = H100, dim: int = 128, dtype: torch.dtype = torch.bfloat16, block: int = 64, length: int = 4096
    ) -> TmaPrefillConfig | None:
        return tma_prefill_config(target, dim, dtype, block, length)

    assert config() is not None
    assert config(length=LEAST_QUERY_LEN) is not None
    assert config(length=LEAST_QUERY_LEN - 1) is None
    assert config(target=A100) is None
    assert config(dtype=torch.float32) is None
    assert [config(block=block) for block in (16, 24, 32, 96)] == [None] * 4
    assert config(dim=100) is None  # rows of 200 bytes
    assert config(dim=512) is None
    assert config(target=B200, dim=256) is None


def test_tma_prefills_steps_are_as_long_as_blocks_and_shared_memory_allow() -> None:
    assert config_of(H100, 128, 128).block_n == 128
    assert config_of(H100, 128, 64).block_n == 64
    assert config_of(H100, 96, 192).block_n == 64
    assert config_of(H100, 256, 128).block_n == 32
    assert not config_of(B200, 128, 128).specialized
