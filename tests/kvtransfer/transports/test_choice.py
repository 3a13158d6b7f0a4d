"""The transport that a pair uses, over all combinations of two sides."""

import itertools

import pytest

from twostroke.kvtransfer.transports import choose_transport
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import Encoding
from twostroke.protocol.messages import Reach

HOST = ("shm", "tcp", "torch_distributed")
GPU = ("cuda_ipc", "torch_distributed")
ALL = (*HOST, "cuda_ipc")


def cpu(*transports: str, machine: str = "a") -> Reach:
    return Reach(transports, machine, "cpu")


def gpu(*transports: str, machine: str = "a", device: str = "GPU-1") -> Reach:
    return Reach(transports, machine, device)


@pytest.mark.parametrize(
    ("source", "target", "encoding", "without", "chosen"),
    [
        (cpu(*HOST), cpu(*HOST), "raw", (), "shm"),
        (cpu(*HOST), cpu(*HOST, machine="b"), "raw", (), "tcp"),
        (cpu(*HOST), cpu(*HOST), "int8", (), "tcp"),
        (cpu("tcp", "torch_distributed"), cpu(*HOST), "raw", (), "tcp"),
        (cpu(*HOST), cpu("torch_distributed"), "raw", (), "torch_distributed"),
        (cpu(*HOST), cpu("tcp"), "raw", (), "tcp"),
        (cpu(*HOST), cpu(*HOST), "raw", ("shm",), "tcp"),
        (cpu(*HOST), cpu(*HOST), "raw", ("shm", "tcp"), "torch_distributed"),
        (cpu(*HOST), cpu(*HOST), "raw", HOST, "shm"),
        (cpu("tcp"), cpu(*HOST), "raw", ("tcp",), "tcp"),
        (gpu(*GPU), gpu(*GPU), "raw", (), "cuda_ipc"),
        (gpu(*GPU), gpu(*GPU, device="GPU-2"), "raw", (), "cuda_ipc"),
        (gpu(*GPU), gpu(*GPU, machine="b"), "raw", (), "torch_distributed"),
        (gpu(*GPU), gpu(*GPU), "fp8", (), "torch_distributed"),
        (gpu(*GPU), gpu(*GPU), "raw", ("cuda_ipc",), "torch_distributed"),
        (gpu(*GPU), gpu("torch_distributed"), "raw", (), "torch_distributed"),
        (gpu(*GPU, "tcp"), gpu("tcp"), "raw", (), "tcp"),
        (cpu(*HOST), gpu("tcp", "torch_distributed"), "raw", (), "tcp"),
        (cpu("memory"), cpu("memory", "tcp"), "raw", (), "memory"),
        (cpu("memory", "tcp"), cpu("memory", "tcp"), "raw", (), "tcp"),
    ],
)
def test_a_pair_uses_the_best_that_both_ends_have(
    source: Reach, target: Reach, encoding: Encoding, without: tuple[str, ...], chosen: str
) -> None:
    choice = choose_transport(source, target, encoding, without)
    assert choice.transport == chosen
    assert choice.why.startswith(f"{chosen}: ")


def offers() -> list[tuple[str, ...]]:
    return [names for size in range(len(ALL) + 1) for names in itertools.combinations(ALL, size)]


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cpu", "GPU-1"), ("GPU-1", "GPU-1"), ("GPU-1", "GPU-2")])
def test_no_combination_of_offers_gives_a_transport_that_cannot_work(devices: tuple[str, str]) -> None:
    on_gpus = "cpu" not in devices
    mixed = not on_gpus and devices != ("cpu", "cpu")
    encodings: tuple[Encoding, ...] = ("raw", "int8", "fp8")
    for ours, theirs, machine, encoding, without in itertools.product(offers(), offers(), "ab", encodings, offers()):
        source, target = Reach(ours, "a", devices[0]), Reach(theirs, machine, devices[1])
        near = machine == "a" and encoding == "raw"
        could = set(ours) & set(theirs)
        could -= set() if near and on_gpus else {"cuda_ipc"}
        could -= set() if near and not on_gpus else {"shm"}
        could -= {"torch_distributed"} if mixed else set()
        if not could:
            with pytest.raises(ConfigError, match="no KV transport joins the two workers"):
                choose_transport(source, target, encoding, without)
            continue
        choice = choose_transport(source, target, encoding, without)
        assert choice.transport in ((could - set(without)) or could)
        assert choice.transport not in {text.split(":")[0] for text in choice.missing}
        assert len(set(choice.missing)) == len(choice.missing)


