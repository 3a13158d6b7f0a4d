"""The runner's way from sequence steps to tensors and back: layouts, order of results, and invalid batches."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.conftest import make_decoder
from twostroke.model.batch import CheckedTables, check_batch, make_layout
from twostroke.model.cache.layer_announcer import LayerAnnouncer
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import GenerateRequest, SampledToken, SamplingParams
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.job import SequenceState, WorkerJob

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


class ArgmaxSampler:
    """Remembers the positions it was asked for."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.num_broken_rows = 0

    def sample(self, logits: Tensor, draws: Any, positions: Any, masks: Any = None) -> list[SampledToken]:
        assert logits.dtype == torch.float32
        assert len(logits) == len(draws) == len(positions)
        self.positions = list(positions)
        return [SampledToken(token) for token in logits.argmax(-1).tolist()]


@pytest.fixture(scope="module")
def model(write_checkpoint: Any) -> tuple[ModelRunner, ArgmaxSampler]:
    decoder, cache = make_decoder(write_checkpoint(), CpuBackend(), num_blocks=16, block_size=4, max_context=64)
    sampler = ArgmaxSampler()
    return ModelRunner(decoder, sampler, cache, max_context=64), sampler


def draw() -> Draw:
    return Draw(GREEDY, [1], 1)


def test_a_layout_places_every_token() -> None:
    steps = [
        SequenceStep([1], 5, [7, 2, 9], None),
        SequenceStep([1, 2, 3], 2, [4, 6], None),
        SequenceStep([1, 2], 0, [5], None),
    ]
    layout = make_layout(steps, 4, CPU)
    assert layout.positions.tolist() == [5, 2, 3, 4, 0, 1]
    assert layout.slots.tolist() == [2 * 4 + 1, 4 * 4 + 2, 4 * 4 + 3, 6 * 4, 5 * 4, 5 * 4 + 1]
    assert layout.query_starts.tolist() == [0, 1, 4, 6]
    assert layout.context_lens.tolist() == [6, 5, 2]
    assert layout.block_tables.tolist() == [[7, 2], [4, 6], [5, 0]]
    assert (layout.num_decodes, layout.max_query_len, layout.max_context_len) == (1, 3, 6)
    assert layout.positions.dtype == layout.slots.dtype == torch.int64
    assert layout.query_starts.dtype == layout.context_lens.dtype == layout.block_tables.dtype == torch.int32


def test_results_come_in_the_callers_order(model: tuple[ModelRunner, ArgmaxSampler]) -> None:
    runner, sampler = model
    steps = [
        SequenceStep([5, 6, 7], 0, [0], draw()),
        SequenceStep([8], 0, [1], draw()),
        SequenceStep([9, 10], 0, [2], None),
        SequenceStep([11], 0, [3], draw()),
    ]
    together = runner.run(steps)
    assert sampler.positions == [1, 1, 3]  # decodes first
    assert together[2] is None
    assert together == [runner.run([step])[0] for step in steps]


def test_a_prompt_whose_end_is_copied_from_another_block_draws_the_same(
    model: tuple[ModelRunner, ArgmaxSampler],
) -> None:
    runner, _ = model
    prompt = [5, 6, 7, 8, 9, 10, 11]
    (alone,) = runner.run([SequenceStep(prompt, 0, [0, 1], draw())])
    runner.run([SequenceStep([3, 4], 7, [0, 1, 4], None)])  # its owner goes on behind the prompt
    runner.run([SequenceStep([1, 2, 3, 4], 0, [2], None)])
    (copied,) = runner.run([SequenceStep([11], 6, [0, 2], draw(), copied_from=1)])
    assert copied == alone
    (garbage,) = runner.run([SequenceStep([11], 6, [0, 3], draw())])
    assert garbage != alone, "else the block made no difference"


def test_a_step_asks_nothing_of_the_one_before_that_nobody_follows(model: tuple[ModelRunner, ArgmaxSampler]) -> None:
    class Unfinished:
        is_done = False

        def result(self) -> list[SampledToken | None]:
            raise AssertionError("the step was waited for")

        def on_device(self) -> Tensor | None:
            raise AssertionError("the step was asked for its tokens")

    runner, _ = model
    step = SequenceStep([8], 0, [1], draw())
    assert runner.launch([step], earlier=Unfinished()).result() == runner.run([step])
    with pytest.raises(AssertionError, match="asked for its tokens"):
        runner.launch([SequenceStep([8], 0, [1], draw(), follows=0)], earlier=Unfinished())


class LaunchingSampler(Sampler):
    """Sampler like a GPU's: the host learns the drawn tokens only when it asks for them."""

    def launch(self, logits: Tensor, draws: Any, positions: Any, masks: Any = None) -> Any:
        tokens = torch.tensor([token.token_id for token in self.sample(logits, draws, positions, masks)])
        return SimpleNamespace(tokens=tokens, wait=tokens.tolist, collect=tokens.tolist)


