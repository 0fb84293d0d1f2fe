"""The trainer role hands its weights over: by shared memory, over TCP where the engine is elsewhere."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._roles.trainer import TrainerRole
from offbeat_core import WeightPart, WeightSyncError, parse_config
from offbeat_testing import reference_model, tiny_model
from offbeat_weightsync import KeptStream, WeightCopy, WeightGroup, new_address, receive

BIAS = "gate.e_score_correction_bias"


@pytest.fixture
def address() -> str:
    return new_address()


def open_role(
    model: Path,
    address: str,
    lora_sync: str = "merged",
    full_sync_every: int = 1,
    transport: str = "auto",
    weight_format: str = "dtype",
    **options: Any,
) -> TrainerRole:
    rollout = {"dtype": "bfloat16", "sync_bucket_bytes": 64 << 10, "weight_folder": model.with_name("weights")}
    rollout["weight_format"] = weight_format
    rollout |= {"lora_sync": lora_sync, "full_sync_every": full_sync_every, "weight_transport": transport}
    sections = {"rollout": rollout, "engine": {"device": "cpu", **options}}
    overrides = [f"--{section}.{key}={value}" for section, held in sections.items() for key, value in held.items()]
    config = parse_config(
        f'[model]\npath = "{model}"\n[data]\npath = "none"\n[engine]\ndtype = "float32"\n', GrpoConfig, overrides
    )
    return TrainerRole(config=config, model_path=str(model), num_updates=1, num_threads=1, socket_paths=[address])


def take(address: str, held: dict[str, Tensor]) -> threading.Thread:
    """Receive version 1 in a thread."""

    def run() -> None:
        with receive(address, 1, 30, group=WeightGroup("cpu")) as stream:
            held.update((name, tensor.clone()) for name, tensor in stream)
            stream.confirm(stream.prove(held.__getitem__))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("transport", ["shared-memory", "tcp", "nccl", "disk"])
def test_an_engine_gets_the_trainers_weights(model: Path, address: str, transport: str) -> None:
    held: dict[str, Tensor] = {}
    role = open_role(model, address, transport=transport)
    try:
        where = role.listen("127.0.0.1") if transport != "shared-memory" else ""
        thread = take(where or address, held)
        (proof,) = role.push_weights(1, [1], 30, where)
        thread.join()
        expected = {name: tensor.bfloat16() for name, tensor in role._engine.weights()}
    finally:
        role.close()
    assert proof.num_tensors == len(held) == len(expected)
    assert all(torch.equal(held[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("transport", "part", "settings"),
    [
        ("shared-memory", "merged", {}),
        ("tcp", "merged", {"weight_format": "fp8"}),
        ("nccl", "base", {"lora_sync": "adapter", "lora_rank": 2}),
        ("disk", "merged", {"lora_rank": 2}),
    ],
)
def test_correction_biases_of_routers_arrive_as_they_are(
    tmp_path: Path, address: str, transport: str, part: WeightPart, settings: dict[str, Any]
) -> None:
    """In float32, in which engines hold them too: bfloat16 would choose other experts where scores are near."""
    model = tiny_model(tmp_path / "model", "glm4_moe", hidden_size=128, config={"n_routed_experts": 128})
    (wanted,) = (tensor for name, tensor in reference_model(model).named_buffers() if name.endswith(BIAS))
    assert not torch.equal(wanted.bfloat16().float(), wanted)
    held: dict[str, Tensor] = {}
    role = open_role(model, address, transport=transport, **settings)
    try:
        where = role.listen("127.0.0.1") if transport != "shared-memory" else ""
        thread = take(where or address, held)
        role.push_weights(1, [1], 30, where, part=part)
        thread.join()
    finally:
        role.close()
    (arrived,) = (tensor for name, tensor in held.items() if name.endswith(BIAS))
    assert torch.equal(arrived, wanted)
    assert held["model.norm.weight"].dtype == torch.bfloat16


def test_engines_get_the_weights_of_one_gathering_at_the_same_time(model: Path, address: str) -> None:
    held: list[dict[str, Tensor]] = [{}, {}]
    role = open_role(model, address)
    gathered, weights = [0], role._engine.weights

    def count(*given: Any, **options: Any) -> Any:
        gathered[0] += 1
        return weights(*given, **options)

    role._engine.weights = count  # type: ignore[method-assign]
    try:
        threads = [take(address, each) for each in held]
        proofs = role.push_weights(1, [2], 30)
        for thread in threads:
            thread.join()
    finally:
        role.close()
    assert gathered == [1]
    assert proofs[0] == proofs[1]
    assert all(torch.equal(held[0][name], held[1][name]) for name in held[0])
    assert len(held[0]) == proofs[0].num_tensors


def test_an_engine_gets_the_merged_weights_of_an_adapter(model: Path, address: str) -> None:
    held: dict[str, Tensor] = {}
    role = open_role(model, address, lora_rank=2)
    try:
        thread = take(address, held)
        role.push_weights(1, [1], 30)
        thread.join()
    finally:
        role.close()
    assert held


@pytest.mark.parametrize("transport", ["shared-memory", "tcp", "nccl", "disk"])
def test_an_engine_gets_the_base_and_then_the_adapter_alone(model: Path, address: str, transport: str) -> None:
    parts: dict[WeightPart, dict[str, Tensor]] = {"base": {}, "adapter": {}}
    role = open_role(model, address, lora_sync="adapter", transport=transport, lora_rank=2)
    try:
        where = role.listen("127.0.0.1") if transport != "shared-memory" else ""
        for part, held in parts.items():
            thread = take(where or address, held)
            (proof,) = role.push_weights(1, [1], 30, where, part=part)
            thread.join()
            expected = {name: tensor.bfloat16() for name, tensor in role._engine.weights(part=part)}
            assert proof.num_tensors == len(held) == len(expected)
            assert all(torch.equal(held[name], expected[name]) for name in expected)
    finally:
        role.close()
    assert sum(each.nbytes for each in parts["adapter"].values()) < sum(each.nbytes for each in parts["base"].values())


@pytest.mark.parametrize("over_tcp", [False, True])
def test_an_engine_that_keeps_a_copy_gets_what_has_changed_alone(model: Path, address: str, over_tcp: bool) -> None:
    role, copy, changes_alone = open_role(model, address, full_sync_every=3), WeightCopy(), []

    def take_kept(version: int) -> dict[str, Tensor]:
        with receive(where or address, version, 30, copy=copy) as stream:
            held = {name: tensor.clone() for name, tensor in stream}
            stream.confirm(stream.prove(held.__getitem__))
        assert isinstance(stream, KeptStream)
        changes_alone.append(stream.brings_changes)
        return held

    try:
        where = role.listen("127.0.0.1") if over_tcp else ""
        for version in range(1, 6):
            with ThreadPoolExecutor(1) as pool:
                taken = pool.submit(take_kept, version)
                role.push_weights(version, [1], 30, where)
                held = taken.result()
            expected = {name: tensor.bfloat16() for name, tensor in role._engine.weights()}
            assert all(torch.equal(held[name], expected[name]) for name in expected)
            next(iter(dict(role._engine.weights()).values())).view(-1)[version] += 1.0
    finally:
        role.close()
    assert changes_alone == [False, True, True, False, True]


@pytest.mark.parametrize("over_tcp", [False, True])
def test_an_engine_that_never_comes_leaves_the_trainer_free_for_the_next(
    model: Path, address: str, over_tcp: bool
) -> None:
    """Each time to the last tensor: the other ranks gather them all, and would wait for this one."""
    errors: list[WeightSyncError] = []

    def push_in_vain(transfer_id: int) -> None:
        try:
            role.push_weights(1, [1], 600, where, transfer_id)
        except WeightSyncError as error:
            errors.append(error)

    role, held = open_role(model, address), dict[str, Tensor]()
    whole, weights = [0], role._engine.weights

    def count_whole(*given: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        yield from weights(*given, **options)
        whole[0] += 1

    role._engine.weights = count_whole  # type: ignore[method-assign]
    try:
        where = role.listen("127.0.0.1") if over_tcp else ""
        waiting = threading.Thread(target=push_in_vain, args=(1,), daemon=True)
        waiting.start()
        asyncio.run(role.withdraw(2))  # and one that has not begun yet
        asyncio.run(role.withdraw(1))  # which was overtaken
        waiting.join(60)
        assert not waiting.is_alive()
        push_in_vain(2)
        assert ["was withdrawn" in str(error) for error in errors] == [True, True]
        assert whole == [2]
        thread = take(where or address, held)
        role.push_weights(1, [1], 60, where, 3)
        thread.join()
    finally:
        role.close()
    assert held


def test_a_trainer_that_has_closed_listens_nowhere(model: Path, address: str) -> None:
    role = open_role(model, address)
    where = role.listen("127.0.0.1")
    role.close()
    for each in (address, where):
        with pytest.raises(WeightSyncError, match="no sender listens at"), receive(each, 1, 5):
            pass
