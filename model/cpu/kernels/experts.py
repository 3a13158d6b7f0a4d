"""Routing of tokens to experts on CPUs, and their rows' way there and back. Reference: tests/rigs/reference.py.

Rows of activations are put in the order of their experts, so that each expert's lie together, and each expert that is
hit is cut into tasks of some rows. Products (projections/) take so many tasks as they find in memory when they run: a
recorded step may hit others at each replay.
"""

from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from twostroke.model.backend import Chosen
from twostroke.model.config import Routing
from twostroke.model.cpu.kernels.floats import exponential, sigmoid, store, widen
from twostroke.model.cpu.kernels.launch import (
    Kernel,
    Kernels,
    Launcher,
    as_floats,
    as_integers,
    as_short_integers,
    as_stored,
    compiled,
    float_of_bits,
    taken,
)

GRAIN_ELEMENTS = 8192  # what a thread takes at a time: some microseconds of work


@compiled
def _best(scores, first, end, is_open):
    """The first of the largest scores from `first` to `end` that are open. One is, even if all scores are NaN."""
    best = -1
    for i in range(first, end):
        if is_open[i] and (best < 0 or scores[i] > scores[best]):
            best = i
    return best


@compiled
def _close_groups(scores, is_open, groups, top_groups, summed):
    """Leave open the experts of the `top_groups` groups whose `summed` highest scores have the highest sums."""
    width = scores.shape[0] // groups
    sums, is_group_open = np.empty(groups, np.float32), np.ones(groups, np.bool_)
    for group in range(groups):
        first, end = group * width, (group + 1) * width
        sums[group] = np.float32(0)
        for _ in range(min(summed, width)):
            best = _best(scores, first, end, is_open)
            sums[group] += scores[best]
            is_open[best] = False
        for i in range(first, end):
            is_open[i] = False
    for _ in range(top_groups):
        group = _best(sums, 0, groups, is_group_open)
        is_group_open[group] = False
        for i in range(group * width, (group + 1) * width):
            is_open[i] = True


@Kernel
def _route(words):
    """words: logits, correction or 0, experts, weights, number of experts, chosen ones, whether by sigmoid, whether
    they are normalised, scale, groups, top groups, scores that are summed, each expert's scale or 0."""
    rows, count, top_k, by_sigmoid, normalises = words[1], words[7], words[8], words[9] != 0, words[10] != 0
    scale, groups = float_of_bits(np.uint32(words[11])), words[12]
    logits, correction = carray(as_floats(words[3]), (rows, count)), carray(as_floats(words[4]), (count,))
    experts, weights = carray(as_short_integers(words[5]), (rows, top_k)), carray(as_floats(words[6]), (rows, top_k))
    scales = carray(as_floats(words[15]), (count,))
    scores, choosing = np.empty(count, np.float32), np.empty(count, np.float32)
    is_open = np.empty(count, np.bool_)
    for row in taken(words, rows):
        if by_sigmoid:
            for i in range(count):
                scores[i] = sigmoid(logits[row, i])
        else:
            highest, total = logits[row, 0], np.float32(0)
            for i in range(count):
                highest = max(highest, logits[row, i])
            for i in range(count):
                scores[i] = exponential(logits[row, i] - highest)
                total += scores[i]
            for i in range(count):
                scores[i] /= total
        for i in range(count):
            choosing[i] = scores[i] + correction[i] if words[4] else scores[i]
            is_open[i] = True
        if groups > 1:
            _close_groups(choosing, is_open, groups, words[13], words[14])
        total = np.float32(0)
        for k in range(top_k):
            best = _best(choosing, 0, count, is_open)
            is_open[best] = False
            experts[row, k], weights[row, k] = best, scores[best]
            total += scores[best]
        for k in range(top_k):
            weights[row, k] *= scale / total if normalises else scale
            if words[15]:
                weights[row, k] *= scales[experts[row, k]]


