"""Experts among ranks: copies of them, and counts of how often each was chosen.

**Copies** lie in slots of a rank's own, which other ranks' experts are sent to (worker/experts/ decides which). A slot
is its bytes, in whatever form weights are held. Pieces of any number of them go from rank to rank in one all-to-all;
what steps read of the tables where experts are changes in place, so captured steps follow.

**Counts**: kernels count where they sort tokens by expert; readers wait for no step. On a CPU the counts are the
kernels' own. On a GPU they stay there: now and then a copy to the host is queued behind a step, and readers see the
last that has come.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.model.backend import ExpertPlaces, Experts
from twostroke.model.parallel.form import Shard
from twostroke.model.parallel.tensor_parallel import TensorParallel
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import ArrangeExperts, ExpertMove, LayerCopies

STEP_BYTES = {"cpu": 4 * 2**20, "cuda": 32 * 2**20}
"""Maximum bytes that move before one step: some ms over loopback; 0.2 ms at 200 GB/s."""


def make_places(shard: Shard, number: int, spare: int, device: torch.device) -> ExpertPlaces:
    """Return the places of a layer's `number` experts, with `spare` slots on each rank, which are empty at first."""
    held = shard.experts(number)
    slots = torch.zeros((number, 1 + shard.size), dtype=torch.int32, device=device)
    places = ExpertPlaces(slots, held.stop - held.start + spare)
    use_copies(places, LayerCopies(0, ((),) * shard.size), shard.rank)
    return places


def use_copies(places: ExpertPlaces, copies: LayerCopies, rank: int) -> None:
    """Change, in place, which copies this rank uses."""
    slots = torch.full(places.slots.shape, places.number, dtype=torch.int32)
    for expert, found in enumerate(copies.holders(len(slots))):
        slots[expert, 0] = len(found)
        for index, (holder, slot) in enumerate(found, start=1):
            if holder == rank:
                slots[expert, index] = slot
    places.slots.copy_(slots)


class ExpertSlots:
    """Slots of one rank for copies of experts, in all layers. Methods run on the engine's thread, on all ranks in one
    order."""

    def __init__(self, layers: Sequence[Experts | None], spare: int, parallel: TensorParallel):
        """`spare`: of a rank's slots of a layer, those for copies.

        Raises ConfigError where an expert is not the same bytes on all ranks.
        """
        self._layers = layers
        self._parallel = parallel
        experts = [layer for layer in layers if layer is not None]
        self.number = spare
        self.device = experts[0].hits.device
        shapes = [[(tuple(part.shape), str(part.dtype)) for part in layer.slot_memory(0)] for layer in experts]
        if len(set(parallel.exchange(str(shapes)))) > 1 or any(each != shapes[0] for each in shapes):
            raise ConfigError(
                "redundant_experts: the checkpoint's experts are quantised in different forms, and can't take each "
                "other's places: leave it out"
            )
        self.expert_bytes = sum(part.nbytes for part in experts[0].slot_memory(0))

    def arrange(self, order: ArrangeExperts) -> None:
        """Move weights and change the copies in use, together with all other ranks, which must get the same order."""
        rank = self._parallel.shard.rank
        for copies in order.copies:
            places = self._of(copies.layer).places
            assert places is not None
            use_copies(places, copies, rank)
        if not order.moves:
            return
        ranks = range(self._parallel.shard.size)
        outgoing = [
            part
            for target in ranks
            for move in order.moves
            if (move.source, move.target) == (rank, target)
            for part in self._pieces(move, move.source_slot)
        ]
        incoming = [move for source in ranks for move in order.moves if (move.source, move.target) == (source, rank)]
        sent = [sum(move.num_bytes for move in order.moves if (move.source, move.target) == (rank, r)) for r in ranks]
        received = [sum(move.num_bytes for move in incoming if move.source == source) for source in ranks]
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        found = self._parallel.exchange_rows(torch.cat([nothing, *outgoing]), sent, received)
        first = 0
        for move in incoming:
            for part in self._pieces(move, move.target_slot):
                part.copy_(found[first : first + len(part)])
                first += len(part)

    def _of(self, layer: int) -> Experts:
        experts = self._layers[layer]
        assert experts is not None
        return experts

    def _pieces(self, move: ExpertMove, slot: int) -> list[Tensor]:
        """The bytes of the slot that the move is of, uint8 [n] each, in memory."""
        end, start, found = move.first_byte + move.num_bytes, 0, []
        for part in self._of(move.layer).slot_memory(slot):
            whole = part.view(-1).view(torch.uint8)
            first, last = max(move.first_byte - start, 0), min(end - start, len(whole))
            if first < last:
                found.append(whole[first:last])
            start += len(whole)
        return found


COPY_S = 0.5
"""Counts on the host are as old as this, or as the step before the last."""


class ExpertHits:
    """The counts of all layers' experts, of one rank: each rank has the same, since each routes all tokens."""

    def __init__(self, layers: Sequence[Tensor | None], clock: Clock = time.monotonic):
        """layers: each one's `Experts.hits`, int64 [experts], as many in each; None where there are none, not in
        all."""
        self._layers = layers
        self._clock = clock
        self._counts = counts = [hits for hits in layers if hits is not None]
        self._copied_at = clock()
        self._host: Tensor | None = None
        if counts[0].device.type == "cuda":
            self._host = torch.zeros((len(counts), len(counts[0])), dtype=torch.int64, pin_memory=True)

    def clear(self) -> None:
        """Reset the counters, on the thread of `copy`: steps before this belong to no request."""
        for hits in self._counts:
            hits.zero_()
        if self._host is not None:
            torch.cuda.synchronize(self._counts[0].device)
            self._host.zero_()

    def copy(self) -> None:
        """Queue a copy of the counters, between steps, on the thread that launches them. Waits for nothing."""
        if self._host is not None and (now := self._clock()) >= self._copied_at + COPY_S:
            self._copied_at = now
            self._host.copy_(torch.stack(self._counts), non_blocking=True)

    def read(self) -> NDArray[np.int64]:
        """[layers, experts], counters; zeros for layers without experts. On any thread, steps may be under way."""
        found = self._counts if self._host is None else self._host.unbind()
        counts = iter(found)
        return np.stack(
            [np.zeros(len(found[0]), np.int64) if hits is None else next(counts).numpy() for hits in self._layers]
        )


class StagesHits:
    """Counters of all layers' experts where stages share the model: rank 0's own, and the last reports of other
    stages."""

    def __init__(
        self, own: ExpertHits | None, reports: Mapping[int, Sequence[Sequence[int]]], layout: KVLayout, experts: int
    ):
        """`reports` is filled from outside: the hits of its layers by each stage's first rank. `own` is None where
        stage 0 has no experts."""
        self._own = own
        self._reports = reports
        self._layout = layout
        self._experts = experts

    def read(self) -> NDArray[np.int64]:
        """Return counters as ExpertHits.read, of all layers: zeros for a stage that has not reported yet."""
        found = np.zeros((self._layout.num_layers, self._experts), np.int64)
        if self._own is not None:
            found[: len(self._layout.layers_of(0))] = self._own.read()
        for rank, hits in self._reports.items():
            layers = self._layout.layers_of(rank)
            found[layers.start : layers.stop] = hits
        return found
