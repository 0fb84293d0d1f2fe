"""How weights reach engines: by which transport, and whether all of them or what has changed."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpo_runs import Main, run_to_its_end, values_of

from grpo_async_app._commands.plan import describe_plan
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._config.weight_sync import assign_ranks, choose_transport
from grpo_async_app._fleet.events import LoggedEvents
from grpo_async_app._fleet.weights import WeightOffer
from grpo_async_app._preflight.preflight import check_run
from grpo_async_app._roles import rollout as rollout_role
from offbeat_core import ConfigError, RoleName, RolloutCapabilities, WeightProof, load_config
from offbeat_placement import PlacedRank
from offbeat_weightsync import transport_class


def placed(*ranks: tuple[str, str, int | None], kind: str = "") -> Any:
    """A placement of (role, node, device), on devices of one kind."""
    found = [PlacedRank(role=role, replica=0, rank=0, node=node, device=device) for role, node, device in ranks]
    groups = [SimpleNamespace(role=role, accelerator=kind) for role in ("trainer", "rollout")]
    return SimpleNamespace(plan=SimpleNamespace(ranks=found), groups=groups)


HERE, ELSEWHERE = ("rollout", "a", None), ("rollout", "b", None)
GPU, OTHER_GPU = ("rollout", "a", 0), ("rollout", "a", 1)


@pytest.mark.parametrize(
    ("transport", "trainer_device", "engines", "words"),
    [
        ("auto", None, [HERE, ELSEWHERE], ""),
        ("tcp", None, [HERE, ELSEWHERE], ""),
        ("shared-memory", None, [HERE, HERE], ""),
        ("shared-memory", None, [HERE, ELSEWHERE], "an engine is on b, the trainer on a"),
        ("cuda-ipc", 0, [GPU], ""),
        ("cuda-ipc", 0, [GPU, OTHER_GPU], "the one on a, device 1, has none"),
        ("cuda-ipc", None, [HERE], "one and the same CUDA device"),
        ("cuda-ipc", None, [ELSEWHERE], "an engine is on b"),
        ("nccl", None, [HERE, ELSEWHERE], ""),
        ("nccl", 0, [OTHER_GPU], ""),
        ("nccl", 0, [GPU], "a device for the trainer and one for each engine"),
        ("disk", None, [HERE, ELSEWHERE], ""),
    ],
)
def test_a_transport_that_does_not_reach_all_engines_is_refused(
    config: Path, transport: str, trainer_device: int | None, engines: list[Any], words: str
) -> None:
    wanted = load_config(config, GrpoConfig, [f"--rollout.weight_transport={transport}"])
    placement = placed(("trainer", "a", trainer_device), *engines)
    if words:
        with pytest.raises(ConfigError, match=words):
            choose_transport(wanted, placement)
    else:
        choose_transport(wanted, placement)


@pytest.mark.parametrize(
    ("words", "engines", "line"),
    [
        ([], [HERE], "by shared memory: all engines are on the trainer's machine"),
        ([], [HERE, ELSEWHERE], "by TCP: an engine is on b, the trainer on a"),
        (
            ["nccl"],
            [HERE],
            'by broadcasts of one group, from the trainer to all engines: rollout.weight_transport = "nccl"',
        ),
        (["disk"], [HERE], 'through the run folder, as safetensors files: rollout.weight_transport = "disk"'),
        (["disk", "/shared"], [HERE], "through /shared, as safetensors files: "),
    ],
)
def test_the_plan_says_how_weights_travel_and_why(
    config: Path, words: list[str], engines: list[Any], line: str
) -> None:
    keys = ("rollout.weight_transport", "rollout.weight_folder")
    wanted = load_config(config, GrpoConfig, [f"--{key}={word}" for key, word in zip(keys, words, strict=False)])
    assert choose_transport(wanted, placed(("trainer", "a", None), *engines))[1].startswith(line)


VLLM = "--rollout.backend=vllm"
ADAPTER = ("--engine.lora_rank=4", "--rollout.options.enable_lora=true")
ON_ONE = ("--engine.device=cuda:0", "--rollout.device=cuda:0")


@pytest.mark.parametrize(
    ("words", "kind", "engines", "settled"),
    [
        (ON_ONE, "", [HERE, HERE], "cuda-ipc"),
        ((), "GPU", [GPU], "cuda-ipc"),
        ((), "XPU", [GPU], "auto"),
        ((), "GPU", [GPU, OTHER_GPU], "auto"),
        (ON_ONE, "", [HERE, ELSEWHERE], "auto"),
        ((*ON_ONE, "--rollout.full_sync_every=5"), "", [HERE], "auto"),
        ((*ON_ONE, "--rollout.weight_transport=tcp"), "", [HERE], "tcp"),
        ((*ON_ONE, "--rollout.weight_format=fp8"), "", [HERE], "auto"),
        ((*ON_ONE, "--rollout.backend=none"), "", [HERE], "auto"),
        ((*ON_ONE, VLLM), "", [HERE], "cuda-ipc"),
        ((VLLM, "--cluster.colocate=true"), "GPU", [GPU], "cuda-ipc"),
        ((VLLM, "--cluster.colocate=true"), "GPU", [GPU, OTHER_GPU], "auto"),
        ((*ON_ONE, VLLM, "--rollout.weight_format=fp8"), "", [HERE], "auto"),
        ((*ON_ONE, VLLM, *ADAPTER), "", [HERE], "auto"),
        ((*ON_ONE, *ADAPTER[:1]), "", [HERE], "cuda-ipc"),
        ((VLLM,), "GPU", [OTHER_GPU, ("rollout", "a", 2)], "nccl"),
        ((VLLM,), "GPU", [OTHER_GPU, ("rollout", "b", 0)], "nccl"),
        ((VLLM,), "GPU", [OTHER_GPU, OTHER_GPU], "auto"),
        ((VLLM,), "XPU", [OTHER_GPU], "auto"),
        (("--engine.device=cuda:0", "--rollout.device=cuda:1"), "", [HERE], "auto"),
        ((), "GPU", [OTHER_GPU], "nccl"),
        (("--rollout.full_sync_every=5",), "GPU", [OTHER_GPU], "auto"),
        ((), "", [HERE], "auto"),
    ],
)
def test_weights_go_from_device_to_device_where_they_can(
    config: Path, words: tuple[str, ...], kind: str, engines: list[Any], settled: str
) -> None:
    index = 0 if kind else None
    chosen, how = choose_transport(
        load_config(config, GrpoConfig, words), placed(("trainer", "a", index), *engines, kind=kind)
    )
    assert chosen.rollout.weight_transport == settled
    assert ("by CUDA IPC" in how) == (settled == "cuda-ipc")


RANKS = [("trainer", "a", index) for index in range(4)]
ENGINES = [("rollout", "a", index) for index in range(4)]
COLOCATED = ("--engine.num_ranks=4", "--cluster.colocate=true")


@pytest.mark.parametrize(
    ("words", "engines", "settled", "ranks"),
    [
        (COLOCATED, ENGINES, "cuda-ipc", [(0,), (1,), (2,), (3,)]),
        (COLOCATED, [ENGINES[2], ENGINES[2], ENGINES[1]], "cuda-ipc", [(2,), (2,), (1,)]),
        ((*COLOCATED, VLLM, "--rollout.tensor_parallel=2"), ENGINES, "cuda-ipc", [(0, 1), (2, 3)]),
        ((*COLOCATED, VLLM, "--rollout.tensor_parallel=2", *ADAPTER), ENGINES, "auto", [(0,), (0,)]),
        (COLOCATED, [*ENGINES, ("rollout", "a", 4)], "auto", [(0,)] * 5),
        (COLOCATED, [*ENGINES, ("rollout", "b", 0)], "auto", [(0,)] * 5),
        ((*COLOCATED, "--rollout.full_sync_every=5"), ENGINES, "auto", [(0,)] * 4),
    ],
)
def test_each_rank_sends_to_the_engines_on_its_device(
    config: Path, words: tuple[str, ...], engines: list[Any], settled: str, ranks: list[tuple[int, ...]]
) -> None:
    placement = placed(*RANKS, *engines, kind="GPU")
    chosen, how = choose_transport(load_config(config, GrpoConfig, words), placement)
    assert chosen.rollout.weight_transport == settled
    assert ("from each rank of the trainer to the engines on its device" in how) == (settled == "cuda-ipc")
    assert assign_ranks(chosen, placement) == {f"rollout-{index}": each for index, each in enumerate(ranks)}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--rollout.weight_transport=nccl", "--engine.device=cuda:0", "--rollout.device=cpu"], "one kind of device"),
        (["--rollout.weight_transport=nccl", "--cluster.colocate=true"], "some share theirs"),
        (["--rollout.weight_transport=disk", "--rollout.full_sync_every=2"], "leave rollout.full_sync_every at 1"),
    ],
)
def test_what_a_transport_cannot_do_is_refused(config: Path, words: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        choose_transport(load_config(config, GrpoConfig, words), placed(("trainer", "a", None), HERE))


def test_devices_that_are_named_and_not_given_out_may_be_shared(config: Path) -> None:
    words = ["--rollout.weight_transport=cuda-ipc", "--engine.device=cuda:0", "--rollout.device=cuda:0"]
    choose_transport(load_config(config, GrpoConfig, words), placed(("trainer", "a", None), HERE))


@pytest.mark.parametrize(
    ("transport", "hosts", "source"),
    [
        ("auto", ["1.1.1.1"], "in memory"),
        ("auto", ["1.1.1.1", "2.2.2.2"], "by tcp"),
        ("tcp", ["1.1.1.1"], "by tcp"),
        ("shared-memory", ["1.1.1.1"], "in memory"),
        ("nccl", ["1.1.1.1"], "by tcp"),
        ("disk", ["1.1.1.1"], "by tcp"),
    ],
)
def test_engines_are_told_where_to_fetch_weights(transport: str, hosts: list[str], source: str) -> None:
    async def listen(_: float) -> str:
        return "by tcp"

    trainer: Any = SimpleNamespace(socket_paths=["in memory"], address="1.1.1.1", listen=listen)
    engines: Any = [SimpleNamespace(name=f"rollout-{index}", address=host) for index, host in enumerate(hosts)]
    offer = WeightOffer(trainer, 1, 1.0, LoggedEvents(), reach=transport_class(transport).reach)
    assert asyncio.run(offer.sources_for(engines)) == [[source]] * len(hosts)


def test_the_plan_says_what_copies_take(config: Path) -> None:
    rows = dict(describe_plan(check_run(load_config(config, GrpoConfig, ["--rollout.full_sync_every=5"]))))
    assert (
        "all of them every 5 versions, what has changed in between: trainer-0 and each engine keep" in rows["weights"]
    )


@pytest.mark.parametrize(("dtype", "weight_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_plan_counts_the_versions_on_disk(config: Path, dtype: str, weight_bytes: int) -> None:
    """One that engines read, and the next that is being written."""
    plans = {
        transport: check_run(
            load_config(config, GrpoConfig, [f"--rollout.weight_transport={transport}", f"--rollout.dtype={dtype}"])
        )
        for transport in ("tcp", "disk")
    }
    weights = plans["tcp"].model.num_parameters
    assert plans["disk"].required_bytes - plans["tcp"].required_bytes == 2 * weight_bytes * weights


class ReceivingByWorkers:
    """An engine that notes which way each version comes."""

    capabilities = RolloutCapabilities(pause_modes=("abort", "wait", "keep"), receives=True)

    def __init__(self) -> None:
        self.ways: list[str] = []

    async def receive_weights(
        self, transport: str, addresses: list[str], version: int, _: float, *, name: str
    ) -> WeightProof:
        self.ways.append(f"{name} by {transport} at {' and '.join(addresses)}")
        return WeightProof(version=version, num_tensors=1, checksums=())


@pytest.mark.parametrize(
    ("words", "on_device", "by_workers"),
    [
        (("--rollout.weight_transport=nccl",), True, {"merged", "base"}),
        (("--rollout.weight_transport=nccl",), False, set()),
        (("--rollout.weight_transport=cuda-ipc",), True, {"merged", "base"}),
        ((), True, set()),
        (("--rollout.weight_transport=nccl", "--rollout.full_sync_every=5"), True, set()),
    ],
)
def test_workers_take_what_comes_to_their_devices(
    config: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], on_device: bool, by_workers: set[str]
) -> None:
    monkeypatch.setattr("offbeat_weightsync._transports.group.GroupTransport.on_device", on_device)
    engine = ReceivingByWorkers()

    async def create(_: object) -> ReceivingByWorkers:
        return engine

    monkeypatch.setattr(rollout_role, "load_backend", lambda *_: SimpleNamespace(create=create))
    settled = load_config(config, GrpoConfig, words)
    role = rollout_role.RolloutRole(config=settled, role=RoleName("rollout"), model_path="m", num_threads=1)

    async def receive(address: str, version: int, *_: object) -> tuple[WeightProof, str]:
        return WeightProof(version=version, num_tensors=1, checksums=()), "16 kB"

    monkeypatch.setattr(role, "_receive", receive)

    async def pull() -> set[str]:
        await role.start()
        found = set()
        for part in ("merged", "base", "adapter"):
            engine.ways.clear()
            assert (await role.pull_weights(["@trainer"], 3, 60.0, part)).version == 3  # type: ignore[arg-type]
            if engine.ways:
                assert engine.ways == [f"rollout-0 by {settled.rollout.weight_transport} at @trainer"]
                found.add(part)
        return found

    assert asyncio.run(pull()) == by_workers


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["nccl", "disk"])
def test_a_run_by_a_group_or_the_disk_is_that_by_memory(
    forked_main: Main, config: Path, tmp_path: Path, transport: str
) -> None:
    words = ["--async.staleness_threshold=0", "--async.partial_rollout=false", "--rollout.num_engines=2"]
    for way in ("auto", transport):
        run_to_its_end(
            forked_main, "train", config, "--out", tmp_path / way, *words, f"--rollout.weight_transport={way}"
        )
    for metric in ("train/reward", "train/entropy", "eval/reward"):
        assert values_of(tmp_path / transport, metric) == values_of(tmp_path / "auto", metric)
    kept = [path.name for path in (tmp_path / transport / "weights").glob("version-*")]
    assert len(kept) == (transport == "disk")


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["tcp", "shared-memory"])
def test_a_run_with_changes_alone_is_that_with_all_weights(
    forked_main: Main, config: Path, tmp_path: Path, transport: str
) -> None:
    words = ["--async.staleness_threshold=0", "--async.partial_rollout=false", "--rollout.dtype=bfloat16"]
    ways = {"all": [], "changes": ["--rollout.full_sync_every=3", f"--rollout.weight_transport={transport}"]}
    for name, way in ways.items():
        run_to_its_end(forked_main, "train", config, "--out", tmp_path / name, *words, *way)
    for metric in ("train/reward", "train/entropy", "eval/reward"):
        assert values_of(tmp_path / "changes", metric) == values_of(tmp_path / "all", metric)