@pytest.mark.parametrize("sampler", [Sampler, LaunchingSampler])
def test_rows_with_penalties_draw_the_same_while_the_token_before_is_under_way(
    sampler: type[Sampler], write_checkpoint: Any
) -> None:
    """Prompts and answers, scheduled as workers do: ahead of what is drawn, and one step after the other."""
    decoder, cache = make_decoder(write_checkpoint(seed=5), CpuBackend(), num_blocks=16, block_size=4, max_context=64)
    runner = ModelRunner(decoder, sampler(decoder.vocab_size), cache, max_context=64)
    sampling = SamplingParams(
        temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.4, bad_words=((7, 8), (9, 9))
    )
    answers = []
    for is_ahead in (False, True):
        pool = BlockPool(16, 4)
        requests = [GenerateRequest(f"{i}", "router", (5 + i, 6, 7), 3, sampling, 40) for i in range(2)]
        jobs = [WorkerJob(SequenceState(request, 4), 0.0) for request in requests]
        launched: list[tuple[list[Any], Any]] = []
        for number in range(20):
            entries = []
            for index, job in enumerate(jobs):
                follows = index if number and is_ahead else None
                num_tokens = 3 if number == 0 else 1
                job.sequence.reserve(pool, job.num_under_way + num_tokens)
                step = job.sequence.step(num_tokens, start=job.num_scheduled, follows=follows)
                job.begin_step(step)
                entries.append(step)
            launched.append((entries, runner.launch(entries, None, launched[-1][1] if launched else None)))
            # Ahead, what the step before drew is only told now that this one is launched.
            for _, ended in launched[-2:-1] if is_ahead else launched[-1:]:
                for job, token in zip(jobs, ended.result(), strict=True):
                    job.end_step()
                    job.sequence.num_computed = len(job.sequence.token_ids)
                    job.sequence.append(token.token_id)
        answers.append([job.sequence.token_ids[:22] for job in jobs])
        for job in jobs:
            job.sequence.reset(pool)
    assert answers[0] == answers[1]
    assert len(set(answers[0][0])) > 10, "penalties show"


def test_layers_are_announced_in_order_even_when_nothing_is_drawn(model: tuple[ModelRunner, ArgmaxSampler]) -> None:
    layers: list[int] = []
    assert model[0].run([SequenceStep([1, 2], 0, [0], None)], layers.append) == [None]
    assert layers == [0, 1]


def test_a_step_is_launched_while_layers_of_the_one_before_are_to_come_and_ends_with_its_own(
    model: tuple[ModelRunner, ArgmaxSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events complete when the test says so, as a GPU's do in their own time."""
    runner, _ = model
    events = [threading.Event() for _ in range(4)]
    recorded = iter(events)

    class Waited:
        def __init__(self) -> None:
            self._event = next(recorded)

        def synchronize(self) -> None:
            assert self._event.wait(30)

    told: list[tuple[int, int]] = []
    monkeypatch.setattr(runner, "_announcer", LayerAnnouncer(lambda: None, Waited))
    try:
        prompts = [SequenceStep([1, 2], 0, [0], draw()), SequenceStep([3, 4], 0, [1], None)]
        first = runner.launch(prompts[:1], lambda layer: told.append((0, layer)))
        second = runner.launch(prompts[1:], lambda layer: told.append((1, layer)), first)
        assert not first.is_done, "an engine must not take it as ended"
        assert told == []
        for event in events:
            event.set()
        assert second.result() == [None]
        assert first.result() == runner.run(prompts[:1])
        assert told == [(0, 0), (0, 1), (1, 0), (1, 1)]
    finally:
        runner.close()


def test_what_fails_behind_an_announced_layer_fails_the_step(
    model: tuple[ModelRunner, ArgmaxSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost:
        def synchronize(self) -> None:
            raise RuntimeError("an illegal memory access")

    runner, _ = model
    monkeypatch.setattr(runner, "_announcer", LayerAnnouncer(lambda: None, Lost))
    try:
        launched = runner.launch([SequenceStep([1, 2], 0, [0], draw())], lambda layer: None)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            launched.result()
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ([], "at least one sequence"),
        ([SequenceStep([], 0, [0], None)], "0 tokens"),
        ([SequenceStep([1], -1, [0], None)], "position -1"),
        ([SequenceStep([1] * 5, 0, [0], None)], "don't hold 5 tokens"),
        ([SequenceStep([1], 0, [16], None)], "outside the 16"),
        ([SequenceStep([1], 0, [-1], None)], "outside the 16"),
        ([SequenceStep([1], 64, range(17), None)], "over the context of 64"),
    ],
)
def test_a_batch_that_cannot_be_right_is_refused(
    model: tuple[ModelRunner, ArgmaxSampler], batch: list[SequenceStep], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        model[0].run(batch)


def test_tables_are_checked_as_far_as_they_have_grown_and_anew_after_an_error() -> None:
    looked_at: list[int] = []

    class Block(int):
        def __lt__(self, other: int) -> bool:
            looked_at.append(int(self))
            return int(self) < other

    tables, blocks = CheckedTables(), [Block(3), Block(4)]

    def check(*lists: list[Any]) -> None:
        looked_at.clear()
        check_batch([SequenceStep([1], 0, one, None) for one in lists], 4, 16, 64, tables=tables)

    check(blocks)
    assert 3 in looked_at
    check(blocks)
    assert looked_at == []
    blocks.append(Block(5))
    check([1], blocks)
    assert set(looked_at) == {5}
    wrong = [2]
    check(wrong, blocks)
    wrong.append(16)
    for _ in range(2):
        with pytest.raises(ValueError, match="outside the 16"):
            check(wrong, blocks)
    check(blocks)
    assert 3 in looked_at
