import json
import time
from importlib.resources import files

import pytest
from pydantic import ValidationError

from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import Promise
from twostroke.router.openai.jobs import JobMaker, RequestLimits, chat_prompt
from twostroke.router.openai.messages import MessagesRequest
from twostroke.router.openai.responses import ResponsesRequest
from twostroke.router.openai.schemas import ChatRequest, CompletionRequest
from twostroke.router.text.generation_config import SamplingDefaults
from twostroke.router.text.tokenizer import TextTokenizer


@pytest.fixture
def maker(tokenizer):
    return JobMaker(tokenizer, SamplingDefaults())


TERMS = RequestLimits(max_context=100, promise=Promise())
HUGE = RequestLimits(max_context=8000, promise=Promise())
ROOMY = RequestLimits(max_context=1000, promise=Promise())


async def jobs_of(maker, **fields):
    return await maker.make(CompletionRequest.model_validate({"model": "m", "prompt": [5, 6, 7], **fields}), TERMS)


async def only(maker, **fields):
    (job,) = await jobs_of(maker, **fields)
    return job.request


async def test_every_sampling_field_reaches_the_workers(maker):
    request = await only(
        maker,
        temperature=0.5,
        top_k=9,
        top_p=0.8,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"7": 2, "3": -1},
        seed=-2,
        logprobs=4,
        max_tokens=30,
        min_tokens=2,
        stop_token_ids=[9, 1],
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 9, 0.8, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.2)
    assert sampling.logit_bias == ((3, -1.0), (7, 2.0))
    assert (sampling.seed, sampling.logprobs) == (2**63 - 2, 4)
    assert (request.max_tokens, request.min_tokens, request.stop_token_ids) == (30, 2, (1, 9))
    assert (request.token_ids, request.num_prompt_tokens) == ((5, 6, 7), 3)


async def test_what_is_not_given_has_openais_defaults(maker):
    request = await only(maker)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert (sampling.logprobs, request.max_tokens, request.stop_token_ids) == (None, 16, (1,))
    assert sampling.seed != (await only(maker)).sampling.seed
    assert (await only(maker, prompt=[5] * 95)).max_tokens == 5, "or what there is room for"
    assert (await only(maker, top_k=-1)).sampling.top_k == 0
    assert (await only(maker, ignore_eos=True)).stop_token_ids == ()
    assert (await only(maker, temperature=0)).sampling.temperature == 0


MODELS_OWN = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.02, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("body", "drawn"),
    [
        ({}, (0.6, 0.95, 20, 0.02, 1.1)),
        ({"temperature": 0, "top_p": None}, (0.0, 0.95, 20, 0.02, 1.1)),
        ({"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}, (1.0, 1.0, 0, 0.0, 1.0)),
        ({"top_k": -1}, (0.6, 0.95, 0, 0.02, 1.1)),
    ],
)
async def test_the_models_defaults_fill_what_a_request_leaves_out(tokenizer, body, drawn):
    sampling = (await only(JobMaker(tokenizer, MODELS_OWN), **body)).sampling
    assert drawn == (
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.repetition_penalty,
    )


async def test_choices_of_a_prompt_have_seeds_of_their_own_that_do_not_depend_on_the_other_prompts(maker):
    two = await jobs_of(maker, prompt=[[5], [6]], n=2, seed=3)
    one = await jobs_of(maker, prompt=[6], n=2, seed=3)
    assert [job.index for job in two] == [0, 1, 2, 3]
    assert [job.group for job in two] == [0, 0, 1, 1]
    assert [job.request for job in two[2:]] == [job.request for job in one]
    assert one[0].request.sampling.seed == 3 != one[1].request.sampling.seed


@pytest.mark.parametrize(("length", "room"), [(99, 1), (1, 99)])
async def test_prompt_and_output_share_the_context(maker, length, room):
    assert (await only(maker, prompt=[5] * length, max_tokens=room)).max_tokens == room
    with pytest.raises(RequestError) as caught:
        await only(maker, prompt=[5] * length, max_tokens=room + 1)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(RequestError) as caught:
        await only(maker, prompt=[5] * 100)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


async def test_a_chat_with_tokens_that_the_model_does_not_have_is_refused(tokenizer):
    maker = JobMaker(tokenizer, SamplingDefaults(), vocab_size=lambda: 100)
    chat = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "words and more"}]})
    with pytest.raises(RequestError, match="messages: token ids must be below the vocabulary's size of 100"):
        await maker.make(chat, TERMS)


