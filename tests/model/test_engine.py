"""The engine's thread: order of announcements, cancellation, failure and end; and loading a folder into one."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.rigs.engine_runner import greedy_tokens
from twostroke.model.cache.layer_announcer import LaunchedStep
from twostroke.model.checkpoint.weights import SINGLE_FILE
from twostroke.model.engine import ThreadEngine
from twostroke.model.engine_config import EngineConfig, resolve_dtype
from twostroke.model.load import load_engine
from twostroke.model.runner import ModelRunner
from twostroke.model.step import Draw, SequenceStep, with_drawn_tokens
from twostroke.protocol.errors import ConfigError, WorkerLost
from twostroke.protocol.requests import SampledToken, SamplingParams

BATCH = [SequenceStep([1], 0, [0], None)]


class FakeRunner:
    """Announces two layers, waiting for `gate` between them; records what it ran."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.ran: list[Sequence[SequenceStep]] = []
        self.threads: set[str] = set()
        self.error: Exception | None = None
        self.num_broken_rows = 2
        self.is_closed = False

    def launch(
        self,
        batch: Sequence[SequenceStep],
        on_layer: Callable[[int], None] | None = None,
        earlier: LaunchedStep | None = None,
    ) -> LaunchedStep:
        batch = with_drawn_tokens(batch, () if earlier is None else earlier.result())
        self.threads.add(threading.current_thread().name)
        if on_layer is not None:
            on_layer(0)
        self.entered.set()
        if not self.gate.wait(30):
            raise TimeoutError("the test never opened the gate")
        if self.error is not None:
            raise self.error
        if on_layer is not None:
            on_layer(1)
        self.ran.append(batch)
        return LaunchedStep([SampledToken(len(self.ran))])

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def engine_of() -> Any:
    """Makes engines of runners, and closes them."""
    engines: list[ThreadEngine] = []

    def make(runner: Any) -> ThreadEngine:
        engines.append(ThreadEngine(lambda: runner, threads=1))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(runner: FakeRunner, engine_of: Any) -> Any:
    yield engine_of(runner)
    runner.gate.set()


async def test_layers_are_announced_on_the_loop_while_the_step_runs(engine: ThreadEngine, runner: FakeRunner) -> None:
    seen: list[tuple[int, str]] = []
    first = asyncio.Event()

    def on_layer(layer: int) -> None:
        seen.append((layer, threading.current_thread().name))
        first.set()

    step = asyncio.create_task(engine.step(BATCH, on_layer))
    await first.wait()
    assert not step.done()
    runner.gate.set()
    assert await step == [SampledToken(1)]
    here = threading.current_thread().name
    assert seen == [(0, here), (1, here)]
    assert here not in runner.threads


async def test_a_cancelled_step_runs_to_its_end_and_the_next_one_waits(
    engine: ThreadEngine, runner: FakeRunner
) -> None:
    layers: list[int] = []
    cancelled = asyncio.create_task(engine.step(BATCH, layers.append))
    await asyncio.to_thread(runner.entered.wait, 30)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    announced = list(layers)
    following = asyncio.create_task(engine.step(BATCH))
    runner.gate.set()
    assert await following == [SampledToken(2)]
    assert layers == announced  # nobody wants to hear of the cancelled step any more
    assert len(runner.threads) == 1


async def test_steps_asked_for_while_one_runs_follow_in_order_and_go_on_with_what_it_drew(
    engine: ThreadEngine, runner: FakeRunner
) -> None:
    steps = [asyncio.create_task(engine.step(BATCH))]
    steps += [asyncio.create_task(engine.step([SequenceStep([0], 1, [0], None, follows=0)])) for _ in range(2)]
    await asyncio.to_thread(runner.entered.wait, 30)
    runner.gate.set()
    assert await asyncio.gather(*steps) == [[SampledToken(1)], [SampledToken(2)], [SampledToken(3)]]
    assert [tuple(step.token_ids) for (step,) in runner.ran] == [(1,), (1,), (2,)]


class UnderWay:
    """A step that a device has still to do."""

    is_done = False

    def __init__(self, token: int, has_ended: threading.Event):
        self._token = token
        self._has_ended = has_ended

    def result(self) -> list[Any]:
        if not self._has_ended.wait(30):
            raise TimeoutError("the test never ended the step")
        if self._token < 0:
            raise RuntimeError("an illegal memory access")
        return [SampledToken(self._token)]

    def on_device(self) -> None:
        return None


