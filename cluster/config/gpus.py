"""Division of the GPUs among the workers, where the settings do not say. It works on settings as YAML gives them, so
that the result travels to wherever the application is built."""

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import Role

PREFILL_SHARE = 3 / 8
"""Share of prefill workers where no numbers are given, because answers take longer than prompts."""


class Shared(NamedTuple):
    """Settings in which every role knows its GPUs."""

    settings: dict[str, Any]
    line: str | None  # for people; None: there was nothing to decide
    is_idle: bool = False  # whether GPUs stay idle


def share_gpus(settings: Mapping[str, Any], gpus: int) -> Shared:
    """The settings for one machine with so many GPUs. Raises ConfigError where they are too few for what is asked."""
    config = read_config(settings)
    sections = {role: config.roles[role] for role in get_args(Role) if role == "decode" or config.has_prefill}
    if config.model.device == "cpu" or gpus == 0:
        line = f"{_gpus(gpus)} idle: model.device is cpu" if gpus else None
        return Shared(_told(settings, dict.fromkeys(sections, 0)), line, gpus > 0)
    autos = [role for role, section in sections.items() if section.num_gpus == "auto"]
    if not autos:
        used = _used(config)
        idle = max(0, gpus - round(used + 0.499))
        line = f"{_gpus(idle)} idle: the workers are told to take {used:g} of {gpus}" if idle else None
        return Shared(dict(settings), line, idle > 0)
    if len(autos) < len(sections):  # one role says: the other does likewise
        (given,) = (section.gpus for section in sections.values() if section.num_gpus != "auto")
        return share_gpus(_told(settings, dict.fromkeys(autos, given and 1)), gpus)
    least = max(section.num_ranks for section in sections.values())
    if least > gpus:
        raise ConfigError(f"decode.tensor_parallel: {least} ranks need as many GPUs, and there are {gpus}: lower it")
    if not config.autoscaling.enabled and not any("replicas" in (settings.get(role) or {}) for role in get_args(Role)):
        return _as_many_as_fit(settings, config, gpus)
    if config.autoscaling.enabled:
        budget = config.autoscaling.budget or gpus
        shared = _told(settings, dict.fromkeys(sections, 1))
        shared["autoscaling"] = {**shared["autoscaling"], "budget": min(budget, gpus)}
        return Shared(
            shared, f"GPUs: up to {min(budget, gpus):g} of {gpus}, one for each rank, as the autoscaler decides"
        )
    ranks = config.num_ranks
    workers_on_one = -(-ranks // gpus)
    if workers_on_one == 1:
        idle = gpus - ranks
        line = f"GPUs: {ranks} of {gpus} used, one for each rank"
        more = f"; {_gpus(idle)} idle: more prefill.replicas or decode.replicas would use them" if idle else ""
        return Shared(_told(settings, dict.fromkeys(sections, 1)), line + more, idle > 0)
    if least > 1:
        raise ConfigError(f"decode.replicas: all workers have {ranks} ranks together, for {gpus} GPUs: lower it")
    share = round(1 / workers_on_one - 0.00005, 4)  # Ray counts in these
    line = f"GPUs: {ranks} workers on {gpus}, each with {share:g} of one"
    return Shared(_told(settings, dict.fromkeys(sections, share)), line)


def _as_many_as_fit(settings: Mapping[str, Any], config: ClusterConfig, gpus: int) -> Shared:
    """Both roles where there is room for a worker of each, else decode workers that compute prompts, too."""
    of_prefill, of_decode = config.prefill.num_ranks, config.decode.num_ranks
    if of_prefill + of_decode > gpus:
        shared = _told(settings, {"prefill": 0, "decode": 1}, {"prefill": 0, "decode": gpus // of_decode})
        line = "GPUs: too few for a worker of each role, so decode workers compute prompts, too (aggregated)"
        prefill = 0
    else:
        prefill = max(1, min(int(gpus * PREFILL_SHARE / of_prefill), (gpus - of_decode) // of_prefill))
        decode = (gpus - prefill * of_prefill) // of_decode
        shared = _told(settings, {"prefill": 1, "decode": 1}, {"prefill": prefill, "decode": decode})
        line = f"GPUs: {prefill} prefill and {decode} decode workers share {gpus}"
    idle = gpus - prefill * of_prefill - shared["decode"]["replicas"] * of_decode
    more = f"; {_gpus(idle)} idle: workers' ranks do not divide them" if idle else ""
    return Shared(shared, f"{line}{more}. --prefill, --decode and --gpus choose otherwise", idle > 0)


def one_for_each_rank(settings: Mapping[str, Any], *, has_gpus: bool) -> Shared:
    """The settings for a Ray cluster, which knows how many workers it is to have, and may bring GPUs later."""
    config = read_config(settings)
    if not has_gpus:
        return Shared(dict(settings), None)
    if config.model.device == "cpu":
        return Shared(dict(settings), "The cluster's GPUs stay idle: model.device is cpu", True)
    given = [section.gpus for section in config.roles.values() if section.num_gpus != "auto"]
    autos = [role for role, section in config.roles.items() if section.num_gpus == "auto"]
    shared = _told(settings, dict.fromkeys(autos, 0 if 0 in given else 1))
    is_idle = 0 in given
    return Shared(shared, "The cluster's GPUs stay idle: num_gpus is 0" if is_idle else None, is_idle)


def _told(
    settings: Mapping[str, Any], gpus: Mapping[Any, float], replicas: Mapping[str, int] | None = None
) -> dict[str, Any]:
    merged = dict(settings)
    for role, number in gpus.items():
        merged[role] = {**(merged.get(role) or {}), "num_gpus": number}
    for role, count in (replicas or {}).items():
        merged[role] = {**merged[role], "replicas": count}
    return merged


def _used(config: ClusterConfig) -> float:
    return sum(config.counts[role].most * each for role, each in config.gpus_each.items())


def _gpus(count: int) -> str:
    return "1 GPU stays" if count == 1 else f"{count} GPUs stay"
