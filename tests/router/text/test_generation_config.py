import json

import pytest

from twostroke.protocol.errors import ConfigError
from twostroke.router.text.generation_config import SamplingDefaults, read_sampling_defaults

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def write(folder, content):
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("content", "defaults", "told"),
    [
        (QWEN3, SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20), "temperature 0.6, top_p 0.95, top_k 20"),
        ({"min_p": 0.05, "repetition_penalty": 1.05}, SamplingDefaults(min_p=0.05, repetition_penalty=1.05), None),
        ({"temperature": 1, "top_k": None, "max_new_tokens": 2048}, SamplingDefaults(), ""),
        ({"do_sample": False}, SamplingDefaults(), ""),
    ],
)
def test_the_files_word_is_the_default_and_else_openais(tmp_path, content, defaults, told):
    assert read_sampling_defaults(tmp_path, "auto") == SamplingDefaults()
    write(tmp_path, content)
    assert read_sampling_defaults(tmp_path, "auto") == defaults
    assert told is None or str(defaults) == told
    assert read_sampling_defaults(tmp_path, "none") == SamplingDefaults()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 0.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ("{", "JSON"),
        ("[]", "JSON object"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(tmp_path, content, named):
    write(tmp_path, content)
    with pytest.raises(ConfigError, match=named) as caught:
        read_sampling_defaults(tmp_path, "auto")
    assert "generation_config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert read_sampling_defaults(tmp_path, "none") == SamplingDefaults()
