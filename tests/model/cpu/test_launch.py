"""Machine code compiled just now and code read from the cache give the same bits: a worker that starts for the first
time on a machine takes over what others began."""

import os
import subprocess
import sys

NORMS = """
import hashlib, torch
from twostroke.model.cpu.kernels import elementwise

torch.manual_seed(0)
x, residual = torch.randn(10000, 577).bfloat16(), torch.randn(10000, 577).bfloat16()
normalised, weight = torch.empty_like(x), torch.rand(577)
elementwise._rms_norm.of(x.dtype).run(10000, 8, x, weight, normalised, 577, 1e-5)
elementwise._add_rms_norm.of(x.dtype).run(10000, 8, x, residual, weight, 577, 1e-5)
print(*(hashlib.sha256(each.view(torch.uint8).numpy()).hexdigest() for each in (normalised, x, residual)))
"""


def test_the_first_start_computes_what_later_ones_do(tmp_path):
    def run() -> str:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        return subprocess.check_output([sys.executable, "-c", NORMS], env=environment, text=True)

    first = run()
    assert list(tmp_path.rglob("*.nbc"))
    assert run() == first