async def test_a_chat_has_no_second_begin_token_and_all_the_room(maker):
    chat = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "a"}], "logprobs": True})
    (job,) = await maker.make(chat, TERMS)
    assert job.request.token_ids.count(0) == 1
    assert job.request.max_tokens == 100 - job.request.num_prompt_tokens
    assert job.request.sampling.logprobs == 0


async def test_the_template_sees_the_documents_of_a_chat():
    template = "{% for one in documents or [] %}[{{ one.title }}: {{ one.text }}]{% endfor %}{{ messages[0].content }}"
    speaker = TextTokenizer.load(BUNDLED_MODEL_DIR, template)
    body = {"messages": [{"role": "user", "content": "Which?"}]}
    documents = [{"title": "a", "text": "b"}, {"title": "c", "text": "d é"}]
    for more, prompt in (
        ({"documents": documents}, "[a: b][c: d é]Which?"),
        ({"documents": []}, "Which?"),
        ({}, "Which?"),
    ):
        chat = ChatRequest.model_validate({**body, **more})
        (job,) = await JobMaker(speaker, SamplingDefaults()).make(chat, TERMS)
        assert speaker.decode(job.request.token_ids) == prompt


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"regex": "a" * 1_000_000}, "65536 characters"),
        ({"grammar": "start: " + "a " * 500_000}, "65536 characters"),
        ({"json": {"enum": ["a" * 1_000_000]}}, "takes 1000013 bytes"),
        ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "is no JSON"),
        ({"json": json.loads('{"items":' * 65 + "{}" + "}" * 65)}, "nested 64 levels deep"),
        ({"json": {"multipleOf": 999_983}}, "too large together"),
    ],
    ids=range(6),
)
async def test_what_is_far_too_much_is_refused_before_it_is_compiled(tokenizer, monkeypatch, body, said):
    async def compiles(grammars, grammar):
        raise AssertionError("it is compiled")

    monkeypatch.setattr("twostroke.protocol.grammars.Grammars.matcher", compiles)
    with pytest.raises((RequestError, ValidationError), match=said):
        await only(JobMaker(tokenizer, SamplingDefaults()), structured_outputs=body)


FORMATS = sorted(
    path.name.removesuffix(".json") for path in files("twostroke.router.text").joinpath("output_formats").iterdir()
)
RAIN = {"name": "rain", "parameters": {"type": "object", "properties": {"day": {"type": "integer"}}}}


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("think")])
async def test_calls_can_be_enforced_in_every_format_of_ours(name):
    speaker = TextTokenizer.load(BUNDLED_MODEL_DIR, "{{ messages[0].content }}", name)
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": RAIN}]}
    chat = ChatRequest.model_validate({**body, "tool_choice": "required"})
    (job,) = await JobMaker(speaker, SamplingDefaults()).make(chat, ROOMY)
    assert "rain" in job.request.grammar


