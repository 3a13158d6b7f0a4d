"""`python3 -m tests.gpu.first.collectives`: NCCL with one rank.

Are torch's names there, do collectives go into a graph, does abort return?
"""

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from twostroke.model.parallel.tensor_parallel import listening_store, process_group

HIDDEN = 4096


class Attempts:
    """Result and duration of each call, or its error."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def __call__(self, name: str, call: Callable[[], object]) -> None:
        begin = time.perf_counter()
        try:
            found = call()
            torch.cuda.synchronize()
            said = found if isinstance(found, bool | int | float | str) else "ok"
            self.facts[name] = [said, round(time.perf_counter() - begin, 3)]
        except Exception as error:
            self.facts[name] = f"{type(error).__name__}: {error}"[:300]


def main() -> dict[str, Any]:
    device, attempt = torch.device("cuda", 0), Attempts()
    torch.cuda.set_device(device)
    store, _ = listening_store("127.0.0.1", 30)
    free = torch.cuda.mem_get_info()[0]
    group = process_group(PrefixStore("x", store), 0, 1, 20, None)
    x = torch.ones(8, HIDDEN, dtype=torch.bfloat16, device=device)
    attempt("allreduce", lambda: group.allreduce([x]).wait())
    attempt("gather", lambda: group.gather([torch.empty_like(x)], x, 0).wait())
    attempt("alltoall_base", lambda: group.alltoall_base(torch.empty_like(x), x, [8], [8]).wait())
    attempt("allgather_base", lambda: group._allgather_base(torch.empty_like(x), x).wait())
    attempt("broadcast", lambda: group.broadcast(x, 0).wait())
    attempt.facts["communicator_mib"] = (free - torch.cuda.mem_get_info()[0]) >> 20

    def captured() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            group.allreduce([x]).wait()
        graph.replay()

    attempt("in a graph", captured)
    attempt("abort", group.abort)
    return attempt.facts


if __name__ == "__main__":
    print(json.dumps(main()))
