"""Steps as CUDA graphs: one launch a step, whatever the number of layers.

**Decode steps.** A graph is captured for each of some batch sizes; a batch is padded to the next of them with copies of
its last row, which compute and write the same once more. Inputs go from pinned memory into the graphs' own tensors on
the stream, so the host may prepare a step while the one before runs.

**Small steps that prompts are part of**, where the host would take longer than the GPU. A graph is captured for each of
some shapes: rows for a number of sequences that bring one token, and behind them rows
for the tokens of up to MAX_CHUNKS prompts. Rows that a step leaves empty belong to no sequence: their KV goes nowhere,
nothing attends to them, and their results are dropped. Lengths are read on the device, so launches follow the shape.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from twostroke.model.architectures.decoder import Decoder
from twostroke.model.batch import BatchLayout, Drawing, StepDecoder, StepInput, make_layouts, take_drawn
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.captured_steps import DecodeInputs, decode_input, drawn_logits, drawn_mtp_logits
from twostroke.model.step import SequenceStep
from twostroke.protocol.kv_layout import KVGroups

GRAPH_BYTES = 8 * 2**20
"""Memory that the driver may take for one graph of a step, beside the memory of its kernels. The estimate covers the
small graphs of draws: with 50 graphs of steps and 55 of draws, 0.9 GiB of a worker's share were left on an H200."""