def test_the_reason_and_what_is_missing_are_sentences_for_an_operator() -> None:
    best = choose_transport(cpu(*HOST), cpu(*HOST), "raw")
    assert best.why == "shm: both workers run on the same machine, and their caches are in shared memory"
    assert best.missing == ()
    apart = choose_transport(cpu(*HOST, machine="n1"), cpu(*HOST, machine="n2"), "raw")
    assert apart.why == "tcp: the workers run on different machines, and it is the fastest that joins them"
    assert apart.missing == ()  # nobody can bring them together
    encoded = choose_transport(cpu(*HOST), cpu(*HOST), "int8")
    assert encoded.missing == (
        "shm: it moves KV as it is stored, and this pair's is encoded as int8: set kv_transfer.encoding to raw",
    )
    broken = choose_transport(cpu(*HOST), cpu(*HOST), "raw", ("shm",))
    assert broken.missing == ("shm: a link by it broke or could not be joined",)
    held = choose_transport(cpu(*HOST), cpu("torch_distributed"), "raw")
    assert held.missing == (
        "shm: the target does not offer it (its cache is not in shared memory)",
        "tcp: the target does not offer it (its cache is not in host memory)",
    )
    assert choose_transport(gpu(*GPU), gpu(*GPU), "raw", ("cuda_ipc",)).why.startswith("torch_distributed: NCCL")
    (missing,) = choose_transport(cpu("tcp"), cpu("tcp"), "raw").missing
    assert missing == "shm: neither worker offers it (its cache is not in shared memory)"


def asked(transport: str, device: str = "cpu") -> Reach:
    """A worker whose configuration names its transport."""
    return Reach((transport,), "a", device, is_configured=True)


@pytest.mark.parametrize(
    ("source", "target", "encoding", "why", "missing"),
    [
        (asked("shm"), asked("shm"), "raw", "shm: kv_transfer.transport asks for it", []),
        (
            asked("tcp"),
            asked("tcp"),
            "raw",
            "tcp: kv_transfer.transport asks for it",
            ["shm: kv_transfer.transport leaves it out: set auto"],
        ),
        (
            asked("tcp"),
            asked("tcp"),
            "fp8",
            "tcp: kv_transfer.transport asks for it",
            [
                "shm: kv_transfer.transport leaves it out: set auto; it moves KV as it is stored, and this pair's is "
                "encoded as fp8: set kv_transfer.encoding to raw"
            ],
        ),
        (
            asked("torch_distributed"),
            asked("torch_distributed"),
            "raw",
            "torch_distributed: kv_transfer.transport asks for it",
            [f"{name}: kv_transfer.transport leaves it out: set auto" for name in ("shm", "tcp")],
        ),
        (
            cpu(*HOST),
            asked("tcp"),
            "raw",
            "tcp: the target's kv_transfer.transport asks for it",
            ["shm: the target's kv_transfer.transport leaves it out: set auto"],
        ),
        (
            asked("tcp"),
            cpu("tcp"),
            "raw",
            "tcp: the source's kv_transfer.transport asks for it",
            [
                "shm: the source's kv_transfer.transport leaves it out: set auto; the target does not offer it (its "
                "cache is not in shared memory)"
            ],
        ),
        (
            asked("torch_distributed", "GPU-1"),
            asked("torch_distributed", "GPU-2"),
            "raw",
            "torch_distributed: kv_transfer.transport asks for it",
            ["cuda_ipc: kv_transfer.transport leaves it out: set auto"],
        ),
    ],
)
def test_where_the_setting_decided_it_is_named_and_so_is_the_way_out(
    source: Reach, target: Reach, encoding: Encoding, why: str, missing: list[str]
) -> None:
    choice = choose_transport(source, target, encoding)
    assert (choice.why, list(choice.missing)) == (why, missing)


def test_auto_is_no_way_out_to_what_it_does_not_offer() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_transport(asked("tcp"), asked("torch_distributed"), "raw")
    assert "torch_distributed: the source's kv_transfer.transport leaves it out)" in str(caught.value)
    assert "tcp: the target's kv_transfer.transport leaves it out: set auto;" in str(caught.value)


def test_what_one_side_alone_asks_for_is_named_with_what_the_other_has_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"nixl: the source does not offer it \(kv_transfer.transport has to ask for it"
    ):
        choose_transport(cpu("shm", "tcp"), asked("nixl"), "raw")
    assert choose_transport(asked("nixl"), asked("nixl"), "raw").transport == "nixl"
    with pytest.raises(ConfigError, match="nixl: one worker is on a CPU and the other on a GPU"):
        choose_transport(asked("nixl"), asked("nixl", "GPU-1"), "raw")


def test_a_pair_with_nothing_in_common_is_told_both_lists_and_why() -> None:
    with pytest.raises(ConfigError, match="the source offers tcp, the target shm, torch_distributed") as caught:
        choose_transport(cpu("tcp"), cpu("shm", "torch_distributed"), "raw")
    assert "shm: the source does not offer it" in str(caught.value)
    with pytest.raises(ConfigError, match=r"the source offers shm, the target shm .*different machines"):
        choose_transport(cpu("shm"), cpu("shm", machine="b"), "raw")
    with pytest.raises(ConfigError, match="the source offers none, the target none"):
        choose_transport(cpu(), cpu(), "raw")
