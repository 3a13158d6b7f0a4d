"""Profiles of workers by name, or from the files that `bench machine` and `simulate --against` write."""

from pathlib import Path

import msgspec
from msgspec.structs import replace

from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import StepCosts
from twostroke.worker.profile import WorkerProfile

SMALL = WorkerProfile(
    name="160m-cpu",
    # 4,900 prompt tokens a second at 1k tokens, of which attention takes a tenth; steps of 3.2, 4.5 and 13 ms for 1, 8
    # and 32 requests with 256 tokens of context each.
    costs=StepCosts(base_s=2.9e-3, token_s=1.83e-4, pair_s=4.0e-8, row_s=2.0e-4, context_s=4.5e-7),
    kv_bytes=12 * 2 * 4 * 64 * 2,
    kv_tokens=200_000,
    link_bytes_per_s=1e9,
    step_tokens=2048,
    max_batch=256,
    source="docs/results/index.md: `twostroke bench engine` with the 160m model, 2 threads; a link of 1 GB/s",
    num_layers=12,
)
"""A prompt of 1,000 takes 0.2 s, one of 7,400 takes 2.5 s."""

ONE_B = WorkerProfile(
    name="1.2b-cpu",
    # 476 prompt tokens a second at 1k tokens; 32.5, 210 and 334 tokens a second at batches of 1, 8 and 32.
    costs=StepCosts(base_s=2.7e-2, token_s=1.92e-3, pair_s=3.6e-7, row_s=1.9e-3, context_s=8e-7),
    kv_bytes=32_768,
    kv_tokens=200_000,
    link_bytes_per_s=1e9,
    step_tokens=2048,
    max_batch=256,
    source="docs/results/index.md: `twostroke bench engine` with the 1.2b model, 2 threads",
    num_layers=16,
)
"""Slow enough that a day of 100,000 requests needs some eight prefill workers."""

H100 = WorkerProfile(
    name="8b-h100-floor",
    # Floors of Llama-3.1-8B in bf16 at 0.7 of 798 TFLOP/s and 0.8 of 3.0 TB/s: 2 x 8.03e9 operations a token,
    # 4 x 32 x 4096 a pair, 15.0 GB of weights a step and 131,072 bytes a token of context; 1 ms a step for the host.
    costs=StepCosts(base_s=7.3e-3, token_s=2.9e-5, pair_s=9.4e-10, row_s=2.9e-5, context_s=5.5e-8),
    kv_bytes=131_072,
    kv_tokens=400_000,
    link_bytes_per_s=25e9,
    step_tokens=8192,
    max_batch=256,
    source="floors of the cost model; no GPU has confirmed them",
)

PROFILES = {one.name: one for one in (SMALL, ONE_B, H100)}


def named_profile(name: str) -> WorkerProfile:
    """Return a known profile, or a file's. Raises ConfigError."""
    return PROFILES[name] if name in PROFILES else read_profile(Path(name))


def read_profile(path: Path) -> WorkerProfile:
    """Return the profile in a file. Raises ConfigError."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=WorkerProfile)
    except OSError as error:
        known = ", ".join(PROFILES)
        raise ConfigError(
            f"--costs {path}: {error.strerror}; name a file of `bench machine`, or one of {known}"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--costs {path}: {error}") from error
    for field, costs in (("costs", profile.costs), ("beside", profile.beside)):
        if costs is not None and min(msgspec.structs.astuple(costs)) < 0:
            anew = "measure anew by `twostroke bench machine --costs`"
            raise ConfigError(f"--costs {path}: {field}: seconds below 0: {anew}")
    return profile


def write_profile(profile: WorkerProfile, path: Path) -> None:
    """Write a file that `--costs` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")


def among_busy(profile: WorkerProfile, name: str | None = None, *, gpus: int = 1, usd: float = 1.0) -> WorkerProfile:
    """Return a measured worker as plans take it: the other workers of its machine are as busy as it is."""
    name, costs = name or profile.name, profile.beside or profile.costs
    return replace(profile, name=name, hardware=name, costs=costs, beside=None, gpus=gpus, usd_per_hour=usd)
