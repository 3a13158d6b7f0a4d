"""SGLang's names: which of vLLM's mean the same, and so which of ours, and what there is instead of the rest.

Names that both have are in `vllm_names` alone. A test holds docs/from-vllm.md to this.
"""

from collections.abc import Collection, Mapping

from twostroke.cluster.config import vllm_names

AS_VLLM: Mapping[str, str] = {
    "model_path": "model",
    "tokenizer_path": "tokenizer",
    "json_model_override_args": "hf_overrides",
    "is_embedding": "task",
    "context_length": "max_model_len",
    "page_size": "block_size",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "ep_size": "enable_expert_parallel",
    "enable_dp_attention": "decode_context_parallel_size",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_prefill_tokens": "max_num_batched_tokens",
    "schedule_policy": "scheduling_policy",
    "random_seed": "seed",
    "log_level": "uvicorn_log_level",
    "log_requests": "enable_log_requests",
    "grammar_backend": "guided_decoding_backend",
    "disable_cuda_graph": "enforce_eager",
    "cuda_graph_max_bs": "compilation_config",
    "enable_torch_compile": "compilation_config",
    "speculative_algorithm": "speculative_config",
    "speculative_draft_model_path": "speculative_model",
    "speculative_num_steps": "num_speculative_tokens",
    "lora_paths": "lora_modules",
    "hicache_size": "kv_offloading_size",
    "dist_init_addr": "headless",
}
"""vLLM's names by SGLang's, as Python and YAML have them."""

INSTEAD: Mapping[str, str] = {
    "disable_radix_cache": "prefixes are always cached: leave it out",
    "disaggregation_bootstrap_port": "workers find each other by Ray: leave it out",
    "disaggregation_ib_device": "kv_transfer.transport: nixl and NCCL find the devices: leave it out",
    "disaggregation_mode": "prefill and decode workers are apart unless --prefill 0, started together: leave it out",
    "disaggregation_transfer_backend": "--transport, which is kv_transfer.transport, says how KV travels",
    "enable_hierarchical_cache": "kv_cache.tiers says where KV is kept (docs/tiers.md): leave it out",
    "enable_lmcache": "kv_cache.tiers says where KV is kept (docs/tiers.md): leave it out",
    "enable_metrics": "metrics are always there, at /metrics: leave it out",
    "enable_mixed_chunk": "decode workers read prompts beside their streams with --prefill 0: leave it out",
    "hicache_io_backend": "there is one: leave it out",
    "hicache_mem_layout": "there is one: leave it out",
    "hicache_ratio": "kv_cache.tiers.host_bytes takes bytes, and no multiple of the cache (--kv-offloading-size)",
    "hicache_storage_backend": "file is kv_cache.tiers.disk, and any store that workers share is kv_cache.tiers.shared",
    "hicache_storage_backend_extra_config": "kv_cache.tiers.disk and kv_cache.tiers.shared have settings of their own",
    "hicache_storage_prefetch_policy": "prompts wait for reads while computing is slower: leave it out",
    "hicache_write_policy": "objects are written on their second use: leave it out",
    "max_total_tokens": "prefill.num_blocks and decode.num_blocks, in blocks of model.block_size tokens",
    "schedule_conservativeness": "slo.classes say what is promised, and requests wait by that: leave it out",
}
"""Hints for names of SGLang's that vLLM has no name for."""


def what_is_ours(name: str) -> str | None:
    """Return a hint for a name of vLLM's or SGLang's, as flag (`--tp-size`) or key; None for any other word."""
    bare = _bare(name)
    if bare in INSTEAD:
        return f"SGLang's {bare}: {INSTEAD[bare]}"
    return vllm_names.what_is_ours(AS_VLLM.get(bare, name), of=f"SGLang's {bare}" if bare in AS_VLLM else None)


def flag_hint(flag: str, flags: Collection[str]) -> str | None:
    """Return a hint for a flag that `twostroke serve`, which has `flags`, lacks; None for any other word."""
    bare = _bare(flag)
    ours = f"--{AS_VLLM.get(bare, bare).replace('_', '-')}"
    if bare in AS_VLLM and ours in flags:
        return f"SGLang's {flag} is {ours} here"
    hint = what_is_ours(flag)
    is_setting = AS_VLLM.get(bare, bare) in vllm_names.SAME
    return f"{hint}, in the file of --config" if hint is not None and is_setting else hint


def known_flags() -> frozenset[str]:
    """Return all flags that `flag_hint` knows."""
    names = (*vllm_names.SAME, *vllm_names.INSTEAD, *AS_VLLM, *INSTEAD)
    return frozenset(f"--{name.replace('_', '-')}" for name in names)


def _bare(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