def route(
    launcher: Launcher, logits: Tensor, correction: Tensor | None, routing: Routing, scales: Tensor | None = None
) -> Chosen:
    """Implement Backend.route."""
    rows, count = logits.shape
    experts = launcher.empty((rows, routing.top_k), torch.int32)
    weights = launcher.empty((rows, routing.top_k), torch.float32)
    launcher.run(
        _route,
        rows,
        max(1, GRAIN_ELEMENTS // (count * routing.top_k)),
        *(logits, 0 if correction is None else correction, experts, weights),
        *(count, routing.top_k, routing.scoring == "sigmoid", routing.normalises, routing.scale),
        *(routing.groups, routing.top_groups, routing.summed, 0 if scales is None else scales),
    )
    return Chosen(experts, weights)


class ExpertOrder(NamedTuple):
    """The choices of a step (token by token, top_k each) in the order of their experts."""

    choices: Tensor  # int32 [T top_k]: which stands at each place; -1: one of an expert that is not here
    places: Tensor  # int32 [T top_k]: where each stands; -1 likewise
    tasks: Tensor  # int64, as gemm.multiply_tasks takes them


@Kernel
def _order(words):
    """words: experts, choices, places, tasks, hits, how many choices, of experts, most rows of a task, the first expert
    that is here, the one behind the last. One item."""
    count, num_experts, most_rows, first_here, end_here = words[8], words[9], words[10], words[11], words[12]
    experts, choices = carray(as_short_integers(words[3]), (count,)), carray(as_short_integers(words[4]), (count,))
    places, tasks = carray(as_short_integers(words[5]), (count,)), as_integers(words[6])
    hits = carray(as_integers(words[7]), (num_experts,))
    for _ in taken(words, 1):
        ends = np.zeros(num_experts + 1, np.int64)
        for i in range(count):
            ends[experts[i] + 1] += 1
        num_tasks = np.int64(0)
        for expert in range(num_experts):
            rows = ends[expert + 1]
            hits[expert] += rows
            for first in range(0, rows if first_here <= expert < end_here else 0, most_rows):
                tasks[3 * num_tasks + 1] = expert - first_here
                tasks[3 * num_tasks + 2] = ends[expert] + first
                tasks[3 * num_tasks + 3] = min(most_rows, rows - first)
                num_tasks += 1
            ends[expert + 1] += ends[expert]
        tasks[0] = num_tasks
        for i in range(count):
            place = ends[experts[i]]
            ends[experts[i]] += 1
            is_here = first_here <= experts[i] < end_here
            choices[place], places[i] = i if is_here else -1, place if is_here else -1


def order(launcher: Launcher, experts: Tensor, hits: Tensor, held: range, most_rows: int) -> ExpertOrder:
    """experts int32 [T, top_k], counted in hits int64 [number of experts]. Those of an expert stay in the order of the
    tokens. Tasks are those of the experts `held`, by their numbers among these."""
    count, num_experts = experts.numel(), len(hits)
    most_tasks = min(count, num_experts + count // most_rows)
    choices, places = (launcher.empty((count,), torch.int32) for _ in range(2))
    tasks = launcher.empty((1 + 3 * most_tasks,), torch.int64)
    launcher.run(
        _order, 1, 1, experts, choices, places, tasks, hits, count, num_experts, most_rows, held.start, held.stop
    )
    return ExpertOrder(choices, places, tasks)


@Kernel
def _locate(words):
    """words: experts, slots of each, out, hits, choices, chosen ones of a token, columns of the slots. One item."""
    count, top_k, columns = words[7], words[8], words[9]
    experts, out = carray(as_short_integers(words[3]), (count,)), carray(as_short_integers(words[5]), (count,))
    slots, hits = as_short_integers(words[4]), as_integers(words[6])
    for _ in taken(words, 1):
        for i in range(count):
            first = experts[i] * columns
            hits[experts[i]] += 1
            out[i] = slots[first + 1 + i // top_k % slots[first]]


def locate(launcher: Launcher, experts: Tensor, slots: Tensor, hits: Tensor) -> Tensor:
    """experts int32 [T, top_k], counted in hits -> the slots that hold them, as ExpertPlaces says, int32 likewise."""
    out = launcher.empty(tuple(experts.shape), torch.int32)
    launcher.run(_locate, 1, 1, experts, slots, out, hits, experts.numel(), experts.shape[1], slots.shape[1])
    return out


@Kernels
def _gather(words):
    """words: x, choices, out, columns, chosen ones of a token."""
    rows, columns, top_k = words[1], words[6], words[7]
    x, out = (
        carray(as_stored(words, words[3]), (rows // top_k, columns)),
        carray(as_stored(words, words[5]), (rows, columns)),
    )
    choices = carray(as_short_integers(words[4]), (rows,))
    for row in taken(words, rows):
        if choices[row] >= 0:
            token = choices[row] // top_k
            for i in range(columns):
                out[row, i] = x[token, i]


def gather(launcher: Launcher, x: Tensor, choices: Tensor) -> Tensor:
    """x [T, hidden] -> [T top_k, hidden], each choice's token; choices that are not here get nothing."""
    count, columns = len(choices), x.shape[1]
    out = launcher.empty((count, columns), x.dtype)
    grain = max(1, GRAIN_ELEMENTS // columns)
    launcher.run(_gather.of(x.dtype), count, grain, x, choices, out, columns, count // len(x))
    return out


@Kernels
def _combine(words):
    """words: y, places, weights, out, columns, chosen ones of a token."""
    rows, columns, top_k = words[1], words[7], words[8]
    y, out = carray(as_floats(words[3]), (rows * top_k, columns)), carray(as_stored(words, words[6]), (rows, columns))
    places, weights = carray(as_short_integers(words[4]), (rows, top_k)), carray(as_floats(words[5]), (rows, top_k))
    sums = np.empty(columns, np.float32)
    for row in taken(words, rows):
        sums[:] = np.float32(0)
        for k in range(top_k):
            place, weight = places[row, k], weights[row, k]
            if place < 0:
                continue
            for i in range(columns):
                sums[i] += weight * y[place, i]
        for i in range(columns):
            store(out[row], i, sums[i])


def combine(launcher: Launcher, y: Tensor, places: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """y fp32 [T top_k, hidden] in the order of experts, weights [T, top_k] -> weighted sums, `dtype` [T, hidden]."""
    (rows, top_k), columns = weights.shape, y.shape[1]
    out = launcher.empty((rows, columns), dtype)
    grain = max(1, GRAIN_ELEMENTS // (columns * top_k))
    launcher.run(_combine.of(dtype), rows, grain, y, places, weights, out, columns, top_k)
    return out


@Kernels
def _gate_by_sigmoid(words):
    """words: x (becomes the product), logits, columns, logits of a row."""
    rows, columns = words[1], words[5]
    x, logits = carray(as_stored(words, words[3]), (rows, columns)), carray(as_floats(words[4]), (rows, words[6]))
    for row in taken(words, rows):
        highest = logits[row, 0]
        for i in range(1, words[6]):
            highest = max(highest, logits[row, i])
        factor = sigmoid(highest)
        for i in range(columns):
            store(x[row], i, widen(x[row, i]) * factor)


def gate_by_sigmoid(launcher: Launcher, x: Tensor, logits: Tensor) -> Tensor:
    """Implement Backend.gate_by_sigmoid; writes into x."""
    rows, columns = x.shape
    launcher.run(
        _gate_by_sigmoid.of(x.dtype), rows, max(1, GRAIN_ELEMENTS // columns), x, logits, columns, logits.shape[1]
    )
    return x
