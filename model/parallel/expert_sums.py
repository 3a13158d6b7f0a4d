"""Sum of the ranks' experts' outputs by an all-to-all, instead of an all-reduce: fewer bytes, but a wait.

Attention's sum has left all rows on all ranks, so a rank finds those for its experts at home, and nothing is sent to
experts. All ranks route all tokens alike, so each knows how many rows the others will send it: no counts travel either.
Results do. Of T tokens each rank owns ceil(T / ranks) in a row. A token's owner is sent the summands of the ranks that
have one of its experts, and adds them; then all gather the sums.

Of an all-reduce's 2 (n - 1) / n T rows, which a rank sends, the half that gathers remains. Of the half that adds, a
token's row comes from the ranks that have one of its k experts alone: with n ranks and choices at random, (1 - 1 / n)^k
of these rows are not sent. The price is a second collective, and that the host waits for the router's choices: a
captured graph can't.
"""

import torch
from torch import Tensor

from twostroke.model.backend import ExpertPlaces
from twostroke.model.parallel.expert_slots import ranks_of
from twostroke.model.parallel.form import Shard
from twostroke.model.parallel.tensor_parallel import TensorParallel

LEAST_SAVED_BYTES = {"cuda": 16 * 2**20, "cpu": 2**20}
"""Bytes that each rank must save in one sum to make up for the price: about 0.07 ms at 200 GB/s, and 0.5 ms over
loopback."""


def saved_bytes(tokens: int, row_bytes: int, top_k: int, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce and not in an all-to-all."""
    return (ranks - 1) / ranks * tokens * row_bytes * (1 - 1 / ranks) ** top_k


def pays(y: Tensor, top_k: int, shard: Shard) -> bool:
    """Return True if `sum_of_experts` should be taken for y [T, hidden]: the same answer on all ranks."""
    if not shard.has_whole_experts or (y.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    saved = saved_bytes(y.shape[0], y.shape[1] * y.element_size(), top_k, shard.size)
    return saved >= LEAST_SAVED_BYTES[y.device.type]


def sum_of_experts(
    y: Tensor, experts: Tensor, number: int, parallel: TensorParallel, places: ExpertPlaces | None = None
) -> Tensor:
    """y [T, hidden], this rank's summand, -> the sum over the ranks, on all of them; added in fp32 and rounded once.

    experts int32 [T, top_k] of `number`, the same on all ranks, and where they are. Waits until they are known.
    """
    (tokens, hidden), rank, size = y.shape, parallel.shard.rank, parallel.shard.size
    owned = -(-tokens // size)
    if places is not None:
        holders = ranks_of(experts.cpu(), places)
    else:
        ends = torch.tensor([Shard(other, size, True).experts(number).stop for other in range(size)])
        holders = torch.bucketize(experts.cpu(), ends, right=True)
    # By token and rank, whether the rank has any of its experts.
    is_from = torch.zeros((owned * size, size), dtype=torch.bool)
    is_from[:tokens].scatter_(1, holders, True)
    counts = is_from.view(size, owned, size).sum(1)  # by owner and rank that sends
    mine = is_from[:, rank].nonzero()[:, 0].to(y.device)
    received = counts[rank].tolist()
    rows = parallel.exchange_rows(y[mine], counts[:, rank].tolist(), received)
    total = torch.zeros((owned, hidden), device=y.device)
    for is_sent, part in zip(is_from[rank * owned : (rank + 1) * owned].T, torch.split(rows, received), strict=True):
        total[is_sent.nonzero()[:, 0].to(y.device)] += part  # a rank's rows are of different tokens
    return parallel.gather_rows(total.to(y.dtype))[:tokens]
