"""Quantisation and KV in FP8 cost the bundled model little: a small part of `twostroke bench accuracy`."""

import math
import statistics

import torch

from twostroke.benchmarks.engines import accuracy
from twostroke.model.bundled import BUNDLED_MODEL_DIR


def test_quantised_weights_and_kv_in_fp8_keep_the_bundled_models_perplexity() -> None:
    torch.set_num_threads(1)
    windows = accuracy.held_out_text(BUNDLED_MODEL_DIR, 256, 3, files=12)
    plain, int8, int4, kv_fp8 = (
        math.exp(statistics.fmean(accuracy.window_losses(BUNDLED_MODEL_DIR, windows, *kind)))
        for kind in accuracy.KINDS.values()
    )
    assert 5 < plain < 20
    assert abs(int8 / plain - 1) < 0.005
    assert 1 < int4 / plain < 1.05
    assert 0 < abs(kv_fp8 / plain - 1) < 0.02
