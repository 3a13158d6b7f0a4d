"""vLLM's names: which of ours mean the same, and what there is instead of the rest.

Flags are made of this, hints where somebody types or writes vLLM's name for a setting, and a test holds
docs/from-vllm.md to it.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

SAME: Mapping[str, tuple[str, ...]] = {
    "model": ("model.path",),
    "revision": ("model.revision",),
    "served_model_name": ("model.name",),
    "device": ("model.device",),
    "dtype": ("model.dtype",),
    "quantization": ("model.quantization",),
    "kv_cache_dtype": ("model.kv_cache_dtype",),
    "block_size": ("model.block_size",),
    "max_model_len": ("model.max_context",),
    "chat_template": ("model.chat_template",),
    "generation_config": ("model.generation_config",),
    "tool_call_parser": ("model.response_template",),
    "reasoning_parser": ("model.response_template",),
    "tensor_parallel_size": ("prefill.tensor_parallel", "decode.tensor_parallel"),
    "pipeline_parallel_size": ("prefill.pipeline_parallel", "decode.pipeline_parallel"),
    "enable_expert_parallel": ("prefill.expert_parallel", "decode.expert_parallel"),
    "max_num_seqs": ("prefill.max_batch", "decode.max_batch"),
    "max_num_batched_tokens": ("prefill.max_step_tokens", "decode.max_step_tokens"),
    "gpu_memory_utilization": ("prefill.gpu_memory_utilization", "decode.gpu_memory_utilization"),
    "kv_cache_memory_bytes": ("prefill.kv_cache_gib", "decode.kv_cache_gib"),
    "num_gpu_blocks_override": ("prefill.num_blocks", "decode.num_blocks"),
    "swap_space": ("decode.swap_gib",),
    "kv_offloading_size": ("kv_cache.tiers.host_bytes",),
    "speculative_config": ("prefill.speculation.method", "decode.speculation.method"),
    "scheduling_policy": ("prefill.queue", "decode.queue"),
    "api_server_count": ("router.replicas",),
    "allowed_origins": ("router.cors_origins",),
    "otlp_traces_endpoint": ("router.tracing.endpoint",),
    "uvicorn_log_level": ("logging.level",),
    "api_key": ("auth.keys",),
}
"""Settings by vLLM's name for the same, as its Python and YAML have it. Some take other values."""

