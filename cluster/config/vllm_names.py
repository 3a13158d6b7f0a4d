"""vLLM's names for settings: which of ours mean the same, and what there is instead of the rest.

Flags are made of this, hints where somebody types or writes vLLM's name for a setting, and a test holds
docs/from-vllm.md to it.
"""

from collections.abc import Mapping

SAME: Mapping[str, tuple[str, ...]] = {
    "model": ("model.path",),
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
    "scheduling_policy": ("prefill.queue", "decode.queue"),
    "api_server_count": ("router.replicas",),
    "allowed_origins": ("router.cors_origins",),
    "otlp_traces_endpoint": ("router.tracing.endpoint",),
    "uvicorn_log_level": ("logging.level",),
    "api_key": ("auth.keys",),
}
"""By vLLM's name, as its Python and YAML have it: settings that do the same, though some take other values."""

INSTEAD: Mapping[str, str] = {
    "config_format": "the folder tells: leave it out",
    "cpu_offload_gb": "weights stay where the model computes: take quantization, or more tensor_parallel",
    "data_parallel_size": "prefill.replicas and decode.replicas say how many workers there are (--prefill, --decode)",
    "disable_log_requests": "logging.level: warning leaves out the line of each request",
    "disable_log_stats": "metrics cost next to nothing: leave it out",
    "distributed_executor_backend": "it is always Ray: leave it out",
    "download_dir": "set the environment variable HF_HOME",
    "enable_auto_tool_choice": "calls are read out of answers wherever the model writes any: leave it out",
    "enable_chunked_prefill": "prompts are always read in chunks: leave it out",
    "enable_log_requests": "every request has a line in the log: leave it out",
    "enable_lora": "adapters are not served: merge them into the weights",
    "enable_prefix_caching": "prefixes are always cached: leave it out",
    "enforce_eager": "there is nothing to choose: leave it out",
    "guided_decoding_backend": "there is one: leave it out",
    "hf_overrides": "change config.json in a copy of the folder",
    "hf_token": "set the environment variable HF_TOKEN",
    "kv_transfer_config": "prefill and decode workers find each other; the section kv_transfer says how KV travels",
    "limit_mm_per_prompt": "prompts are text alone: leave it out",
    "load_format": "the files tell, safetensors or GGUF: leave it out",
    "lora_modules": "adapters are not served: merge them into the weights",
    "rope_scaling": "change config.json in a copy of the folder",
    "seed": "requests have a seed of their own; a server has none",
    "speculative_config": "no tokens are guessed ahead: leave it out",
    "ssl_certfile": "TLS ends at the load balancer, such as deploy/nginx.conf",
    "ssl_keyfile": "TLS ends at the load balancer, such as deploy/nginx.conf",
    "task": "a generating model also gives embeddings (/v1/embeddings): leave it out",
    "tokenizer": "the model's folder has it",
    "trust_remote_code": "code of checkpoints is never run: leave it out",
}
"""What to do about those that have no setting here."""


def what_is_ours(name: str) -> str | None:
    """A hint for one of vLLM's names, as flag (`--max-model-len`) or key; None for any other word."""
    name = name.lstrip("-").replace("-", "_")
    if name in SAME:
        return f"vLLM's {name} is {' and '.join(SAME[name])} here"
    return f"vLLM's {name}: {INSTEAD[name]}" if name in INSTEAD else None