async def test_calls_of_a_format_that_others_wrote_are_enforced_in_the_generic_one(tmp_path):
    field = {"open": "<call>", "close": "</call>", "content": "json"}
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"start_anchor": "A", "fields": {"tool_calls": field, "content": {}}}), encoding="utf-8")
    speaker = TextTokenizer.load(BUNDLED_MODEL_DIR, "{{ tools }}{{ messages[0].content }}", str(path))
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": RAIN}]}
    for choice, mark in (("required", "<tool_call>"), ("auto", "<call>")):
        chat = ChatRequest.model_validate({**body, "tool_choice": choice})
        (job,) = await JobMaker(speaker, SamplingDefaults()).make(chat, ROOMY)
        assert bool(job.request.grammar) == (choice == "required")
        assert mark in job.request.grammar or choice == "auto"
        parser = job.chat.parser()
        assert parser.add(f'{mark}{{"name": "rain", "arguments": {{}}}}').calls
        assert "You may call" not in speaker.decode(job.request.token_ids), "the template has a place for tools"


async def test_a_template_of_others_that_tells_of_no_calls_is_named_where_there_are_tools(tmp_path):
    path = tmp_path / "own.json"
    thoughts = {"open": "<hm>", "close": "</hm>"}
    path.write_text(json.dumps({"start_anchor": "A", "fields": {"thinking": thoughts, "content": {}}}), "utf-8")
    speaker = TextTokenizer.load(BUNDLED_MODEL_DIR, "{{ messages[0].content }}", str(path))
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": RAIN}]}
    with pytest.raises(RequestError, match=r"^tools: .* model\.response_template"):
        await JobMaker(speaker, SamplingDefaults()).make(ChatRequest.model_validate(body), ROOMY)


V31 = (
    "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}{% elif m.role == 'tool' %}R{{ m.content }}"
    "{% elif m.tool_calls %}{% for call in m.tool_calls %}{% if m.content is none %}"
    "{{ 'C' + call.function.name + call.function.arguments }}{% endif %}{% endfor %}{% else %}A{{ m.content }}"
    "{% endif %}{% endfor %}"
)


async def test_conversations_go_on_after_a_call_where_the_template_takes_text_beside_null():
    speaker = TextTokenizer.load(BUNDLED_MODEL_DIR, V31)
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "rain", "arguments": '{"day": 1}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "b"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "c"},
    ]
    (job,) = await JobMaker(speaker, SamplingDefaults()).make(ChatRequest.model_validate({"messages": messages}), TERMS)
    assert speaker.decode(job.request.token_ids) == 'UaAI look.Crain{"day": 1}RbCrain{"day": 1}Rc'


async def test_developers_rules_and_arguments_that_are_none_reach_the_model():
    template = (
        "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endif %}{% endfor %}"
    )
    speaker = TextTokenizer.load(BUNDLED_MODEL_DIR, template)
    called = [{"id": "c", "function": {"name": "rain", "arguments": one}} for one in ("", None, '{"da')]
    body = {
        "messages": [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": called},
        ]
    }
    (job,) = await JobMaker(speaker, SamplingDefaults()).make(ChatRequest.model_validate(body), TERMS)
    assert speaker.decode(job.request.token_ids) == "Be kind.a" + '{"name": "rain", "arguments": {}}' * 3
    body = {"model": "m", "instructions": "Be brief.", "input": [{"role": "developer", "content": "Be kind."}]}
    body["input"].append({"role": "user", "content": "a"})
    body["input"].append({"type": "function_call", "call_id": "c", "name": "rain", "arguments": None})
    chat = ResponsesRequest.model_validate(body).draft().chat()
    (job,) = await JobMaker(speaker, SamplingDefaults()).make(chat, TERMS)
    assert speaker.decode(job.request.token_ids) == 'Be brief.Be kind.a{"name": "rain", "arguments": {}}'


