"""How much of a prompt each worker has cached: the block index, asked with the prompt's names."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.clock import Clock
from protocol.messages import BlocksChanged, BlocksHeld
from protocol.requests import GenerateRequest
from protocol.stats import Role, WorkerInfo
from protocol.tickets import Peer
from router.block_index import BlockIndex
from router.cheapest_path import Held, Workers
from router.prompt_names import PromptNames
from router.worker_table import Floats, WorkerTable


class CachedPrefixes:
    """One router replica's knowledge. Every replica hears all workers itself, so that they agree without talking."""

    def __init__(self, *, clock: Clock, max_blocks: int, expected_s: float):
        self._index = BlockIndex(clock=clock, max_blocks=max_blocks, expected_s=expected_s)
        self._names = PromptNames()
        self._columns: dict[Role, tuple[WorkerTable, int, NDArray[np.int64]]] = {}

    def keep(self, workers: Collection[Peer]) -> None:
        """Forget what others held."""
        self._index.keep(workers)

    def heard(self, worker: Peer, message: BlocksHeld | BlocksChanged) -> bool:
        """As BlockIndex.heard."""
        return self._index.heard(worker, message)

    def expect(self, worker: WorkerInfo, request: GenerateRequest, sent: Sequence[int]) -> None:
        """The worker will soon hold the prompt and the outputs `sent`, as far as they fill blocks."""
        names = self._names.of(request.token_ids, request.cache_salt, worker.layout.block_size, sent)
        self._index.expect(worker.peer, names)

    def held(self, workers: Workers, request: GenerateRequest, sent: Sequence[int]) -> Held:
        """In tokens, by the tables' rows."""
        prefill = self._columns_of("prefill", workers.prefill)
        decode = self._columns_of("decode", workers.decode)  # before anything is found: new workers get columns now
        found: dict[int, NDArray[np.int64]] = {}
        for block_size in workers.prefill.block_sizes | workers.decode.block_sizes:
            found[block_size] = self._find(block_size, request, sent)
        return Held(_tokens(workers.prefill, prefill, found), _tokens(workers.decode, decode, found))

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

    def _columns_of(self, role: Role, table: WorkerTable) -> NDArray[np.int64]:
        known = self._columns.get(role)
        if known is None or known[0] is not table or known[1] != self._index.version:
            columns = self._index.columns([info.peer for info in table.infos])
            known = self._columns[role] = table, self._index.version, columns
        return known[2]


def _tokens(table: WorkerTable, columns: NDArray[np.int64], found: dict[int, NDArray[np.int64]]) -> Floats:
    held: Floats = np.zeros(len(table))
    if len(table.block_sizes) == 1:
        (block_size,) = table.block_sizes
        held += found[block_size][columns] * block_size
        return held
    for block_size in table.block_sizes:
        held += np.where(table.block_size == block_size, found[block_size][columns] * float(block_size), 0.0)
    return held