class Recorder:
    """Records graphs whose kernels share memory: they must not run at the same time, nor outlive one another's use."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays `run` on the current stream. Runs it once before: compiling can't be
        captured."""
        run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may go on talking to the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def event(self) -> torch.cuda.Event:
        """Return an event to record and to wait for."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]


class _WithTables(Protocol):
    block_tables: list[Tensor]  # int32 [sequences, rows, parts], for each of KVGroups.tables


Inputs = TypeVar("Inputs", bound=_WithTables)


@dataclass(frozen=True)
class _Staging(Generic[Inputs]):
    """Pinned inputs of one step, and when their copy has left them."""

    inputs: Inputs
    tables: Tensor  # int32, flat: the tables' entries in use, without what lies between them
    copied: torch.cuda.Event


class StagedInputs(Generic[Inputs]):
    """Inputs where graphs read them, `placed`, and how the host fills them without waiting for the step before."""

    def __init__(self, make: Callable[[torch.device | None, bool], Inputs], device: torch.device, recorder: Recorder):
        """`make` is called with a device, or None for the host, and whether its memory is to be pinned."""
        on_gpu = device.type == "cuda"

        def staging() -> _Staging[Inputs]:
            inputs = make(None, on_gpu)
            numbers = sum(table.numel() for table in inputs.block_tables)
            tables = torch.zeros(numbers, dtype=torch.int32, pin_memory=on_gpu)
            return _Staging(inputs, tables, recorder.event())

        # Two, by turns: the host may be filling one while the copy out of the other is still to run.
        self._staging = [staging(), staging()]
        # What lies on the device.
        self._placed_tables = [table.numpy().copy() for table in self._staging[0].inputs.block_tables]
        self._tables = torch.empty_like(self._staging[0].tables, device=device)
        self.placed = make(device, False)

    @contextmanager
    def next(self) -> Iterator[Inputs]:
        """Yield the host's inputs to be filled and copied to `placed` before the end. Waits for the copy of the step
        before last."""
        self._staging.reverse()
        staging = self._staging[0]
        staging.copied.synchronize()
        yield staging.inputs
        staging.copied.record()

    def place_tables(self, rows: int, width: int) -> None:
        """Copy so much of the tables of the inputs that `next` gave: whole tables would be megabytes a step.

        Nothing is copied where they are as before: a sequence has a further block once in `block_size` steps.
        """
        staging = self._staging[0]
        tables = [table[:rows, :width] for table in staging.inputs.block_tables]
        before = [table[:rows, :width] for table in self._placed_tables]
        if all(np.array_equal(*pair) for pair in zip(before, tables, strict=True)):
            return
        sizes = [table.numel() for table in tables]
        host, there = staging.tables[: sum(sizes)], self._tables[: sum(sizes)]
        for known, table, part in zip(before, tables, torch.split(host, sizes), strict=True):
            known[:] = table.numpy()
            part.view(table.shape).copy_(table)
        there.copy_(host, non_blocking=True)
        for table, part in zip(self.placed.block_tables, torch.split(there, sizes), strict=True):
            placed = table[:rows, :width]
            placed.copy_(part.view(placed.shape))


class CudaGraphSteps:
    """Implements CapturedSteps. Used on the engine's thread, on its current stream."""

    def __init__(
        self,
        decoder: StepDecoder,
        kv_cache: KVCache,
        max_context: int,
        max_batch: int,
        recorder: Recorder | None = None,
    ):
        """Captures all graphs: some tenths of a second each, largest first, so that all share its memory."""
        device = kv_cache.tensors[0].device
        recorder = Recorder(device) if recorder is None else recorder
        self.sizes = batch_sizes(min(max_batch, kv_cache.num_blocks))
        """Sizes of the batches that have a graph, ascending."""
        largest, self._block_size = self.sizes[-1], kv_cache.block_size

        def inputs(device: torch.device | None, pinned: bool) -> DecodeInputs:
            return DecodeInputs(
                largest,
                max_context,
                kv_cache.block_size,
                groups=kv_cache.groups,
                local_tokens=kv_cache.local_tokens,
                device=device,
                pinned=pinned,
            )

        self._inputs = StagedInputs(inputs, device, recorder)
        # Of all graphs: results of their own would be kept for each, and those of all batch sizes are gigabytes.
        self.all_logits = torch.empty((largest, decoder.logits_width), dtype=torch.float32, device=device)
        """fp32 [largest, V]: the first rows are those of the last step."""
        self._token_ids = torch.empty(largest, dtype=torch.int64, device=device)
        mtp = decoder if isinstance(decoder, Decoder) and decoder.has_mtp else None
        self._hidden: Tensor | None = None
        if mtp is not None:
            self._hidden = torch.empty((largest, mtp.hidden_size), dtype=mtp.dtype, device=device)
        # Kept with all tensors in them: a graph remembers places alone.
        self._steps = {size: self._step(decoder, kv_cache, size) for size in reversed(self.sizes)}
        self._mtp_steps = {} if mtp is None else {size: self._mtp_step(mtp, kv_cache, size) for size in self._steps}
        with torch.inference_mode():
            self._replays = {size: recorder.record(step) for size, step in self._steps.items()}
            self._mtp_replays = {size: recorder.record(step) for size, step in self._mtp_steps.items()}
        self._count = self._size = 0  # of the last batch, and of its graph

    def logits(self, batch: Sequence[SequenceStep], earlier: Tensor | None = None) -> Tensor | None:
        """Implement CapturedSteps.logits; `earlier` int64 [any] are the tokens that the step before drew, on the
        device.

        A step that `follows` one of them takes its token from there. Never waits for the device but for the inputs of
        the last step but one.
        """
        count = len(batch)
        size = next((size for size in self.sizes if size >= count), None)
        if size is None or (earlier is not None and len(earlier) > self.sizes[-1]):
            return None
        if not self._inputs.placed.hold(batch):
            return None
        padded = [*batch, *[batch[-1]] * (size - count)]
        placed = self._inputs.placed
        with self._inputs.next() as inputs:
            inputs.fill(padded)
            inputs.follow(padded)
            placed.packed.copy_(inputs.packed, non_blocking=True)
            self._inputs.place_tables(size, max(step.start for step in batch) // self._block_size + 1)
        if earlier is not None:
            placed.drawn[: len(earlier)].copy_(earlier)
        self._replays[size]()
        self._count, self._size = count, size
        return self.all_logits[:count]

    def mtp_logits(self, drawn: Tensor) -> Tensor:
        """Implement CapturedSteps.mtp_logits. The result takes the place of the step's logits."""
        count = self._count
        self._token_ids[:count].copy_(drawn)
        self._token_ids[count : self._size].copy_(drawn[-1:].expand(self._size - count))
        self._mtp_replays[self._size]()
        return self.all_logits[:count]

    def _step(self, decoder: StepDecoder, kv_cache: KVCache, size: int) -> Callable[[], None]:
        """Return a function that computes the logits of a batch of `size` into the place that all graphs share."""
        placed, token_ids = self._inputs.placed, self._token_ids[:size]
        hidden = None if self._hidden is None else self._hidden[:size].copy_
        step = decode_input(kv_cache, placed, token_ids, hidden)

        def compute() -> None:
            torch.index_select(placed.candidates, 0, placed.sources[:size], out=token_ids)
            self.all_logits[:size].copy_(drawn_logits(decoder, step))

        return compute

    def _mtp_step(self, decoder: Decoder, kv_cache: KVCache, size: int) -> Callable[[], None]:
        """Return a function that computes the MTP head's logits behind the tokens that a batch of `size` drew."""
        assert self._hidden is not None
        step, hidden = decode_input(kv_cache, self._inputs.placed, self._token_ids[:size]), self._hidden[:size]

        def compute() -> None:
            self.all_logits[:size].copy_(drawn_mtp_logits(decoder, step, hidden))

        return compute


def batch_sizes(largest: int) -> list[int]:
    """Return the sizes of batches that get a graph: dense where a padded row costs most, at most a fifth too many
    beyond 8."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < largest:
        step = max(8, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < largest] + [largest]


MAX_ROWS = 2048
"""Rows of the largest graph of any model."""
_HOST_BOUND = 1.28e11
"""Rows times a layer's weights, up to which the host takes longer to launch an eager step than the GPU to compute it:
both are 12 ms at 512 rows of an 8B model (H200, 2026-11-26). A padded row costs nothing there."""
_ANNOUNCED_PART = 0.27
"""Part of these rows where layers are announced, which they are at the step's end: KV of 128 tokens of an 8B model is
on its way for 0.7 ms at 25 GB/s."""
MAX_CHUNKS = 7
_TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_SINGLES = (8, 32, 128)
_FEW_TOKENS = (
    384  # tokens of prompts up to which shapes differ finely in rows for decodes; beyond, decodes matter little
)
_NO_SLOT = -1


@dataclass(frozen=True, order=True)
class StepShape:
    """Capacity of a graph."""

    singles: int  # sequences that bring one token
    tokens: int  # of all others together

    @property
    def rows(self) -> int:
        """Rows of the model's matrices."""
        return self.singles + self.tokens

    @property
    def sequences(self) -> int:
        """Sequences that have a place. The last place is always empty: rows that no token is drawn after attend to
        it."""
        return self.singles + MAX_CHUNKS + 1


def most_rows(layer_parameters: float, announces_layers: bool) -> int:
    """Return the rows of the largest step that is worth a graph, by the weights that a rank multiplies in one layer."""
    rows = _HOST_BOUND / layer_parameters * (_ANNOUNCED_PART if announces_layers else 1)
    return min(MAX_ROWS, int(rows))


def step_shapes(max_tokens: int, max_sequences: int, most_rows: int) -> list[StepShape]:
    """Return the shapes of steps that graphs are captured for, of an engine with these bounds, the largest first."""
    singles = [count for count in _SINGLES if count < max_sequences]
    singles = [0, *singles, *([max_sequences] if max_sequences < _SINGLES[-1] else [])]
    tokens = [count for index, count in enumerate(_TOKENS) if index == 0 or _TOKENS[index - 1] < max_tokens]
    shapes = [
        StepShape(one, other) for other in tokens for one in (singles if other <= _FEW_TOKENS else {0, singles[-1]})
    ]
    return sorted((shape for shape in shapes if shape.rows <= most_rows), key=lambda shape: (-shape.rows, shape))


class _Inputs:
    """Inputs of steps of shapes up to `rows` and `sequences`, always in the same memory of one device.

    They are empty at first.
    """

    def __init__(
        self, rows: int, sequences: int, width: int, groups: KVGroups, device: torch.device | None, pinned: bool
    ):
        """Allocate the inputs, on the host where no device is named. Tables have `width` rows."""
        # Kinds of numbers side by side, so that each kind is one copy.
        self.longs = torch.zeros(
            (4 + len(groups.tables), max(rows, sequences)), dtype=torch.int64, device=device, pin_memory=pinned
        )
        self.ints = torch.zeros((2, sequences + 1), dtype=torch.int32, device=device, pin_memory=pinned)
        self.token_ids, self.positions, self.drawn_rows, self.drawn_sequences = self.longs[:4]
        self.slots = self.longs[4:].fill_(_NO_SLOT)
        self.query_starts, self.context_lens = self.ints
        self.block_tables = [
            torch.zeros((sequences, width, len(of)), dtype=torch.int32, device=device, pin_memory=pinned)
            for of in groups.tables
        ]


class PromptGraphs:
    """Replays small steps with prompts. Used on the engine's thread, on its current stream."""

    def __init__(
        self,
        decoder: StepDecoder,
        kv_cache: KVCache,
        max_context: int,
        shapes: Sequence[StepShape],
        recorder: Recorder,
    ):
        """Captures all graphs, which takes as long as decode graphs do and shares their recorder's memory."""
        device = kv_cache.tensors[0].device
        self._block_size, self._groups = kv_cache.block_size, kv_cache.groups
        self._max_context = max_context
        # The fewest rows first: whatever fits is then found at once.
        self._shapes = sorted(shapes, key=lambda shape: (shape.rows, shape))
        rows, sequences = (max(getattr(shape, name) for shape in shapes) for name in ("rows", "sequences"))
        width, groups = -(-max_context // self._block_size), self._groups

        def inputs(device: torch.device | None, pinned: bool) -> _Inputs:
            return _Inputs(rows, sequences, width, groups, device, pinned)

        self._inputs = StagedInputs(inputs, device, recorder)
        self._logits = torch.empty((sequences, decoder.logits_width), dtype=torch.float32, device=device)
        # Kept with all tensors in them: a graph remembers places alone.
        self._steps = {shape: self._step(decoder, kv_cache, shape) for shape in shapes}
        with torch.inference_mode():
            self._replays = {shape: recorder.record(step) for shape, step in self._steps.items()}

    def logits(self, steps: Sequence[SequenceStep], drawing: Sequence[int], earlier: Tensor | None) -> Tensor | None:
        """fp32 [N, vocab] of the entries `drawing`, until the next call; None for a step that must run eagerly.

        Of `steps` those that bring one token come first. `earlier` as CapturedSteps.logits. Never waits for the device
        but for the inputs of the last step but one.
        """
        singles = sum(len(step.token_ids) == 1 for step in steps)
        tokens = sum(len(step.token_ids) for step in steps) - singles
        fitting = (shape for shape in self._shapes if shape.singles >= singles and shape.tokens >= tokens)
        shape = next(fitting, None)
        if shape is None or not drawing or len(steps) - singles > MAX_CHUNKS:
            return None
        with self._inputs.next() as inputs:
            width = self._fill(inputs, steps, drawing, shape, singles)
            self._inputs.placed.longs.copy_(inputs.longs, non_blocking=True)
            self._inputs.placed.ints.copy_(inputs.ints, non_blocking=True)
            self._inputs.place_tables(shape.sequences, width)
        if earlier is not None:
            take_drawn(self._inputs.placed.token_ids, steps, earlier)
        self._replays[shape]()
        return self._logits[: len(drawing)]

    def _fill(
        self, inputs: _Inputs, steps: Sequence[SequenceStep], drawing: Sequence[int], shape: StepShape, singles: int
    ) -> int:
        """Write a step in a shape's places on the host. Returns how wide its tables are.

        Raises ValueError as make_layouts does.
        """
        layouts = make_layouts(steps, self._block_size, torch.device("cpu"), self._groups)
        first, shift = layouts[0], shape.singles - singles  # chunks move down by this many rows and places
        starts = first.query_starts.numpy()
        total, count = int(starts[-1]), len(steps)
        width = first.block_tables.shape[1] // len(self._groups.tables[0])

        longs, ints = inputs.longs.numpy(), inputs.ints.numpy()
        token_ids, positions, drawn_rows, drawn_sequences = longs[:4]
        query_starts, context_lens = ints
        rows = slice(singles, total), slice(shape.singles, total + shift)
        places = slice(singles, count), slice(shape.singles, count + shift)

        given = np.fromiter(chain.from_iterable(step.token_ids for step in steps), np.int64, total)
        # Empty rows have the step's own tokens in turn, so that they ask for few experts that the step does not.
        token_ids[: shape.rows] = np.resize(given, shape.rows)
        token_ids[rows[1]] = given[rows[0]]
        positions[: shape.rows] = 0
        positions[:singles], positions[rows[1]] = first.positions[:singles], first.positions[rows[0]]
        longs[4:, : shape.rows] = _NO_SLOT
        context_lens[: shape.sequences] = 0
        context_lens[:singles], context_lens[places[1]] = first.context_lens[:singles], first.context_lens[places[0]]
        query_starts[: shape.singles] = range(shape.singles)
        query_starts[shape.singles : shape.sequences + 1] = total + shift
        query_starts[places[1]] = starts[places[0]] + shift
        for index, (layout, written) in enumerate(zip(layouts, inputs.block_tables, strict=True)):
            slots, table = layout.slots.numpy(), layout.block_tables.view(count, width, -1).numpy()
            longs[4 + index, :singles], longs[4 + index, rows[1]] = slots[:singles], slots[rows[0]]
            written.numpy()[:singles, :width] = table[:singles]
            written.numpy()[places[1], :width] = table[places[0]]

        entries = np.array(drawing, np.int64)
        drawn_rows[: shape.sequences], drawn_sequences[: shape.sequences] = 0, shape.sequences - 1
        drawn_rows[: len(entries)] = starts[entries + 1] - 1 + np.where(entries < singles, 0, shift)
        drawn_sequences[: len(entries)] = entries + np.where(entries < singles, 0, shift)
        return width

    def _step(self, decoder: StepDecoder, kv_cache: KVCache, shape: StepShape) -> Callable[[], None]:
        """Return a function that computes the logits of a step of this shape into the place that all graphs share."""
        placed, rows, sequences = self._inputs.placed, shape.rows, shape.sequences
        first = BatchLayout(
            positions=placed.positions[:rows],
            slots=placed.slots[0, :rows],
            query_starts=placed.query_starts[: sequences + 1],
            context_lens=placed.context_lens[:sequences],
            block_tables=placed.block_tables[0][:sequences].flatten(1),
            num_decodes=shape.singles,
            max_query_len=shape.tokens,
            max_context_len=self._max_context,
        )
        layouts = [
            replace(first, slots=slots[:rows], block_tables=tables[:sequences].flatten(1))
            for slots, tables in zip(placed.slots, placed.block_tables, strict=True)
        ]
        drawing = Drawing(placed.drawn_rows[:sequences], placed.drawn_sequences[:sequences])
        step = StepInput(placed.token_ids[:rows], layouts, kv_cache.tensors, drawing)

        def compute() -> None:
            logits = drawn_logits(decoder, step)
            self._logits[:sequences].copy_(logits)

        return compute
