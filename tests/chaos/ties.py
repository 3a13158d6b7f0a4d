"""Which requests rounding may answer in two ways, so that no fault can be told from a batch of another size.

A router of experts takes the k largest of its logits: where the next one is a few roundings away, the shape of a batch
decides which expert computes a token, and everything after it differs. Such a request is found by computing its answer
again over embeddings with noise a little above what sums in fp32 lose: where a log-probability moves by more than the
noise explains, something jumped.
"""

from collections.abc import Iterable, Sequence

import torch
from transformers import AutoModelForCausalLM

from tests.chaos.verdict import LOGPROB_TOLERANCE

_NOISE = 1e-5  # of an embedding's length: ten times what fp32 sums of a few hundred terms lose
_DRAWS = 8
_JUMP = 6 * LOGPROB_TOLERANCE  # the noise alone moves these models' log-probabilities by a third of it


def unsteady(model_path: str, answers: Iterable[tuple[int, Sequence[int], Sequence[int]]]) -> set[int]:
    """The keys, of (key, prompt's tokens, answer's tokens), whose log-probabilities jump under noise."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    noise = torch.Generator().manual_seed(0)
    found = set()
    for key, prompt, answer in answers:
        tokens = torch.tensor([[*prompt, *answer]])
        embedded = model.get_input_embeddings()(tokens)
        spread = _NOISE * embedded.norm(dim=-1, keepdim=True) / embedded.shape[-1] ** 0.5
        told = [_logprobs(model, embedded, tokens, len(prompt))]
        for _ in range(_DRAWS):
            moved = embedded + spread * torch.randn(embedded.shape, generator=noise)
            told.append(_logprobs(model, moved, tokens, len(prompt)))
        if max((one - told[0]).abs().max().item() for one in told[1:]) > _JUMP:
            found.add(key)
    return found


@torch.inference_mode()
def _logprobs(model: torch.nn.Module, embedded: torch.Tensor, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """Of the tokens from `start` on: embedded [1, tokens, hidden] -> [tokens - start], fp32."""
    logits = model(inputs_embeds=embedded).logits[0, start - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[0, start:, None])[:, 0]
