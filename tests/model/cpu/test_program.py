"""Recorded programs do what the same launches do one by one.

The arena never hands out memory that a living tensor uses, whatever is taken and dropped, and loses none.
"""

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cpu.kernels import elementwise
from twostroke.model.cpu.kernels.launch import (
    ALIGNMENT,
    Arena,
    Kernel,
    Launcher,
    NotRecordable,
    Program,
    as_integers,
    taken,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=[1, 2, 5], ids=lambda count: f"{count}_threads")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


@Kernel
def ADD(words):
    """words: values, and how many of them each item reads: item i adds to value i all that come after it."""
    items, values, count = words[1], as_integers(words[3]), words[4]
    for item in taken(words, items):
        total = 0
        for other in range(items, items + count):
            total += values[other]
        values[item] += total


@Kernel
def ADD_AS_MANY_AS_ASKED(words):
    """words: values, where the number of items stands. Items are each a step of a counter."""
    values = as_integers(words[3])
    for item in taken(words, as_integers(words[4])[0]):
        values[item] += 1


@pytest.mark.usefixtures("_threads")
def test_every_kernel_sees_all_of_what_those_before_it_wrote() -> None:
    """Each kernel reads what the one before has written into the other half, on whichever thread."""
    half, rounds, replays = 64, 30, 20
    values = torch.ones(3 * half, dtype=torch.int64)
    program = Program()
    for place in itertools.islice(itertools.cycle([half, 0]), rounds):
        program.append(ADD, half, 1, values[place:], half)
    expected = values.clone()
    for place in itertools.islice(itertools.cycle([half, 0]), rounds * replays):
        expected[place : place + half] += expected[place + half : place + 2 * half].sum()
    assert len(program) == rounds
    for _ in range(replays):
        program.replay()
    assert torch.equal(values, expected)  # integers wrap around the same way in both


@pytest.mark.usefixtures("_threads")
def test_a_kernel_may_take_another_number_of_items_at_every_replay() -> None:
    values, asked = torch.zeros(1000, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    program = Program()
    program.append(ADD_AS_MANY_AS_ASKED, 0, 1, values, asked)
    expected = torch.zeros_like(values)
    for count in (1000, 0, 3, 999, 1, 128):
        asked[0] = count
        expected[:count] += 1
        program.replay()
        assert torch.equal(values, expected)


def test_a_program_of_nothing_does_nothing() -> None:
    Program().replay()


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recording_computes_what_the_calls_do_at_every_replay(dtype: torch.dtype) -> None:
    backend = CpuBackend()
    x = torch.empty(6, 64, dtype=dtype)
    weight, narrow = torch.randn(64), torch.randn(32)

    def layers() -> Tensor:
        wide = x
        for _ in range(4):
            normed = backend.rms_norm(wide, weight, 1e-5)
            wide, _ = backend.add_rms_norm(normed, backend.rms_norm(normed, weight, 1e-6), weight, 1e-5)
        return backend.rms_norm(elementwise.gate(backend.launcher, wide, "silu"), narrow, 1e-5)

    with backend.launcher.recording() as program:
        out = layers()
    assert backend.launcher.arena.num_bytes > backend.launcher.arena.free_bytes > 0  # only the result is held
    for seed in range(3):
        x.copy_(torch.randn(6, 64, generator=torch.Generator().manual_seed(seed)))
        program.replay()
        assert torch.equal(out, layers())


def test_what_only_torch_can_compute_is_refused_and_the_launcher_goes_on() -> None:
    backend = CpuBackend()
    x, weight = torch.ones(2, 8), torch.ones(8)
    with backend.launcher.recording():
        assert x.view(16)[3:].shape == (13,)  # a view computes nothing
        with pytest.raises(NotRecordable, match="add"):
            x + x
    assert torch.equal(backend.rms_norm(x, weight, 0.0), x)


def test_outside_of_a_recording_kernels_run_at_once() -> None:
    launcher = Launcher()
    values = torch.tensor([1, 2, 3])
    launcher.run(ADD, 2, 1, values, 1)
    assert values.tolist() == [4, 5, 3]


def test_recording_does_not_import_torchs_compiler_which_takes_a_second() -> None:
    code = """
import sys
import torch
from twostroke.model.cpu.kernels.launch import Launcher
launcher = Launcher()
with launcher.recording():
    launcher.empty((2, 3), torch.float32).view(3, 2)
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


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
    for tensor, value in living:
        assert tensor.min() == tensor.max() == value
    living.clear()
    del tensor
    assert arena.free_bytes == arena.num_bytes


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


def test_a_borrowed_tensor_shares_memory_but_does_not_hold_it() -> None:
    arena = Arena()
    tensor = arena.empty((3, 5), torch.float32)
    borrowed = arena.borrow(tensor)
    tensor.fill_(7)
    assert torch.equal(borrowed, tensor)
    del tensor
    assert arena.free_bytes == arena.num_bytes
    with pytest.raises(ValueError, match="does not begin a place of this arena"):
        arena.borrow(torch.zeros(3))
