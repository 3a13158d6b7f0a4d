"""Names that other servers, vLLM and SGLang, have for our settings, and what there is here instead of the rest.

`other_servers.json` has the tables. Flags are made of it, and hints where somebody writes another server's name for a
setting. Some settings of the same meaning take other values.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

_TABLES: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_VLLM, _SGLANG = _TABLES["vllm"], _TABLES["sglang"]

SAME: Mapping[str, tuple[str, ...]] = {name: tuple(settings) for name, settings in _VLLM["same"].items()}
"""Settings by vLLM's name for the same."""
INSTEAD: Mapping[str, str] = _VLLM["instead"]
"""Advice for vLLM's settings that have no counterpart."""
VALUES: Mapping[str, Mapping[str, str]] = _VLLM["values"]
"""Advice for values that vLLM takes and we don't, by the setting's own name."""
COMMANDS: Mapping[str, str] = _VLLM["commands"]
"""Our commands for vLLM's."""
BENCH_SERVE: Mapping[str, str] = _VLLM["bench_serve"]
"""What `twostroke loadtest run` has for flags of `vllm bench serve`."""
SGLANG_AS_VLLM: Mapping[str, str] = _SGLANG["as_vllm"]
"""vLLM's names by SGLang's. Names that both have are vLLM's alone."""
SGLANG_INSTEAD: Mapping[str, str] = _SGLANG["instead"]
"""Advice for SGLang's settings that vLLM has no name for."""


def setting_hint(name: str) -> str | None:
    """Return a hint for a name of vLLM's or SGLang's, as flag (`--tp-size`) or key; None for any other word."""
    bare = _bare(name)
    if bare in SGLANG_INSTEAD:
        return f"SGLang's {bare}: {SGLANG_INSTEAD[bare]}"
    if bare in SGLANG_AS_VLLM:
        whose, bare = f"SGLang's {bare}", SGLANG_AS_VLLM[bare]
    else:
        bare = _VLLM["short"].get(bare, bare).removeprefix("no_")
        whose = f"vLLM's {bare}"
    if bare in SAME:
        return f"{whose} is {' and '.join(SAME[bare])} here"
    return f"{whose}: {INSTEAD[bare]}" if bare in INSTEAD else None


def flag_hint(flag: str, flags: Collection[str]) -> str | None:
    """Return a hint for a flag that `twostroke serve`, which has `flags`, lacks; None for any other word."""
    bare = _bare(flag)
    ours = f"--{SGLANG_AS_VLLM.get(bare, bare).replace('_', '-')}"
    if bare in SGLANG_AS_VLLM and ours in flags:
        return f"SGLang's {flag} is {ours} here"
    hint = setting_hint(flag)
    is_setting = SGLANG_AS_VLLM.get(bare, bare) in SAME
    return f"{hint}, in the file of --config" if hint is not None and is_setting else hint


def known_flags() -> frozenset[str]:
    """Return all flags that `flag_hint` knows."""
    names = (*SAME, *INSTEAD, *SGLANG_AS_VLLM, *SGLANG_INSTEAD)
    return frozenset(f"--{name.replace('_', '-')}" for name in names)


def _bare(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


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
    return dict(_tier_settings(config))


def _tier_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    name, extra = config.get("kv_connector"), config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"kv_connector_extra_config: {extra!r} is no object")
    match name:
        case "MultiConnector":
            for one in extra.get("connectors") or ():
                if not isinstance(one, dict):
                    raise ValueError(f"MultiConnector: {one!r} is no object with kv_connector")
                if one.get("kv_connector") not in _BUILT_IN:  # which stand beside tiers in such a list
                    yield from _tier_settings(one)
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