INSTEAD: Mapping[str, str] = {
    "async_scheduling": "steps are always scheduled ahead (decode.run_ahead): leave it out",
    "attention_backend": "kernels are chosen by the device and the model: leave it out",
    "calculate_kv_scales": "scales are the checkpoint's, else 1: leave it out",
    "chat_template_content_format": "the template tells: leave it out",
    "code_revision": "code of checkpoints is never run: leave it out",
    "compilation_config": "there is nothing to compile ahead: leave it out",
    "config_format": "the folder tells: leave it out",
    "convert": "a generating model also gives embeddings (/v1/embeddings): leave it out",
    "cpu_offload_gb": "weights stay where the model computes: take quantization, or more tensor_parallel",
    "cuda_graph_sizes": "there is nothing to compile ahead: leave it out",
    "data_parallel_size": "prefill.replicas and decode.replicas say how many workers there are (--prefill, --decode)",
    "decode_context_parallel_size": "decode.context_parallel: true divides latents among all ranks of tensor_parallel",
    "disable_custom_all_reduce": "ranks take the quickest way that they have: leave it out",
    "disable_frontend_multiprocessing": "routers are processes of their own, as many as router.replicas: leave it out",
    "disable_log_requests": "logging.level: warning leaves out the line of each request",
    "disable_log_stats": "metrics cost next to nothing: leave it out",
    "disable_uvicorn_access_log": "logging.level: warning leaves out the line of each request",
    "distributed_executor_backend": "it is always Ray: leave it out",
    "download_dir": "set the environment variable HF_HOME",
    "enable_auto_tool_choice": "calls are read out of answers wherever the model writes any: leave it out",
    "enable_chunked_prefill": "prompts are always read in chunks: leave it out",
    "enable_eplb": "prefill.redundant_experts and decode.redundant_experts say how many experts have copies",
    "enable_force_include_usage": "requests ask for it: stream_options: {include_usage: true}",
    "enable_log_requests": "every request has a line in the log: leave it out",
    "enable_lora": "adapters are not served: merge them into the weights",
    "enable_prefix_caching": "prefixes are always cached: leave it out",
    "enable_prompt_tokens_details": "usage always tells of cached tokens: leave it out",
    "enable_request_id_headers": "every answer has X-Request-Id: leave it out",
    "enable_sleep_mode": "weights stay in memory: leave it out",
    "enforce_eager": "there is nothing to choose: leave it out",
    "guided_decoding_backend": "there is one: leave it out",
    "headless": "`ray start` makes a machine a node of the cluster: docs/hosts.md",
    "hf_config_path": "the model's folder has it",
    "hf_overrides": "change config.json in a copy of the folder",
    "hf_token": "set the environment variable HF_TOKEN",
    "host": "a flag of `twostroke serve`, and no setting",
    "kv_connector": "prefill and decode workers find each other; kv_transfer.transport says how KV travels, and "
    "kv_cache.tiers where it is kept",
    "kv_events_config": "routers hear of all workers' caches: leave it out",
    "kv_offloading_backend": "there is one, kv_cache.tiers: leave it out",
    "kv_transfer_config": "prefill and decode workers find each other; the section kv_transfer says how KV travels, "
    "and kv_cache.tiers where it is kept",
    "limit_mm_per_prompt": "prompts are text alone: leave it out",
    "load_format": "the files tell, safetensors or GGUF: leave it out",
    "lora_modules": "adapters are not served: merge them into the weights",
    "master_addr": "`ray start` makes a machine a node of the cluster: docs/hosts.md",
    "max_log_len": "no prompt reaches a log: leave it out",
    "max_logprobs": "requests may ask for 20: leave it out",
    "max_lora_rank": "adapters are not served: merge them into the weights",
    "max_seq_len_to_capture": "there is nothing to compile ahead: leave it out",
    "middleware": "there is none: put a proxy in front",
    "mm_processor_kwargs": "prompts are text alone: leave it out",
    "nnodes": "`ray start` makes a machine a node of the cluster: docs/hosts.md",
    "node_rank": "`ray start` makes a machine a node of the cluster: docs/hosts.md",
    "num_speculative_tokens": "it is part of --speculative-config, decode.speculation.num_speculative_tokens",
    "optimization_level": "there is nothing to compile ahead: leave it out",
    "override_generation_config": "change generation_config.json in a copy of the folder",
    "port": "a flag of `twostroke serve`, and no setting",
    "prefix_caching_hash_algo": "there is one: leave it out",
    "reasoning_parser_plugin": "model.response_template describes a format of your own: docs/tools.md",
    "return_tokens_as_token_ids": "requests ask for return_token_ids: leave it out",
    "root_path": "the load balancer takes it away: deploy/nginx.conf",
    "rope_scaling": "change config.json in a copy of the folder",
    "runner": "a generating model also gives embeddings (/v1/embeddings): leave it out",
    "seed": "requests have a seed of their own; a server has none",
    "speculative_model": "drafts come from the text or an MTP head: decode.speculation.method is suffix, ngram or mtp",
    "ssl_certfile": "TLS ends at the load balancer, such as deploy/nginx.conf",
    "ssl_keyfile": "TLS ends at the load balancer, such as deploy/nginx.conf",
    "stream_interval": "each step's tokens leave at once: leave it out",
    "structured_outputs_config": "schemas and grammars are always there: leave it out",
    "task": "a generating model also gives embeddings (/v1/embeddings): leave it out",
    "tokenizer": "the model's folder has it",
    "tokenizer_mode": "there is one: leave it out",
    "tokenizer_revision": "the tokenizer is the model's: --revision is of both",
    "tool_parser_plugin": "model.response_template describes a format of your own: docs/tools.md",
    "trust_remote_code": "code of checkpoints is never run: leave it out",
}
"""Advice for vLLM's settings that have no counterpart."""


VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {
        **dict.fromkeys(("half", "float16"), "no kernel computes in fp16: leave it out"),
        "float": "vLLM's float is float32 here",
    },
    "quantization": {
        **dict.fromkeys(
            ("awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "compressed-tensors", "gguf", "mxfp4", "modelopt"),
            "a checkpoint that is quantised so tells of it: leave it out",
        ),
        "bitsandbytes": "int8 and int4 quantise weights as they are loaded",
    },
    "kv_cache_dtype": {
        "fp8_e5m2": "fp8 is e4m3 here",
        **dict.fromkeys(("bfloat16", "float16"), "auto is model.dtype"),
    },
    "generation_config": {"vllm": "vLLM's vllm is none here"},
}
"""Values that vLLM takes where the setting of the same meaning does not, by the setting's own name."""

_BUILT_IN = (
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "P2pNcclConnector", "PyNcclConnector"),
    *("MooncakeConnector", "MooncakeLayerwiseConnector", "MoRIIOConnector"),
)
"""Connectors between prefill and decode workers, whose work no flag has to ask for here."""


_PLACES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("OffloadingConnector", "SharedStorageConnector", "ExampleConnector"), ("shared_storage_path",)),
    **dict.fromkeys(("LMCacheConnectorV1", "LMCacheMPConnector"), ("lmcache.local_disk", "lmcache.remote_url")),
}
"""Keys of connectors that say where KV is kept, and that tiers are made of."""


def tiers_of_connector(text: str) -> dict[str, Any]:
    """Return settings of `kv_cache.tiers`, by their paths there, that mean what vLLM's `--kv-transfer-config` asks for.

    Raises ValueError with a sentence that says what to do instead where nothing here means the same.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text}: no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{text}: expected an object with kv_connector")
    return dict(_tiers_of(config))


def _tiers_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    name, extra = config.get("kv_connector"), config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"kv_connector_extra_config: {extra!r} is no object")
    match name:
        case "MultiConnector":
            for one in extra.get("connectors") or ():
                if not isinstance(one, dict):
                    raise ValueError(f"MultiConnector: {one!r} is no object with kv_connector")
                if one.get("kv_connector") not in _BUILT_IN:  # which stand beside tiers in such a list
                    yield from _tiers_of(one)
        case "OffloadingConnector" | "SimpleCPUOffloadConnector":
            size, path = extra.get("cpu_bytes_to_use"), extra.get("shared_storage_path")
            if size is None and path is None:
                raise ValueError(
                    f"{name}: give kv_connector_extra_config.cpu_bytes_to_use, which is kv_cache.tiers.host_bytes here"
                )
            if size is not None:
                yield "host_bytes", size
            if path is not None:  # of llm-d's SharedStorageOffloadingSpec
                yield "shared.path", path
            for tier in extra.get("secondary_tiers") or ():
                if not isinstance(tier, dict) or "root_dir" not in tier:
                    raise ValueError(f"{name}: {tier!r} is no directory: kv_cache.tiers has disk and shared")
                yield "disk.path", tier["root_dir"]
                if "max_bytes" in tier:
                    yield "disk.bytes", tier["max_bytes"]
        case "LMCacheConnectorV1" | "LMCacheMPConnector":
            yield from _tiers_of_lmcache(name, extra)
        case "SharedStorageConnector" | "ExampleConnector":
            path = extra.get("shared_storage_path")
            if path is None:
                raise ValueError(
                    f"{name}: give kv_connector_extra_config.shared_storage_path, which is kv_cache.tiers.shared.path "
                    "here"
                )
            yield "shared.path", path
        case str() if name in _BUILT_IN:
            raise ValueError(f"{name}: KV transfer is built in, and kv_transfer.transport says how: leave it out")
        case str():
            raise ValueError(
                f"{name}: there is no such store here: kv_cache.tiers keeps KV in host memory, on a disk, and in a "
                "shared directory or an s3:// bucket"
            )
        case _:
            raise ValueError(
                "kv_connector: is required; between prefill and decode workers KV transfer is built in: leave it out"
            )
    for key in extra:
        if key.endswith(("path", "_dir", "_url", "_disk")) and key not in _PLACES.get(name, ()):
            raise ValueError(
                f"{name}: kv_connector_extra_config.{key}: no tier is made of it: give kv_cache.tiers.disk.path or "
                "shared.path, or leave it out"
            )


def _tiers_of_lmcache(name: str, extra: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """LMCache's sizes are numbers of GiB."""
    found = {key.removeprefix("lmcache."): value for key, value in extra.items() if key.startswith("lmcache.")}
    if not found.keys() & {"max_local_cpu_size", "local_disk", "remote_url"}:
        raise ValueError(
            f"{name}: its settings lie in LMCACHE_CONFIG_FILE; its local_cpu, local_disk and remote_url are "
            "kv_cache.tiers.host_bytes, .disk and .shared here"
        )
    if found.get("local_cpu", True) and "max_local_cpu_size" in found:
        yield "host_bytes", f"{found['max_local_cpu_size']}GiB"
    if found.get("local_disk"):
        yield "disk.path", str(found["local_disk"]).removeprefix("file://")
        yield "disk.bytes", f"{found.get('max_local_disk_size', 0)}GiB"
    if (url := found.get("remote_url")) is not None:
        scheme, _, rest = str(url).partition("://")
        if scheme not in ("fs", "file", "s3"):
            raise ValueError(
                f"lmcache.remote_url: there is no tier of {scheme}: kv_cache.tiers.shared is a directory or an s3:// "
                "bucket"
            )
        # fs://HOST:PORT/path, in which host and port mean nothing
        yield ("shared.url", url) if scheme == "s3" else ("shared.path", f"/{rest.partition('/')[2]}")


