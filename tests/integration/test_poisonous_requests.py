"""Requests that would break an engine step: each ends alone, and its neighbours' answers do not change."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.integration.local_fleet import GREEDY, Served, Shape, new_state, serve
from tests.integration.test_structured_output import site
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.step import Constraint, PromptScorer
from twostroke.protocol.errors import RequestError, WorkerLost
from twostroke.protocol.requests import GenerateRequest, SamplingParams, ScoringParams
from twostroke.router.text.grammar import of_regex
from twostroke.router.text.tokenizer import TextTokenizer
from twostroke.worker.step_loop import MAX_BROKEN_REQUESTS

PADDED = 4160
"""Tokens of the model below; its tokenizer has 4096."""
PROMPTS = [(5, 6, 7, 8, 9 + number) for number in range(4)]


@pytest.fixture(scope="session")
def gemma3_of_images(write_checkpoint: Any) -> Path:
    """A Gemma 3 that sees images: its vocabulary's size stands in `text_config` alone."""
    text = {
        **{"vocab_size": PADDED, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
        **{"sliding_window": 64, "model_type": "gemma3_text"},
    }
    fields: dict[str, Any] = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    folder: Path = write_checkpoint(**fields, text_config=text, tie_word_embeddings=True)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"text_config": raw["text_config"]}))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        shutil.copy(BUNDLED_MODEL_DIR / name, folder / name)
    return folder


async def test_a_grammar_is_followed_where_the_vocabularys_size_stands_in_text_config(gemma3_of_images: Path) -> None:
    async with site(gemma3_of_images) as here:
        free = [here.ask(seed=1, temperature=0, max_tokens=20) for _ in range(3)]
        held = [here.ask(seed=2, guided_regex="[ab]{3}-[0-9]{2}"), here.ask(seed=3, guided_choice=["red", "dark"])]
        answers = await asyncio.gather(*free, *held)
        assert len({answer["text"] for answer in answers[:3]}) == 1
        assert answers[3]["text"][3] == "-"
        assert answers[4]["text"] in ("red", "dark")
        models = (await here.http.get("/v1/models")).json()
        assert models["data"][0]["vocab_size"] == PADDED
        assert {info.vocab_size for info in here.served.fleet.workers()} == {PADDED}


async def answer(served: Served, request: GenerateRequest) -> list[int]:
    """The tokens of a request as it is, without a router's checks."""
    tokens: list[int] = []
    async for event in served.pipeline.generate(new_state(request)):
        tokens += [token.token_id for token in event.tokens]
    return tokens


def a_request(prompt: tuple[int, ...], **fields: Any) -> GenerateRequest:
    request = GenerateRequest("", "", prompt, len(prompt), GREEDY, 24)
    return msgspec.structs.replace(request, **fields)


def drawn_by(**fields: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**{"temperature": 0.0, **fields})}


POISONS: dict[str, dict[str, Any]] = {
    "a token that the model does not have": {"token_ids": (5, 6, 10**6), "num_prompt_tokens": 3},
    "a negative token": {"token_ids": (5, -1, 7), "num_prompt_tokens": 3},
    "a token of 64 bits": {"token_ids": (5, 2**63, 7), "num_prompt_tokens": 3},
    "more prompt than tokens": {"num_prompt_tokens": 9},
    "more tokens than it may have": {"num_prompt_tokens": 1, "max_tokens": 2},
    "an allowed token that the model does not have": drawn_by(allowed_token_ids=(3, 10**6)),
    "a bias of a token of 64 bits": drawn_by(logit_bias=((2**63, 1.0),)),
    "a bias that is no number": drawn_by(logit_bias=((1, float("nan")),)),
    "an empty bad word": drawn_by(bad_words=((),)),
    "a temperature that is no number": drawn_by(temperature=float("nan")),
    "a temperature that is text": drawn_by(temperature="hot"),
    "a negative top_k": drawn_by(temperature=1.0, top_k=-5),
    "a repetition penalty of zero": drawn_by(repetition_penalty=0.0),
    "an endless penalty": drawn_by(presence_penalty=float("inf")),
    "negative logprobs": drawn_by(logprobs=-3),
    "a stop token of 64 bits": {"stop_token_ids": (2**63,), "min_tokens": 4},
}


@pytest.fixture
def neighbours(folder: Path) -> Callable[..., None]:
    """Runs a request beside four others: it must fail, and they get what they get without it, from the same worker."""

    def run(request: GenerateRequest, shape: Shape, code: str | None = None) -> None:
        async def play() -> None:
            async with serve(folder, shape) as served:
                alone = [await answer(served, a_request(prompt)) for prompt in PROMPTS]
                asked = [answer(served, a_request(prompt)) for prompt in PROMPTS]
                *beside, poison = await asyncio.gather(*asked, answer(served, request), return_exceptions=True)
                assert isinstance(poison, RequestError), poison
                assert code is None or poison.code == code
                assert beside == alone
                for worker in served.fleet.by_peer.values():
                    worker.check_health()
                assert [await answer(served, a_request(prompt)) for prompt in PROMPTS] == alone
                await served.idle()

        asyncio.run(play())

    return run


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("transport", [None, "tcp"], ids=["one worker", "two"])
def test_a_request_that_no_step_can_take_in_is_refused_and_its_neighbours_finish(
    neighbours: Callable[..., None], transport: str | None, poison: str
) -> None:
    neighbours(a_request((5, 6, 7), **POISONS[poison]), Shape(transport, num_blocks=256))


