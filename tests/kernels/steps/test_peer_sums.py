"""Sums over peers' memory: ranks are processes here, which wait for each other over memory that they share."""

from collections.abc import Callable
from multiprocessing import get_context

import pytest
import torch
from torch._C import _distributed_c10d

from twostroke.model import reference
from twostroke.model.cuda.kernels.peer_sums import MOST_ROWS, PeerSums, memory_bytes, registered_group

HIDDEN, EPS = 48, 1e-5
ROWS = (3, 1, 5, 5, 2)  # of one sum after the other


def shared(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros at the same address in this process and in those that it forks."""
    return torch.zeros(shape, dtype=dtype).share_memory_()


def together(size: int, run: Callable[[int], None]) -> None:
    """Each rank in a process of its own, until all have ended well."""
    ranks = [get_context("fork").Process(target=run, args=(rank,)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
    hanging = [process for process in ranks if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    assert [process.exitcode for process in ranks] == [0] * size, f"{len(hanging)} ranks hang"


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_sum_of_all_with_the_residual_added_and_normed(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    memories = [shared(memory_bytes(size, HIDDEN, dtype), dtype=torch.uint8) for _ in range(size)]
    xs = [[torch.randn(rows, HIDDEN).to(dtype) for rows in ROWS] for _ in range(size)]
    residuals = [torch.randn(rows, HIDDEN).to(dtype) for rows in ROWS]
    weight = torch.randn(HIDDEN)
    outs = [[shared(rows, HIDDEN, dtype=dtype) for rows in ROWS] for _ in range(2 * size)]

    def run(rank: int) -> None:
        sums = PeerSums(memories[rank], [memory.data_ptr() for memory in memories], rank, HIDDEN, dtype)
        sums._turns.fill_(2**31 - 3)  # turns wrap
        for i in range(len(ROWS)):
            while rank == size - 1 and not (sums._flags[0, :rank] == sums._turns[0] + 1).all():
                pass  # the others come first, and must wait
            assert sums.takes(xs[rank][i])
            out, total = sums.sum_add_norm(xs[rank][i], residuals[i].clone(), weight, EPS)
            outs[rank][i].copy_(out)
            outs[size + rank][i].copy_(total)

    for memory in memories:
        memory[: MOST_ROWS * size * 4].view(torch.int32).fill_(2**31 - 3)
    together(size, run)
    for i in range(len(ROWS)):
        total = torch.zeros(ROWS[i], HIDDEN)
        for rank in range(size):
            total += xs[rank][i].float()
        expected, expected_sum = reference.add_rms_norm(total.to(dtype), residuals[i].clone(), weight, EPS)
        for rank in range(size):
            assert torch.equal(outs[size + rank][i], expected_sum)
            assert torch.equal(outs[rank][i], outs[0][i])
            torch.testing.assert_close(outs[rank][i], expected)


@pytest.mark.usefixtures("interpreter")
def test_a_rank_that_gives_up_waits_for_nobody() -> None:
    memories = [shared(memory_bytes(2, HIDDEN, torch.float32), dtype=torch.uint8) for _ in range(2)]

    def run(rank: int) -> None:
        if rank == 0:
            sums = PeerSums(memories[0], [memory.data_ptr() for memory in memories], 0, HIDDEN, torch.float32)
            sums.give_up()
            for _ in range(3):
                sums.sum_add_norm(torch.ones(2, HIDDEN), torch.ones(2, HIDDEN), torch.ones(HIDDEN), EPS)

    together(2, run)


def test_sums_of_many_bytes_other_widths_and_dtypes_are_left_to_nccl() -> None:
    own = torch.zeros(memory_bytes(8, 8192, torch.bfloat16), dtype=torch.uint8)
    sums = PeerSums(own, [0, 0, 0, 0], 1, 4096, torch.bfloat16)
    assert sums.takes(torch.empty(64, 4096, dtype=torch.bfloat16))
    assert not sums.takes(torch.empty(65, 4096, dtype=torch.bfloat16))
    narrow = PeerSums(own, [0] * 2, 1, 512, torch.bfloat16)
    assert not narrow.takes(torch.empty(65, 512, dtype=torch.bfloat16))
    wide = PeerSums(own, [0] * 8, 1, 8192, torch.bfloat16)
    assert wide.takes(torch.empty(16, 8192, dtype=torch.bfloat16))
    assert not wide.takes(torch.empty(17, 8192, dtype=torch.bfloat16))
    assert not sums.takes(torch.empty(0, 4096, dtype=torch.bfloat16))
    assert not sums.takes(torch.empty(1, 2048, dtype=torch.bfloat16))
    assert not sums.takes(torch.empty(1, 4096))


def test_a_rendezvous_finds_rank_size_and_store_under_the_groups_name() -> None:
    store = _distributed_c10d.HashStore()
    for _ in range(2):  # an engine that is loaded anew registers the name again
        with registered_group("sums of a test", store, 1, 4):
            group = _distributed_c10d._resolve_process_group("sums of a test")
            assert (group.rank(), group.size()) == (1, 4)
            group.get_group_store().set("key", "value")
        assert store.get("key") == b"value"
        with pytest.raises(RuntimeError, match="sums of a test"):
            _distributed_c10d._resolve_process_group("sums of a test")
