"""Engines of tests, and prefill and decode engines with a real KV transfer between them."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.model.parallel.test_tensor_parallel import Ranks
from tests.rigs.kv_pair import Pair, make_pair
from twostroke.model.backend import LoadOptions
from twostroke.model.cache.kv_cache import KVCache, make_kv_cache
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.parallel.form import ParallelForm, Shard
from twostroke.model.parallel.tensor_parallel import GroupRanks, Rendezvous, SingleRank, TensorParallel
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.served import Way, open_model
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SampledToken, SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, MAX_CONTEXT = 8, 400, 1024
GREEDY = SamplingParams(temperature=0.0)
MIN_MARGIN = 2e-4
"""Minimum margin between the best two logits, far over fp32's rounding here: rows are compared up to their first nearer
tie."""


def make_engine(folder: Path, way: Way | None, parallel: TensorParallel | None = None) -> tuple[ModelRunner, KVCache]:
    """One rank's, in fp32, with its cache."""
    parallel = SingleRank() if parallel is None else parallel
    model, shard = open_model(folder, way), parallel.shard
    decoder = model.decoder(LoadOptions(torch.float32, CPU, MAX_CONTEXT, "none"), CpuBackend(), parallel)
    cache = make_kv_cache(
        model.shape,
        num_blocks=NUM_BLOCKS * model.shape.kv_groups.count,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=CPU,
        model_digest=model.digest() if shard.rank == 0 else "",
        parallel=ParallelForm(shard.size),
        rank=shard.rank,
    )
    sampler = Sampler(decoder.vocab_size) if shard.rank == 0 else None
    return ModelRunner(decoder, sampler, cache, MAX_CONTEXT, parallel=parallel), cache


@contextmanager
def ranks(folder: Path, way: Way | None, size: int) -> Iterator[Ranks]:
    """An engine of several, threads of this process, joined by gloo."""
    rendezvous = Rendezvous("127.0.0.1")
    with ThreadPoolExecutor(size) as threads:
        groups = list(threads.map(lambda rank: GroupRanks(Shard(rank, size), rendezvous.address, CPU), range(size)))
        yield Ranks(
            [runner for runner, _ in threads.map(lambda group: make_engine(folder, way, group), groups)], threads
        )


def reference(folder: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Return transformers' greedy answers, prompt by prompt, each up to its first near-tie."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    answers: list[list[int]] = []
    for prompt in prompts:
        tokens = torch.tensor([list(prompt)])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens))
        best = torch.cat(out.logits).topk(2).values
        ties = (best[:, 0] - best[:, 1] < MIN_MARGIN).nonzero()
        answers.append(out.sequences[0, len(prompt) :][: int(ties[0]) if len(ties) else new_tokens].tolist())
    assert sum(map(len, answers)) >= 0.8 * len(answers) * new_tokens, "choose another seed: too many near-ties"
    return answers


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


async def disaggregated(
    folder: Path, way: Way | None, turns: Sequence[Sequence[list[int]]], new_tokens: int, chunk: int = 128
) -> list[list[list[int]]]:
    """Answers to each turn's prompts. A prefill engine reads them one by one, and sends each layer of each chunk as it
    is computed to a decode engine, which goes on with all at once. Prompt i of a turn begins with prompt i of the turn
    before: what both engines' full blocks hold of that is neither computed nor sent again.
    """
    (prefill, source), (decode, target) = make_engine(folder, way), make_engine(folder, way)
    width = NUM_BLOCKS // len(turns[0]) * prefill.groups.count
    answers: list[list[list[int]]] = []
    async with make_pair(source=source, target=target) as pair:  # type: ignore[arg-type]
        known = [0] * len(turns[0])  # tokens in full blocks on both sides
        for number, prompts in enumerate(turns):
            histories = [list(prompt) for prompt in prompts]
            for row, prompt in enumerate(prompts):
                here = [row * width + i for i in range(width)]
                there = [target.num_blocks - 1 - block for block in here]
                histories[row].append(
                    await _hand_over(pair, prefill, prompt, known[row], (here, there), f"{number}-{row}", chunk)
                )
            for _ in range(new_tokens - 1):
                steps = [
                    SequenceStep(
                        [history[-1]],
                        len(history) - 1,
                        [target.num_blocks - 1 - row * width - i for i in range(width)],
                        Draw(GREEDY, history, len(prompts[row])),
                    )
                    for row, history in enumerate(histories)
                ]
                for history, token in zip(histories, decode.run(steps), strict=True):
                    assert token is not None
                    history.append(token.token_id)
            answers.append([history[len(prompt) :] for history, prompt in zip(histories, prompts, strict=True)])
            known = [len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]
    source.close()
    target.close()
    return answers


async def _hand_over(
    pair: Pair,
    prefill: ModelRunner,
    prompt: list[int],
    known: int,
    tables: tuple[list[int], list[int]],
    name: str,
    chunk: int,
) -> int:
    """The first token of a prompt, whose KV is at the decode engine then."""
    here, there = (table[: -(-len(prompt) // BLOCK_SIZE) * prefill.groups.count] for table in tables)
    ticket = pair.ticket(name)
    incoming = pair.receiver.expect_transfer(ticket, there, len(prompt), known)
    outgoing = pair.sender.begin_transfer(ticket, len(prompt), here, known)
    drawn: SampledToken | None = None
    for start in range(known, len(prompt), chunk):
        tokens = prompt[start : start + chunk]
        end = start + len(tokens)
        draw = Draw(GREEDY, prompt, len(prompt)) if end == len(prompt) else None
        step = SequenceStep(tokens, start, here, draw)
        (drawn,) = prefill.run([step], lambda layer, end=end: outgoing.layer_ready(layer, end))  # type: ignore[misc]
    assert drawn is not None
    outgoing.commit(drawn)
    assert await incoming.verified() == drawn
    await outgoing.done()
    return drawn.token_id