class Broken(Exception):
    """An error that nobody expects."""


@pytest.mark.parametrize("error", [Broken, ValueError, RecursionError])
@pytest.mark.parametrize("transport", [None, "tcp"], ids=["one worker", "two"])
def test_a_row_whose_grammar_raises_in_a_step_ends_alone(
    neighbours: Callable[..., None], monkeypatch: pytest.MonkeyPatch, transport: str | None, error: type[Exception]
) -> None:

    advance = Constraint.advance

    def fails(self: Constraint, history: Any, num_prompt_tokens: int, last_token: int, position: int) -> None:
        if position > num_prompt_tokens + 2:
            raise error("a secret of the prompt")
        advance(self, history, num_prompt_tokens, last_token, position)

    # The tokens of this model have no texts: any tokenizer's masks will do, and are of another width.
    tokenizer = TextTokenizer.load(BUNDLED_MODEL_DIR)
    monkeypatch.setattr(
        "twostroke.cluster.ranks.worker_parts.make_vocabulary", lambda settings, size: tokenizer.vocabulary
    )
    monkeypatch.setattr(Constraint, "advance", fails)
    request = a_request((5, 6, 7), grammar=of_regex("[ab]{50}"))
    neighbours(request, Shape(transport, num_blocks=256), "request_failed")


def test_a_mask_of_a_wrong_size_is_its_requests_error(
    neighbours: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TextTokenizer.load(BUNDLED_MODEL_DIR)
    monkeypatch.setattr(
        "twostroke.cluster.ranks.worker_parts.make_vocabulary", lambda settings, size: tokenizer.vocabulary
    )
    neighbours(a_request((5, 6, 7), grammar=of_regex("[ab]{50}")), Shape(None, num_blocks=256), "request_failed")


@pytest.mark.parametrize("transport", [None, "tcp"], ids=["one worker", "two"])
def test_a_grammar_that_can_not_be_compiled_here_ends_its_request_alone(
    neighbours: Callable[..., None], transport: str | None
) -> None:
    # The folder has no tokenizer at all.
    neighbours(a_request((5, 6, 7), grammar=of_regex("[ab]{50}")), Shape(transport, num_blocks=256))


@pytest.mark.parametrize("part", ["add_scores", "targets", "scores"])
def test_a_prompt_whose_reading_raises_ends_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def fails(*args: Any) -> Any:
        raise Broken("a secret of the prompt")

    monkeypatch.setattr(PromptScorer, part, fails)

    async def play() -> None:
        async with serve(folder, Shape(None, num_blocks=256)) as served:
            alone = [await answer(served, a_request(prompt)) for prompt in PROMPTS]
            info = served.fleet.infos[0]
            read = a_request((5, 6, 7), request_id="read", router_id="router", scoring=ScoringParams(logprobs=2))
            asked = [answer(served, a_request(prompt)) for prompt in PROMPTS]
            *beside, failed = await asyncio.gather(
                *asked,
                served.fleet.score_prompt(info.peer, msgspec.structs.replace(read, max_tokens=1)),
                return_exceptions=True,
            )
            assert isinstance(failed, RequestError), failed
            assert beside == alone
            served.fleet.worker("decode").check_health()
            await served.idle()

    asyncio.run(play())


async def test_a_worker_with_broken_logits_answers_nothing_and_is_unhealthy(folder: Path) -> None:
    async with serve(folder, Shape(None, num_blocks=256, num_decode=2)) as served:
        alone = [await answer(served, a_request(prompt)) for prompt in PROMPTS]
        worker = served.fleet.worker("decode", 1)
        sampler = worker._deps.engine._runner._sampler  # type: ignore[attr-defined]
        sample = sampler.sample
        sampler.sample = lambda logits, *rest: sample(logits.fill_(float("nan")), *rest)
        for _ in range(8):
            asked = [answer(served, a_request(prompt)) for prompt in PROMPTS]
            assert await asyncio.gather(*asked) == alone, "the other worker answers"
        info = served.fleet.infos[1]
        for number in range(MAX_BROKEN_REQUESTS):
            one = a_request((5, 6, 7), request_id=f"r{number}", router_id="router")
            with pytest.raises((RequestError, WorkerLost)):
                await served.fleet.decode(info.peer, one, None)
        with pytest.raises(
            WorkerLost, match="requests were NaN or infinite: the model's weights or its cache are broken"
        ):
            worker.check_health()
        served.fleet.worker("decode", 0).check_health()


async def test_an_answer_whose_text_can_not_be_made_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: TextTokenizer, token_id: int) -> Any:
        raise Broken("a secret of the answer")

    monkeypatch.setattr(TextTokenizer, "_piece", fails)
    async with site(transport=None) as here:
        alone = [await here.ask(seed=seed) for seed in range(3)]
        body = {"model": "bundled", "prompt": "import os\n", "max_tokens": 50, "logprobs": 2}
        asked = here.http.post("/v1/completions", json=body)
        *beside, failed = await asyncio.gather(
            *(here.ask(seed=seed) for seed in range(3)), asked, return_exceptions=True
        )
        assert beside == alone
        assert isinstance(failed, Broken) or failed.status_code == 500  # type: ignore[union-attr]
        here.served.fleet.worker("decode").check_health()
