"""The parent of all worker processes: loads what they need once, and forks them, so that a new one takes milliseconds.

Run with the number of an inherited unix socket. Each message on it is the JSON of one WorkerProcess's arguments, with
the descriptor of its control socket; the answer is the pid. Ends with its own parent.
"""

import asyncio
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys

import twostroke.kvtransfer
from tests.faults.worker_process import WorkerProcess


def main(orders: socket.socket) -> None:
    if len(os.listdir("/proc/self/task")) != 1:
        raise SystemExit("a process with threads can't be forked safely: what did an import start?")
    for module in pkgutil.walk_packages(twostroke.kvtransfer.__path__, "twostroke.kvtransfer."):
        if "cuda" not in module.name and "device" not in module.name:
            importlib.import_module(module.name)  # kernels compile where there is no cache: not within a lease
    gc.collect()
    gc.freeze()  # censuses collect what the children make
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 65536, 1)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _work(socket.socket(fileno=descriptors[0]), **json.loads(order))
        os.close(descriptors[0])
        orders.send(str(pid).encode())


def _work(control: socket.socket, **arguments: object) -> None:
    status = 1
    try:
        asyncio.run(WorkerProcess(control, **arguments).run())  # type: ignore[arg-type]
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
