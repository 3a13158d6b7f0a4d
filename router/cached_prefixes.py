"""How much of a prompt each worker has cached: the block index, asked with the prompt's names."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from twostroke.protocol.clock import Clock
from twostroke.protocol.messages import BlocksChanged, BlocksHeld
from twostroke.protocol.requests import GenerateRequest
from twostroke.protocol.stats import WorkerInfo
from twostroke.protocol.tickets import Peer
from twostroke.router.block_index import BlockIndex
from twostroke.router.prompt_names import PromptNames
from twostroke.router.service_classes import Floats
from twostroke.router.worker_table import WorkerTable


class CachedPrefixes:
    """One router replica's knowledge. Every replica hears all workers itself, so that they agree without talking."""

    def __init__(self, *, clock: Clock, max_blocks: int, expected_s: float):
        self._index = BlockIndex(clock=clock, max_blocks=max_blocks, expected_s=expected_s)
        self._names = PromptNames()
        self._columns: tuple[WorkerTable, int, NDArray[np.int64]] | None = None

    def keep(self, workers: Collection[Peer]) -> None:
        """Forget what others held."""
        self._index.keep(workers)

    def heard(self, worker: Peer, message: BlocksHeld | BlocksChanged) -> bool:
        """As BlockIndex.heard."""
        return self._index.heard(worker, message)

    def expect(
        self, worker: WorkerInfo, request: GenerateRequest, sent: Sequence[int], *, known_tokens: int = 0
    ) -> None:
        """The worker will soon hold the prompt and the outputs `sent`, as far as they fill blocks.

        `known_tokens` of them it is thought to hold already.
        """
        block_size = worker.layout.block_size
        names = self._names.of(request.token_ids, request.cache_salt, block_size, sent)
        self._index.expect(worker.peer, names, known_blocks=known_tokens // block_size)

    def held(self, table: WorkerTable, request: GenerateRequest, sent: Sequence[int]) -> Floats:
        """In tokens, by the table's rows."""
        columns = self._columns_of(table)  # before anything is found: new workers get columns now
        if len(table.block_sizes) == 1:
            (block_size,) = table.block_sizes
            return self._find(block_size, request, sent)[columns] * table.block_size
        held: Floats = np.zeros(len(table))
        for block_size in table.block_sizes:
            tokens = self._find(block_size, request, sent)[columns] * table.block_size
            held += np.where(table.block_size == block_size, tokens, 0.0)
        return held

    def held_by(self, infos: Sequence[WorkerInfo], request: GenerateRequest, sent: Sequence[int]) -> dict[Peer, int]:
        """In tokens, of those workers that hold some."""
        held: dict[Peer, int] = {}
        for block_size in {info.layout.block_size for info in infos}:
            alike = [info.peer for info in infos if info.layout.block_size == block_size]
            columns = self._index.columns(alike)
            blocks = self._find(block_size, request, sent)[columns]
            held |= {peer: int(count) * block_size for peer, count in zip(alike, blocks, strict=True) if count}
        return held

    def _find(self, block_size: int, request: GenerateRequest, sent: Sequence[int]) -> NDArray[np.int64]:
        return self._index.find(self._names.of(request.token_ids, request.cache_salt, block_size, sent))

    def _columns_of(self, table: WorkerTable) -> NDArray[np.int64]:
        known = self._columns
        if known is None or known[0] is not table or known[1] != self._index.version:
            columns = self._index.columns([info.peer for info in table.infos])
            known = self._columns = table, self._index.version, columns
        return known[2]
