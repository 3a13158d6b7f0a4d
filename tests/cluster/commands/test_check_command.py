"""`twostroke check`: what a model takes, from its config.json alone."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from twostroke.cluster.cli import main
from twostroke.cluster.commands import check
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.costs.sizes import num_parameters
from twostroke.model.published.models import MODELS, published_model

LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
}
LLAMA_3_1_8B = LLAMA_3_1 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_3_1_70B = LLAMA_3_1 | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
GIB = 2**30


def checked(
    folder: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], *arguments: str
) -> tuple[int, dict[str, Any]]:
    (folder / "config.json").write_text(json.dumps(fields))
    code = main(["check", str(folder), "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_figures_are_those_that_meta_and_the_papers_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = checked(tmp_path, capsys, LLAMA_3_1_8B, "--gpu", "h100-80gb", "--dtype", "bfloat16")
    assert code == 0
    assert (told["family"], told["way"], told["reason"]) == ("Llama", "native", None)
    assert told["parameters"] == told["active_parameters"] == 8_030_261_248
    assert told["weight_bytes"] == 2 * told["parameters"]
    assert (told["kv_bytes_per_token"], told["kv_window_bytes"]) == (128 * 1024, 0)
    assert told["max_context"] == 131072
    left = 0.9 * 80 * GIB - told["weight_bytes"] - told["step_bytes"]
    assert told["max_requests"] == pytest.approx(left / (131072 * 128 * 1024), abs=1) == 3


def test_ranks_share_weights_and_kv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone, told = checked(tmp_path, capsys, LLAMA_3_1_70B, "--gpu", "h100-80gb", "--dtype", "bfloat16")
    assert (alone, told["way"], told["max_requests"]) == (2, "refused", 0)
    assert "leaves nothing for the KV cache: quantise, take more ranks" in told["reason"]
    code, told = checked(
        tmp_path, capsys, LLAMA_3_1_70B, "--gpu", "h100-80gb", "--dtype", "bfloat16", "--tensor-parallel", "4"
    )
    assert (code, told["ranks"], told["kv_bytes_per_token"]) == (0, 4, 320 * 1024 // 4)
    assert told["weight_bytes"] == 2 * 70_553_706_496 // 4


def test_a_name_that_plan_knows_is_one_for_check_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (name for name, model in MODELS.items() if not model.stands_for):
        assert main(["check", name, "--gpu", "h200", "--tensor-parallel", "2", "--json"]) in (0, 2)
        told = json.loads(capsys.readouterr().out)
        assert told["family"] is not None, (name, told["reason"])
        assert told["parameters"] == num_parameters(published_model(name)), name
    assert main(["check", "Qwen3-8B", "--gpu", "h200"]) == 0
    assert "with your copy of the model in place of its name" in capsys.readouterr().out
    monkeypatch.setattr(check, "resolve_model_folder", lambda *_: BUNDLED_MODEL_DIR)
    assert main(["check", "Somebody/Qwen3-8B", "--gpu", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] != num_parameters(published_model("Qwen3-8B"))


def test_ranks_with_whole_experts_take_as_much_as_the_one_with_the_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = LLAMA_3_1_8B | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 9,
        "num_experts_per_tok": 2,
    }
    on = tmp_path, capsys, fields, "--gpu", "h200", "--dtype", "bfloat16", "--tensor-parallel", "4"
    by_parts, whole = (checked(*on, *more)[1]["weight_bytes"] for more in ((), ("--expert-parallel",)))
    expert = 2 * 3 * 4096 * 14336 * 32
    assert whole == by_parts + (3 - 9 / 4) * expert
    main(["check", str(tmp_path), *on[3:], "--expert-parallel"])
    assert (
        "    decode: {num_gpus: 1, tensor_parallel: 4, expert_parallel: true}" in capsys.readouterr().out.splitlines()
    )
    code, told = checked(tmp_path, capsys, LLAMA_3_1_8B, "--expert-parallel")
    assert (code, told["way"]) == (2, "refused")
    assert "expert_parallel: the model has no experts" in told["reason"]


def test_ranks_that_share_contexts_have_room_for_as_many_times_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = dict(MODELS["DeepSeek-V3"].config)
    on = tmp_path, capsys, fields, "--gpu", "h200", "--tensor-parallel", "8"
    (_, copies), (code, parts) = (checked(*on, *more) for more in ((), ("--context-parallel",)))
    assert code == 0
    assert copies["kv_bytes_per_token"] == 61 * 576 * 2
    assert parts["kv_bytes_per_token"] == copies["kv_bytes_per_token"] // 8
    assert parts["max_requests"] // copies["max_requests"] in (8, 9)
    main(["check", str(tmp_path), *on[3:], "--context-parallel"])
    worker = "    decode: {num_gpus: 1, tensor_parallel: 8, context_parallel: true}"
    assert worker in capsys.readouterr().out.splitlines()
    code, told = checked(tmp_path, capsys, LLAMA_3_1_8B, "--context-parallel")
    assert (code, told["way"]) == (2, "refused")
    assert "context_parallel: ranks share the tokens of latents, and this model caches keys" in told["reason"]
    path = tmp_path / "cluster.yaml"
    path.write_text("model: {block_size: 12}\n")
    code, told = checked(*on, "--context-parallel", "--config", str(path))
    assert "8 ranks can't share blocks of 12 tokens evenly: use a block_size that is a multiple of 8" in told["reason"]


def test_a_configuration_file_says_how_the_model_is_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: {quantization: int8, dtype: bfloat16}\n")
    code, told = checked(tmp_path, capsys, LLAMA_3_1_8B, "--gpu", "l4", "--config", str(path))
    assert (code, told["quantization"]) == (0, "int8")
    assert told["weight_bytes"] < 1.2 * told["parameters"]
    assert 0 < told["max_context"] < 131072
    assert told["max_requests"] == 1


def test_each_role_is_told_where_they_hold_the_model_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: {dtype: bfloat16}\ndecode: {quantization: int4}\n")
    asked = (tmp_path, capsys, LLAMA_3_1_8B, "--config", str(path))
    code, told = checked(*asked, "--gpu", "h100-80gb")
    assert (code, told["quantization"], told["prefill"]["quantization"]) == (0, "int4", "auto")
    assert told["weight_bytes"] < 0.4 * told["prefill"]["weight_bytes"]
    code, told = checked(*asked, "--gpu", "l4", "--quantization", "int8")
    assert (code, told["quantization"], "prefill" in told) == (0, "int8", False)
    path.write_text("model: {dtype: float32}\ndecode: {quantization: int4}\n")
    code, told = checked(*asked, "--gpu", "l4")
    assert (code, told["way"], told["prefill"]["way"]) == (2, "refused", "refused")
    assert told["reason"].startswith("prefill workers: weights take 29.")
    assert main(["check", str(tmp_path), "--config", str(path), "--gpu", "h100-80gb"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("on a prefill worker in float32: weights 29.")
    assert "    prefill: {num_gpus: 1, tensor_parallel: 1, quantization: auto}" in lines


def test_what_is_refused_is_told_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = checked(tmp_path, capsys, {"architectures": ["MambaForCausalLM"]})
    assert (code, told["way"]) == (2, "refused")
    assert "MambaForCausalLM" in told["reason"]
    assert main(["check", str(tmp_path)]) == 2
    assert capsys.readouterr().out.startswith(f"{tmp_path} can't be served: ")


def test_people_are_told_how_to_serve_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    assert main(["check", str(tmp_path), "--gpu", "h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Llama, 8,030.3 M parameters, in bfloat16"
    assert "128.0 KiB a token" in lines[1]
    assert "contexts of up to 131,072 tokens" in lines[2]
    assert f"    model: {{path: {tmp_path}, quantization: auto}}" in lines


def test_kv_in_fp8_takes_half_the_bytes_and_is_told_how_to_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--gpu", "h100-80gb", "--dtype", "bfloat16"
    _, plain = checked(tmp_path, capsys, LLAMA_3_1_8B, *asked)
    _, told = checked(tmp_path, capsys, LLAMA_3_1_8B, *asked, "--kv-cache-dtype", "fp8")
    assert (plain["kv_dtype"], told["kv_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert told["kv_bytes_per_token"] == plain["kv_bytes_per_token"] / 2 == 65536
    assert told["max_requests"] // plain["max_requests"] == 2
    main(["check", str(tmp_path), *asked, "--kv-cache-dtype", "fp8_e4m3"])
    lines = capsys.readouterr().out.splitlines()
    assert "KV 64.0 KiB a token in FP8" in lines[1]
    assert f"    model: {{path: {tmp_path}, quantization: auto, kv_cache_dtype: fp8}}" in lines
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B | {"num_hidden_layers": 2}))
    main(["check", str(tmp_path), "--kv-cache-dtype", "fp8"])
    assert capsys.readouterr().out.splitlines()[-1].endswith(" --kv-cache-dtype fp8")


MIXTRAL_8X7B = LLAMA_3_1_8B | {"architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "num_local_experts": 8}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    **{"num_hidden_layers": 24, "num_local_experts": 32, "vocab_size": 201088, "hidden_size": 2880},
    **{"intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8},
    "quantization_config": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize(
    ("fields", "parameters", "active"),
    [(MIXTRAL_8X7B, 46_702_792_704, 12_879_925_248), (GPT_OSS_20B, 20_914_757_184, 4_187_440_704)],
)
def test_of_experts_the_parameters_that_a_token_takes_are_told(
    fields: dict[str, Any], parameters: int, active: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, told = checked(tmp_path, capsys, fields, "--gpu", "h200", "--dtype", "bfloat16")
    assert (told["way"], told["parameters"], told["active_parameters"]) == ("native", parameters, active)
    main(["check", str(tmp_path), "--gpu", "h200", "--dtype", "bfloat16"])
    assert f"of which a token takes {active / 1e6:,.1f} M" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**9},
        {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 10**9},
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 10**9},
        {
            "head_dim": 64,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "n_routed_experts": 10**9,
        },
        {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "first_k_dense_replace": 10**9},
        {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_nextn_predict_layers": 10**9},
        {"architectures": ["PhiForCausalLM"], "model_type": "phi", "num_hidden_layers": 10**9},
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 10**9},
        {"max_position_embeddings": 10**400},
        {"rms_norm_eps": 10**400},
        {"hidden_size": "x" * 100_000},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_numbers_that_no_model_has_are_refused_at_once_by_name(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = checked(tmp_path, capsys, LLAMA_3_1_8B | {"head_dim": 128} | fields)
    assert (code, told["way"]) == (2, "refused")
    assert f"config.json: {list(fields)[-1]}: " in told["reason"]
    assert len(told["reason"]) < 1000


def test_what_is_nested_too_deep_or_would_be_waited_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert main(["check", str(tmp_path)]) == 2
    assert "config.json can't be read as JSON: maximum recursion depth" in capsys.readouterr().out
    deep = tmp_path / "deep.yaml"
    deep.write_text("model: " + "{a: " * 3000 + "}" * 3000)
    assert main(["config", "check", str(deep)]) == 2
    assert "deep.yaml: is nested too deep" in capsys.readouterr().err
    (tmp_path / "config.json").unlink()
    for name in ("config.json", "some.gguf"):
        os.mkfifo(tmp_path / name)
    assert main(["check", str(tmp_path)]) == 2
    assert "config.json is no regular file" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "some.gguf")]) == 2
    assert "no GGUF file" in capsys.readouterr().out


@pytest.mark.parametrize("stages", ["-1", "0", "many"])
def test_stages_are_at_least_one(stages: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "bundled", "--pipeline-parallel", stages])
    assert "argument --pipeline-parallel: " in capsys.readouterr().err


def test_the_command_that_serves_has_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "serving.yaml"
    config.write_text("decode: {max_batch: 4}\n")
    asked = ("--tensor-parallel", "2", "--pipeline-parallel", "2", "--dtype", "float32", "--config", str(config))
    assert main(["check", "bundled", *asked]) == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command == [
        *("twostroke", "serve", "--model", "bundled", "--config", str(config), "--dtype", "float32"),
        *("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eos_token_id", -1),
        ("eos_token_id", [[1]]),
        ("eos_token_id", True),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [1]),
        ("model_type", ["llama"]),
        ("text_config", [1]),
        ("torch_dtype", {"a": 1}),
        ("dtype", 16),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(
    field: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = checked(tmp_path, capsys, LLAMA_3_1_8B | {"model_type": "llama", field: value})
    assert (code, told["way"]) == (2, "refused")
    assert f"config.json: {field}" in told["reason"]


def test_the_tokens_that_end_an_answer_are_those_of_the_generation_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The router reads no more of config.json's where that file has its own."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    code, told = checked(tmp_path, capsys, LLAMA_3_1_8B | {"eos_token_id": -1}, "--gpu", "h100-80gb")
    assert (code, told["reason"]) == (0, None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": -1}')
    code, told = checked(tmp_path, capsys, LLAMA_3_1_8B | {"eos_token_id": 2})
    assert code == 2
    assert "generation_config.json: eos_token_id must be token ids" in told["reason"]


def test_weights_that_would_be_waited_for_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    code, told = checked(tmp_path, capsys, LLAMA_3_1_8B)
    assert code == 2
    assert "model.safetensors is no regular file" in told["reason"]