class LaunchingRunner:
    """Launches steps whose tokens come when `ends[i]` is set; a token below 0 is an error."""

    num_broken_rows = 0

    def __init__(self, tokens: Sequence[int]):
        self.ends = [threading.Event() for _ in tokens]
        self.launched: list[threading.Event] = [threading.Event() for _ in tokens]
        self.earlier: list[LaunchedStep | None] = []
        self._steps = [UnderWay(token, end) for token, end in zip(tokens, self.ends, strict=True)]

    def launch(self, batch: Any, on_layer: Any = None, earlier: LaunchedStep | None = None) -> LaunchedStep:
        self.earlier.append(earlier)
        index = len(self.earlier) - 1
        self.launched[index].set()
        return self._steps[index]

    def close(self) -> None: ...


async def test_a_step_is_launched_while_the_device_has_still_to_end_the_one_before(engine_of: Any) -> None:
    runner = LaunchingRunner([5, 6])
    engine = engine_of(runner)
    steps = [asyncio.create_task(engine.step(BATCH)) for _ in range(2)]
    assert await asyncio.to_thread(runner.launched[1].wait, 30)
    assert not steps[0].done()
    assert runner.earlier[0] is None
    assert isinstance(runner.earlier[1], UnderWay)
    runner.ends[1].set()
    runner.ends[0].set()
    assert await asyncio.gather(*steps) == [[SampledToken(5)], [SampledToken(6)]]


async def test_a_launched_step_is_waited_for_though_the_event_loop_is_busy(engine_of: Any) -> None:
    runner = LaunchingRunner([5])
    collecting = threading.Event()

    class Noting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            collecting.set()
            return super().wait(timeout)

    runner._steps[0]._has_ended = end = Noting()
    step = asyncio.create_task(engine_of(runner).step(BATCH))
    await asyncio.sleep(0)
    assert collecting.wait(20), "on the event loop's thread, which does nothing else meanwhile"
    end.set()
    assert await step == [SampledToken(5)]


async def test_closing_drops_the_steps_that_wait(engine: ThreadEngine, runner: FakeRunner) -> None:
    steps = [asyncio.create_task(engine.step(BATCH)) for _ in range(3)]
    await asyncio.to_thread(runner.entered.wait, 30)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    with pytest.raises(asyncio.CancelledError):
        await steps[2]
    runner.gate.set()
    await closing
    assert [step.cancelled() for step in steps[1:]] == [True, True]
    assert await steps[0] == [SampledToken(1)]


async def test_a_step_that_fails_on_the_device_ends_the_engine(engine_of: Any) -> None:
    runner = LaunchingRunner([-1, 6])
    engine = engine_of(runner)
    runner.ends[0].set()
    with pytest.raises(WorkerLost, match="illegal memory access"):
        await engine.step(BATCH)
    with pytest.raises(WorkerLost, match="dead since"):
        await engine.step(BATCH)


async def test_a_step_behind_one_that_fails_does_nothing(engine: ThreadEngine, runner: FakeRunner) -> None:
    runner.error = RuntimeError("out of memory")
    steps = [asyncio.create_task(engine.step(BATCH)) for _ in range(2)]
    await asyncio.to_thread(runner.entered.wait, 30)
    runner.gate.set()
    first, second = await asyncio.gather(*steps, return_exceptions=True)
    assert "out of memory" in str(first)
    assert "dead since" in str(second)
    assert runner.ran == []


def test_a_step_that_follows_where_nothing_was_drawn_is_refused() -> None:
    step = SequenceStep([0], 1, [0], None, follows=0)
    for drawn in ([], [None]):
        with pytest.raises(ValueError, match="drew no token"):
            with_drawn_tokens([step], drawn)


async def test_closing_waits_for_the_step_under_way_and_ends_the_thread(
    engine: ThreadEngine, runner: FakeRunner
) -> None:
    step = asyncio.create_task(engine.step(BATCH))
    await asyncio.to_thread(runner.entered.wait, 30)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    runner.gate.set()
    await closing
    assert await step == [SampledToken(1)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("engine")]
    assert runner.is_closed
    with pytest.raises(RuntimeError):
        await engine.step(BATCH)


def test_an_error_of_the_builder_leaves_no_thread() -> None:
    def fail() -> Any:
        raise ConfigError("no such folder")

    with pytest.raises(ConfigError, match="no such folder"):
        ThreadEngine(fail, threads=1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("engine")]