@pytest.mark.parametrize(
    ("shown", "said", "prompt"),
    [
        ("{{ m.content }}", "It rains", "It rains"),
        ("{{ m.content }}", "end", "end"),
        ("{{ m.content }}", ">", ">"),
        ("{{ m.content }}", "<|im_end|>", "<|im_end|>"),
        ("{{ m.content }}", "def f():\n    ", "def f():\n    "),
        ("{{ m.content }}", "", ""),
        ("{{ m.content }}", " \n", " \n"),
        ("{{ m.content | trim }}", "def f():\n    ", "def f():"),
        ("{{ m.content | trim }}", "", ""),
        ("{{ m.content | trim }}", "\n", ""),
        ("{{ ' ' + m.content | trim + ' ' }}", "It rains ", " It rains"),
        ("{{ m.content.split('</think>')[-1] }}", "It rains", "It rains"),
    ],
)
async def test_an_answer_goes_on_where_the_last_message_ends(shown, said, prompt):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + shown + "<|im_end|>\n{% endfor %}end"
    speaker = TextTokenizer.load(BUNDLED_MODEL_DIR, template)
    messages = [{"role": "user", "content": "It rains, end>"}, {"role": "assistant", "content": said}]
    chat = ChatRequest.model_validate({"messages": messages, "continue_final_message": True})
    text = chat_prompt(speaker, chat)
    assert text.rpartition("assistant\n")[2] == prompt
    for content in (said, [{"type": "text", "text": said}], *([[]] if not said else [])):
        body = {"model": "m", "max_tokens": 5, "messages": [messages[0], {"role": "assistant", "content": content}]}
        chat = MessagesRequest.model_validate(body).draft().chat()
        assert chat_prompt(speaker, chat) == text


async def test_what_the_prompt_has_of_an_answer_is_read_once_for_all_choices():
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}{# <tool_call><arg_key> #}"
    speaker = TextTokenizer.load(BUNDLED_MODEL_DIR, template)
    begun = "<tool_call>f\n<arg_key>" + " " * 1600 + "x"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": begun}]
    body = {"messages": messages, "continue_final_message": True, "tools": [{"type": "function", "function": RAIN}]}
    begin = time.process_time()
    jobs = await JobMaker(speaker, SamplingDefaults()).make(ChatRequest.model_validate({**body, "n": 64}), HUGE)
    parsers = [job.chat.parser() for job in jobs]
    assert time.process_time() - begin < 1.5
    told = [parser.add(f"</tool_call>{i}") for i, parser in enumerate(parsers)]
    assert [one.content for one in told] == [f"</tool_call>{i}" for i in range(64)]


async def test_a_chat_without_a_limit_gets_one_that_the_response_may_hold(tokenizer):
    speaker = TextTokenizer.load(BUNDLED_MODEL_DIR, chat_template="{{ messages[0].content }}")
    maker = JobMaker(speaker, SamplingDefaults(), max_items=60)

    async def limit(**fields):
        chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "import"}], **fields})
        return (await maker.make(chat, TERMS))[0].request.max_tokens

    room = await limit(stream=True)
    assert room > 60
    assert await limit() == 60
    assert await limit(n=3) == 20
    assert await limit(logprobs=True, top_logprobs=4) == 10
    assert await limit(n=64, max_tokens=0, prompt_logprobs=0) == 0


async def test_a_seed_of_minus_one_is_random_as_for_vllms_users(maker):
    seeds = {(await only(maker, seed=seed)).sampling.seed for seed in (-1, -1, None)}
    assert len(seeds) == 3


async def test_a_model_that_thinks_and_knows_no_tools_thinks_before_it_calls():
    speaker = TextTokenizer.load(BUNDLED_MODEL_DIR, "{{ messages[0].content }}{# </think> #}")
    assert speaker.response_template == "think"
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": RAIN}]}
    for choice in ("auto", "required"):
        chat = ChatRequest.model_validate({**body, "tool_choice": choice})
        (job,) = await JobMaker(speaker, SamplingDefaults()).make(chat, ROOMY)
        parser = job.chat.parser()
        told = parser.add('<think>Hm.</think><tool_call>{"name": "rain", "arguments": {}}</tool_call>')
        assert (told.reasoning, [call.name for call in told.calls]) == ("Hm.", ["rain"])
        assert ("<think>" in job.request.grammar) == (choice == "required")
