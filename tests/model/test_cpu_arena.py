"""The arena never hands out memory that a living tensor uses, whatever is taken and dropped, and loses none."""

import random

import pytest
import torch

from twostroke.model.cpu.kernels.program import ALIGNMENT, CHUNK_BYTES, Arena


@pytest.mark.parametrize("seed", range(5))
def test_no_two_living_tensors_share_memory_and_all_memory_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    arena = Arena()
    living: list[tuple[torch.Tensor, int]] = []
    for step in range(400):
        if living and rng.random() < 0.48:
            tensor, value = living.pop(rng.randrange(len(living)))
            assert tensor.min() == tensor.max() == value
        else:
            shape = (rng.randint(1, 40), rng.choice([1, 3, 64, 5000]))
            tensor = arena.empty(shape, rng.choice([torch.float32, torch.bfloat16, torch.int32]))
            assert tensor.shape == shape
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % ALIGNMENT == 0
            value = step % 100
            living.append((tensor.fill_(value), value))
        del tensor
        assert arena.free_bytes + sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t, _ in living) == arena.num_bytes
    for tensor, value in living:
        assert tensor.min() == tensor.max() == value
    living.clear()
    del tensor
    assert arena.free_bytes == arena.num_bytes
    for chunk_bytes in [len(chunk) for chunk in arena._chunks]:  # merged again: whole chunks can be had
        living.append((arena.empty((chunk_bytes,), torch.uint8), 0))
    assert arena.free_bytes == 0


def test_a_place_is_used_again_once_the_last_view_of_it_is_gone() -> None:
    arena = Arena()
    with torch.inference_mode():  # where torch does not remember what a view is a view of
        first = arena.empty((4, 16), torch.float32)
        address = first.data_ptr()
        view = first.view(64)[32:]
        del first
        assert arena.empty((4, 16), torch.float32).data_ptr() != address
        del view
        assert arena.empty((4, 16), torch.float32).data_ptr() == address


def test_a_tensor_larger_than_a_chunk_fits() -> None:
    arena = Arena()
    tensor = arena.empty((CHUNK_BYTES, 3), torch.bfloat16)
    assert tensor.fill_(1).sum(dtype=torch.float32) == 3 * CHUNK_BYTES
    assert arena.empty((), torch.float32).shape == ()


def test_a_borrowed_tensor_shares_memory_but_does_not_hold_it() -> None:
    arena = Arena()
    arena.empty((CHUNK_BYTES,), torch.uint8)
    tensor = arena.empty((3, 5), torch.float32)
    borrowed = arena.borrow(tensor)
    tensor.fill_(7)
    assert torch.equal(borrowed, tensor)
    del tensor
    assert arena.free_bytes == arena.num_bytes
    with pytest.raises(ValueError, match="not of this arena"):
        arena.borrow(torch.zeros(3))