COMMANDS: Mapping[str, str] = {
    "bench latency": "`twostroke bench engine`",
    "bench serve": "`twostroke loadtest run`",
    "bench sweep": "`twostroke loadtest sweep`",
    "bench throughput": "`twostroke bench engine`",
    "chat": "the page of a running server, at its address",
    "collect-env": "`twostroke doctor`, of a running server; `twostroke check MODEL` before there is one",
    "complete": "`curl http://HOST:PORT/v1/completions`",
    "run-batch": "requests to a running server, as many at once as you like",
}
"""Our commands for vLLM's."""

OF_BENCH_SERVE: Mapping[str, str] = {
    "backend": "any OpenAI server is asked alike: leave it out",
    "base_url": "--url",
    "burstiness": "--arrivals gamma --cv, which is 1 / sqrt(burstiness)",
    "dataset_name": "--workload",
    "dataset_path": "--workload FILE",
    "endpoint": "--url without a path",
    "goodput": "--slo ttft=S,tpot=S",
    "host": "--url http://HOST:PORT",
    "ignore_eos": "it is so unless --stop-at-eos",
    "max_concurrency": "--arrivals closed --users",
    "metric_percentiles": "the report has them",
    "num_prompts": "--rate times --seconds",
    "percentile_metrics": "the report has them",
    "port": "--url http://HOST:PORT",
    "ramp_up_strategy": "--arrivals ramp --rate FROM --to-rate TO",
    "random_input_len": "--workload fixed --input-tokens",
    "random_output_len": "--workload fixed --output-tokens",
    "random_prefix_len": "--workload shared-prompt --shared-tokens",
    "request_rate": "--rate",
    "result_dir": "--output DIR",
    "save_result": "a folder is always left: --output DIR",
    "tokenizer": "the server counts tokens: leave it out",
}
"""Flags of `vllm bench serve`, and what `twostroke loadtest run` has for them."""

_SHORT = {
    "dp": "data_parallel_size",
    "dcp": "decode_context_parallel_size",
    **dict.fromkeys(("O", "O0", "O1", "O2", "O3"), "compilation_config"),
}


def what_is_ours(name: str, *, of: str | None = None) -> str | None:
    """A hint for one of vLLM's names, as flag (`--max-model-len`) or key; None for any other word. `of`: what the hint
    begins with, in place of vLLM's name."""
    name = name.lstrip("-").replace("-", "_")
    name = _SHORT.get(name, name).removeprefix("no_")
    of = of or f"vLLM's {name}"
    if name in SAME:
        return f"{of} is {' and '.join(SAME[name])} here"
    return f"{of}: {INSTEAD[name]}" if name in INSTEAD else None
