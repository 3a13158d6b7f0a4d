"""Requests that rounding may answer in two ways, so that a fault looks like a batch of another size.

A router of experts takes the k largest of its logits: where the next one is a few roundings away, the shape of a batch
decides which expert computes a token, and everything after it differs. Such a request is found by computing its answer
again over embeddings with noise above what sums in fp32 lose: where a log-probability moves by more than the noise
explains, something jumped.
"""

from collections.abc import Iterable, Sequence

import torch
from transformers import AutoModelForCausalLM

from tests.chaos.answers import LOGPROB_TOLERANCE

_NOISE = 1e-5  # of an embedding's length: ten times what fp32 sums of a few hundred terms lose
_DRAWS = 8
_JUMP = 6 * LOGPROB_TOLERANCE  # the noise alone moves these models' log-probabilities by a third of it


@torch.inference_mode()
def unsteady(model_path: str, answers: Iterable[tuple[int, Sequence[int], Sequence[int]]]) -> set[int]:
    """The keys, of (key, prompt's tokens, answer's tokens), whose log-probabilities jump under noise."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    found = set()
    for key, prompt, answer in answers:
        embedded = model.get_input_embeddings()(torch.tensor([*prompt, *answer]))
        noise = torch.randn((1 + _DRAWS, *embedded.shape), generator=generator)
        noise[0] = 0  # what the others are compared with
        moved = embedded + _NOISE * embedded.square().mean(-1, keepdim=True).sqrt() * noise
        logits = model(inputs_embeds=moved).logits[:, len(prompt) - 1 : -1]
        told = logits.log_softmax(-1)[:, torch.arange(len(answer)), torch.tensor(answer)]
        if (told - told[0]).abs().max() > _JUMP:
            found.add(key)
    return found