def cores_of_threads() -> dict[str, str]:
    """Return the cores of all threads of this process, by their ids, as the kernel writes them."""
    cores = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread of another test has just ended
            lines = (task / "status").read_text(encoding="ascii").splitlines()
            [cores[task.name]] = [line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:")]
    return cores


def test_an_engine_and_its_pool_keep_to_their_cores() -> None:
    core = max(os.sched_getaffinity(0))
    before = cores_of_threads()

    def build() -> Any:
        torch.set_num_threads(3)
        torch.ones(1 << 20).sum()  # makes the pool
        return FakeRunner()

    engine = ThreadEngine(build, threads=1, cores=[core])
    try:
        after = cores_of_threads()
        assert [after[thread] for thread in after.keys() - before.keys()] == [str(core)] * 3
        assert all(after[thread] == before[thread] for thread in after.keys() & before.keys())
    finally:
        engine.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
async def test_a_loaded_folder_steps(dtype: torch.dtype, write_checkpoint: Any) -> None:
    loaded = load_engine(EngineConfig(write_checkpoint(dtype=dtype), num_blocks=8, block_size=4, threads=1))
    try:
        assert (loaded.num_blocks, loaded.max_context) == (8, 32)
        assert loaded.kv_cache.layout.block_size == 4
        draw = Draw(SamplingParams(temperature=0.0), [1, 2, 3], 3)
        (token,) = await loaded.engine.step([SequenceStep([1, 2, 3], 0, [5], draw)])
        assert token is not None
        assert 0 <= token.token_id < loaded.model_config.vocab_size
        assert loaded.engine.num_broken_rows == 0
    finally:
        loaded.engine.close()


def test_an_engine_continues_prompts_alike_however_they_are_cut_into_chunks(
    write_checkpoint: Any, generate: Callable[..., list[list[int]]]
) -> None:
    """The rig of tests/gpu runs here on a CPU, so that it can't break unseen where there is no GPU."""
    config = EngineConfig(write_checkpoint(), device="cpu", dtype="float32", num_blocks=32, block_size=4, threads=1)
    whole, cut = (greedy_tokens(config, generate, [[44], [15, 53, 3, 67, 27], [24, 12]], 5, chunk) for chunk in (16, 3))
    assert whole == cut


def test_a_folder_whose_weights_are_no_numbers_is_refused_by_name(write_checkpoint: Any) -> None:
    folder = write_checkpoint(num_hidden_layers=2)
    tensors = load_file(folder / SINGLE_FILE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"the logits of a first prompt are NaN or infinite: the weights are broken"):
        load_engine(EngineConfig(folder, num_blocks=8, block_size=4, threads=1))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"kv_cache_bytes": 100}, "100 bytes does not hold one block"),
        ({"num_blocks": 4, "max_context": 65}, "65 tokens don't fit into 4 blocks of 16"),
        ({"num_blocks": 4, "max_context": 2000}, "1 to 1024"),
        ({"num_blocks": 4, "cores": (0, 99999)}, "cores: 99999 is none of the "),
        (
            {"kv_cache_bytes": 2**60},
            r"too little memory on cpu: weights .* \+ KV cache .* \+ largest step .* = .*, but only .* are free",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_line(settings: Any, complaint: str, write_checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_engine(EngineConfig(write_checkpoint(), threads=1, **settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "checkpoint", "device", "fast", "expected"),
    [
        ("auto", torch.bfloat16, "cpu", True, torch.bfloat16),
        ("auto", torch.float16, "cpu", True, torch.float32),
        ("auto", torch.bfloat16, "cpu", False, torch.float32),
        ("auto", torch.float32, "cpu", True, torch.float32),
        ("auto", torch.float16, "cuda", True, torch.float16),
        ("bfloat16", torch.float32, "cpu", False, torch.bfloat16),
        ("float32", torch.bfloat16, "cuda", True, torch.float32),
    ],
)
def test_the_dtype_follows_choice_checkpoint_and_device(
    choice: str,
    checkpoint: torch.dtype,
    device: str,
    fast: bool,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twostroke.model.engine_config.has_fast_bf16", lambda: fast)
    assert resolve_dtype(choice, checkpoint, torch.device(device)) == expected


def test_a_start_draws_with_each_filter_once_so_that_no_request_waits_for_kernels(
    write_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, drawn = ModelRunner.run, list[SamplingParams]()

    def recorded(self: ModelRunner, batch: Sequence[SequenceStep]) -> Any:
        drawn.extend(step.draw.sampling for step in batch if step.draw is not None)
        return run(self, batch)

    monkeypatch.setattr(ModelRunner, "run", recorded)
    load_engine(EngineConfig(write_checkpoint(), num_blocks=8, block_size=4, threads=1)).engine.close()
    assert any(one.temperature > 0 and one.top_k > 1 for one in drawn)
    assert any(one.temperature > 0 and one.top_p < 1 for one in drawn)


def test_a_gpu_that_runs_out_of_memory_is_one_line(write_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr("twostroke.model.load._warm_up", fail)
    with pytest.raises(ConfigError, match=r"weights .* MiB .* lower kv_cache_gib.*2\.00 GiB\.\)$"):
        load_engine(EngineConfig(write_checkpoint(), num_blocks=8, block_size=4, threads=1))
