"""The format by which a model's output is parsed. The excerpts have the marks of the families' chat templates alone."""

import json
import shutil

import pytest

from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.router.text.output_format import pick_output_format
from twostroke.router.text.tokenizer import TextTokenizer

HERMES = "{{ '<tool_call>\\n' + call | tojson + '\\n</tool_call>' }}"
DEEPSEEK = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + %s + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
EXCERPTS = {
    "Hermes 2 Pro, Qwen2.5": ("<|im_start|>{{ role }} " + HERMES, "hermes"),
    "Qwen3": ("<|im_start|>{{ content.split('</think>')[-1] }} " + HERMES, "hermes+think"),
    "Qwen3-Coder": (
        "{{ '<tool_call>\\n<function=' + name + '>' }}{{ '<parameter=' + key + '>' }}{{ '</tool_call>' }}",
        "qwen3_coder",
    ),
    "GLM-4.5": (
        "[gMASK]<sop><|assistant|></think>{{ '<tool_call>' + name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>",
        "glm4+think",
    ),
    "GLM-4.7": (
        "[gMASK]<sop><|assistant|></think>{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key><arg_value>",
        "glm47+think",
    ),
    "Qwen3.5, Nemotron 3": (
        "{{ '<tool_call>\\n<function=' + name + '>' }}{{ '<parameter=' + key + '>' }}</tool_call><think>\\n</think>",
        "qwen3_coder+think",
    ),
    "MiniMax-M2": ("]~b]ai\n{{ content.split('</think>') }}<minimax:tool_call><invoke name=", "minimax_m2+think"),
    "Kimi K2": ("<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ arguments }}", "kimi_k2"),
    "DeepSeek-V3.2": ("{% set dsml = '｜DSML｜' %}</think><{{ dsml }}function_calls>", "deepseek_v32+think"),
    "LFM2": ("<|im_start|>List of tools: <|tool_list_start|>{{ tools }}<|tool_list_end|>", "lfm2"),
    "LFM2.5": ("<|im_start|>{{ '<|tool_call_start|>[' + calls + ']<|tool_call_end|>' }}</think>", "lfm2+think"),
    "Llama 4": ("<|header_start|>{{ role }}<|header_end|>{{ '{\"name\": ' }}{{ '\"parameters\": ' }}", "llama3"),
    "Llama 4, told to write Python": (
        "<|header_start|>{{ role }}<|header_end|>Use [func_name1(param1=value1), func_name2(...)] of the parameters",
        "pythonic",
    ),
    "Nemotron Nano 2": ("<SPECIAL_11>Assistant\n<think>{{ '<TOOLCALL>[' }}</think>", "nemotron+think"),
    "Mistral 7B v0.3": ("[INST]{{ content }}[/INST][TOOL_CALLS] [{{ call | tojson }}]", "mistral"),
    "Mistral Small 3.2": ("[/INST]{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral_args"),
    "Magistral": ("[THINK]{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral_args+think_mistral"),
    "DeepSeek-V3": (DEEPSEEK % "type + '<｜tool▁sep｜>' + name + '\\n```json\\n'", "deepseek_v3"),
    "DeepSeek-R1": (DEEPSEEK % "type + '\\n```json\\n'" + "{{ content.split('</think>')[-1] }}", "deepseek_v3+think"),
    "DeepSeek-V3.1": (DEEPSEEK % "name + '<｜tool▁sep｜>'" + "</think>", "deepseek_v31+think"),
    "Granite 3": ("<|start_of_role|>{{ role }}<|end_of_role|><|tool_call|>{{ calls | tojson }}", "granite"),
    "Llama 3.1": (
        "<|start_header_id|>{{ role }}<|end_header_id|>{{ '{\"name\": ' }}{{ '\"parameters\": ' }}<|python_tag|>",
        "llama3",
    ),
    "FunctionGemma": ("{{ '<start_function_call>call:' + name + '{' }}<escape><end_function_call>", "gemma"),
    "Gemma 4": ("<|turn>model{{ '<|tool_call>call:' + name + '{' }}<tool_call|><|channel>thought", "gemma4"),
    "gpt-oss": ("<|start|>assistant<|channel|>final<|message|>{{ content }}<|return|>", "harmony"),
    "SmolLM2": ("{{ '<|im_start|>' + role + '\\n' + content + '<|im_end|>' }}", None),
    "Llama 3": ("<|start_header_id|>{{ role }}<|end_header_id|>{{ content }}<|eot_id|>", None),
    "Llama 3 Groq Tool Use": ('<|start_header_id|>{{ role }}<|end_header_id|>{"parameters": ' + HERMES, "hermes"),
    "Granite 4": ("<|start_of_role|>{{ role }}<|end_of_role|>" + HERMES, "hermes"),
    "Hermes, told of fenced JSON": ("<|im_start|>{{ 'Answer in ```json' }} " + HERMES, "hermes"),
    "Functionary 3.1": ("{{ '<function=' + name + '>' + arguments + '</function>' }}", None),
    "Seed-OSS": (
        "{{ '<seed:tool_call>\\n<function=' + name + '>' }}{{ '<parameter=' + key + '>' }}{{ '</seed:tool_call>' }}",
        None,
    ),
    "Phi-4-mini": ("<|{{ role }}|><|tool|>{{ tool.name }} {{ tool.parameters | tojson }}<|/tool|>", None),
    "Phi-4-reasoning": ("<|im_start|>{{ role }}<|im_sep|>{{ '<think>' }}{{ '</think>' }}", "think"),
}


@pytest.mark.parametrize("family", EXCERPTS)
def test_the_format_is_told_by_the_marks_of_the_chat_template(family):
    template, expected = EXCERPTS[family]
    picked = pick_output_format(None, None, "", template)
    assert (None if picked is None else picked.name) == expected
    assert pick_output_format("none", None, "", template) is None


OWN = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<hm>", "close": "</hm>"},
        "tool_calls": {
            "open": "<do>",
            "close": "</do>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{what}", "arguments": "{how}"}},
        },
        "content": {},
    },
}
WRITTEN = '<hm>Oslo.</hm>I look.<do>{"what": "rain", "how": {"city": "Oslo"}}</do>'


def test_a_checkpoints_own_response_template_goes_before_ours(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL_DIR, folder)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": EXCERPTS["Qwen3"][0]}
    path.write_text(json.dumps(config | {"response_template": OWN}), encoding="utf-8")
    speaker = TextTokenizer.load(folder)
    assert speaker.response_template == "its own"
    parser = speaker.output_format.language.parser("<|im_start|>assistant\n", {"rain": {}})
    told = [*map(parser.add, WRITTEN), parser.finish()]
    assert "".join(one.reasoning for one in told) == "Oslo."
    assert "".join(one.content for one in told) == "I look."
    calls = [call for one in told for call in one.calls]
    assert "".join(call.name for call in calls) == "rain"
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Oslo"}
    assert TextTokenizer.load(folder, response_template="hermes").response_template == "hermes"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert TextTokenizer.load(folder).response_template == "hermes+think"
