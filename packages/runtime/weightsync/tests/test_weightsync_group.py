"""Weights over a group: it is made once; a member that fails or dies is named; a new member gets a new group."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch._C
from weightsync_memory import peak_bytes
from weightsync_peers import (
    Weights,
    are_equal,
    be_engine,
    be_group_trainer_that_dies,
    be_member,
    give,
    in_thread,
    load_into,
    plan_of,
    receive_all,
    said_by,
    take,
)

from offbeat_core import ConfigError, DeadlineError, WeightSyncError
from offbeat_mesh import open_store
from offbeat_weightsync import DiskSender, GroupSender, WeightGroup, new_address, receive
from offbeat_weightsync import _weight_group as weight_group
from offbeat_weightsync._connection import Deadline, GroupAddress


@pytest.fixture
def sender(weights: Weights) -> Iterator[GroupSender]:
    with GroupSender(new_address("127.0.0.1"), plan_of(weights), deadline_s=30) as sender:
        yield sender


class Member:
    """An engine that keeps its member from version to version."""

    def __init__(self, sender: GroupSender, name: str) -> None:
        self._sender, self._name, self.group = sender, name, WeightGroup("cpu")

    def take(self, version: int, fault: str = "") -> Weights:
        with receive(self._sender.address, version, 30, name=self._name, group=self.group) as stream:
            return take(stream, fault)


def sync(sender: GroupSender, weights: Weights, version: int, members: list[Member], fault: str = "") -> list[str]:
    """What the trainer and all members say; the first member has the fault."""
    said: list[str] = ["", *["" for _ in members]]

    def run(index: int, member: Member) -> None:
        said[index] = said_by(lambda: member.take(version, fault if index == 1 else ""))

    threads = [threading.Thread(target=run, args=item) for item in enumerate(members, 1)]
    for thread in threads:
        thread.start()
    said[0] = said_by(lambda: sender.send(give(weights), version, len(members)))
    for thread in threads:
        thread.join()
    return said


def group_of(*members: Member) -> str:
    """The group that all of them are in."""
    members = [member.group.member for member in members]
    assert sorted(member.rank for member in members) == list(range(1, 1 + len(members)))
    (group,) = {member.group for member in members}
    return group


def test_a_group_is_made_once_and_again_when_an_engine_joins_or_leaves(sender: GroupSender, weights: Weights) -> None:
    one, two, joined = (Member(sender, f"rollout-{number}") for number in range(3))
    all_well = ["has 2", "has 8", "has 8"]
    assert sync(sender, weights, 1, [one, two]) == all_well
    first = group_of(one, two)
    assert sync(sender, weights, 2, [two, one]) == all_well  # in whatever order they come
    assert group_of(one, two) == first
    assert sync(sender, weights, 2, [joined]) == ["has 1", "has 8"]  # between two syncs
    assert sync(sender, weights, 3, [one, two, joined]) == ["has 3", "has 8", "has 8", "has 8"]
    assert group_of(one, two, joined) != first
    assert sync(sender, weights, 4, [one, joined]) == all_well
    assert sync(sender, weights, 5, [Member(sender, "rollout-0"), joined]) == all_well  # started again


def test_a_failure_ends_the_group_and_the_next_sync_makes_another(sender: GroupSender, weights: Weights) -> None:
    members = [Member(sender, f"rollout-{number}") for number in range(2)]
    assert sync(sender, weights, 1, members) == ["has 2", "has 8", "has 8"]
    first = group_of(*members)
    trainer, failed, other = sync(sender, weights, 2, members, "refuse wide")
    assert failed == "ValueError: no room for wide"
    assert trainer == "WeightSyncError: rollout-0 gave up: ValueError: no room for wide"
    assert other == "WeightSyncError: trainer-0 gave up: rollout-0 gave up: ValueError: no room for wide"
    assert [member.group.member.group for member in members] == ["", ""]
    assert sync(sender, weights, 2, members) == ["has 2", "has 8", "has 8"]
    assert group_of(*members) != first


def test_two_members_on_one_device_are_refused_before_the_group_is_made(
    sender: GroupSender, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a rule of nccl, which would wait or fail with its own text. The processors here pretend to be one GPU."""
    member_of = WeightGroup.member.fget
    assert member_of is not None
    on_gpu = property(lambda group: msgspec.structs.replace(member_of(group), device="gpu-0"))
    monkeypatch.setattr(WeightGroup, "member", on_gpu)
    trainer, engine = sync(sender, weights, 1, [Member(sender, "rollout-0")])
    words = "two members of the group compute on one device, which nccl refuses: use cuda-ipc"
    assert trainer == f"WeightSyncError: {words}"
    assert engine == f"WeightSyncError: trainer-0 gave up: {words}"


def test_an_engine_that_dies_before_the_group_is_made_is_named(
    sender: GroupSender, weights: Weights, start_peer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    met = sender._meet

    def kill_and_meet(joined: object) -> None:
        os.kill(doomed.process.pid, signal.SIGKILL)
        met(joined)

    monkeypatch.setattr(sender, "_meet", kill_and_meet)
    doomed = start_peer(be_engine, sender.address, "rollout-1", 1, 30.0, "")
    other = Member(sender, "rollout-0")
    begin = time.monotonic()
    trainer, said = sync_with(sender, weights, other)
    assert time.monotonic() - begin < 15  # of 30
    assert trainer.startswith("WeightSyncError: rollout-1 hung up or died"), trainer
    assert said.startswith("WeightSyncError: trainer-0 gave up: rollout-1 hung up or died"), said


@pytest.mark.parametrize("way", ["group", "disk"])
def test_an_engine_killed_in_a_sync_is_named_the_others_continue_and_one_that_joins_gets_weights(
    way: str, weights: Weights, start_peer: Callable[..., Any], tmp_path: Path
) -> None:
    def held(version: int) -> str:
        total = sum(float(tensor.double().sum()) for tensor in weights.values())
        return f"version {version}: 8 tensors, sum {total:.6f}"

    where, plan = new_address("127.0.0.1"), plan_of(weights)
    sender = GroupSender(where, plan) if way == "group" else DiskSender(where, plan, tmp_path)
    with sender:
        staying = [start_peer(be_member, sender.address, f"rollout-{number}", 1, 0) for number in range(2)]
        start_peer(be_member, sender.address, "rollout-2", 1, 2)
        sender.send(weights.items(), 1, 3)
        assert [engine.next_text() for engine in staying] == [held(1)] * 2
        weights["wide"].add_(1)
        with pytest.raises(WeightSyncError, match="rollout-2 hung up or died"):
            sender.send(weights.items(), 2, 3)
        sender.send(weights.items(), 2, 2)  # as grpo-async-app begins anew without it
        for engine in staying:
            assert engine.next_text().startswith("trainer-0 gave up: rollout-2 hung up or died")
            assert engine.next_text() == held(2)
        joined = start_peer(be_member, sender.address, "rollout-3", 3, 0)
        weights["wide"].add_(1)
        sender.send(weights.items(), 3, 3)
        assert [engine.next_text() for engine in (*staying, joined)] == [held(3)] * 3


def test_a_trainer_that_dies_is_named_by_its_engines(start_peer: Callable[..., Any]) -> None:
    trainer = start_peer(be_group_trainer_that_dies)
    address = trainer.next_text()
    begin = time.monotonic()
    with (
        in_thread(lambda: said_by(lambda: receive_all(address))) as one,
        in_thread(lambda: said_by(lambda: receive_all(address))) as two,
    ):
        pass
    assert time.monotonic() - begin < 15  # of 30
    for said in (*one, *two):
        assert str(said).startswith("WeightSyncError: trainer-0 hung up or died"), said


def sync_with(sender: GroupSender, weights: Weights, member: Member) -> tuple[str, str]:
    """One member here, and one elsewhere."""
    with in_thread(lambda: said_by(lambda: member.take(1))) as said:
        trainer = said_by(lambda: sender.send(weights.items(), 1, 2))
    return trainer, str(said[0])


def test_who_does_not_come_is_missed_at_the_deadline(sender: GroupSender, weights: Weights) -> None:
    member = Member(sender, "rollout-0")
    with in_thread(lambda: member.take(1)) as said, pytest.raises(DeadlineError, match=r"1 of 2 .*\(here: rollout-0\)"):
        sender.send(weights.items(), 1, 2, deadline_s=0.5)
    assert "trainer-0 gave up" in str(said[0])


def test_an_engine_that_stands_still_is_named_at_the_deadline(
    sender: GroupSender, weights: Weights, start_peer: Callable[..., Any]
) -> None:
    start_peer(be_engine, sender.address, "rollout-1", 1, 30.0, "stop at wide")
    member = Member(sender, "rollout-0")
    with (
        in_thread(lambda: said_by(lambda: member.take(1))) as said,
        pytest.raises(DeadlineError, match="rollout-1 to "),
    ):
        sender.send(weights.items(), 1, 2, deadline_s=3)
    assert "trainer-0 gave up: " in str(said[0])


def test_who_brings_no_group_or_another_device_is_refused(
    sender: GroupSender, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_without() -> object:
        with receive(sender.address, 1, 30) as stream:
            return take(stream)

    with in_thread(take_without) as said, pytest.raises(WeightSyncError, match="rollout-0 brought no group"):
        sender.send(weights.items(), 1, 1)
    assert "give receive(..., group=WeightGroup(device))" in str(said[0])
    member = Member(sender, "rollout-0")
    monkeypatch.setattr(member.group._device, "kind", "cuda", raising=False)
    with in_thread(lambda: member.take(1)), pytest.raises(WeightSyncError, match="rollout-0 has cuda, trainer-0 cpu"):
        sender.send(weights.items(), 1, 1)


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20], ids=["several buckets", "one"])
def test_weights_are_loaded_in_place_and_converted_on_the_way(floats: Weights, bucket_bytes: int) -> None:
    plan = plan_of(floats, "bfloat16", bucket_bytes)
    held = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in plan.specs}

    def take_in_place() -> None:
        with receive(sender.address, 7, 30, group=WeightGroup("cpu")) as stream:
            load_into(stream, held)

    with GroupSender(new_address("127.0.0.1"), plan, deadline_s=30) as sender, in_thread(take_in_place):
        sender.send(floats.items(), 7, 1)
    assert are_equal(held, {name: tensor.bfloat16() for name, tensor in floats.items()})


def test_buckets_on_a_device_are_proved_by_sums_of_words(
    sender: GroupSender, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_checksum", "words")
    assert sync(sender, weights, 1, [Member(sender, "rollout-0")]) == ["has 1", "has 8"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from /proc")
def test_a_sender_takes_two_buckets_of_extra_memory(start_peer: Callable[..., Any]) -> None:
    bucket_bytes, names = 24 << 20, [f"t{index}" for index in range(6)]
    shared = torch.ones(bucket_bytes // 4)
    with GroupSender(
        new_address("127.0.0.1"), plan_of(dict.fromkeys(names, shared), None, bucket_bytes), deadline_s=60
    ) as sender:
        start_peer(be_engine, sender.address, "rollout-0", 1, 60.0, "")
        before = peak_bytes(reset=True)
        sender.send(((name, shared) for name in names), 1, 1)
        assert (peak_bytes() - before) / bucket_bytes < 2.5


def test_a_member_that_leaves_a_group_no_other_has_joined_leaves_no_thread_behind() -> None:
    """A thread that waits in torch while the process ends can abort it."""
    store = open_store("127.0.0.1", deadline_s=30)
    group = WeightGroup("cpu")
    group.join(
        GroupAddress("alone", 1, 2, "127.0.0.1", store.port), "127.0.0.1", Deadline("weight sync of version 1", 30)
    )
    (making,) = [thread for thread in threading.enumerate() if thread.name == "offbeat-weight-group"]
    time.sleep(0.3)  # it has come to its wait
    begin = time.monotonic()
    group.leave()
    assert not making.is_alive()
    assert time.monotonic() - begin < 10  # of 30


@pytest.mark.nightly
def test_groups_that_are_made_by_several_threads_at_once_do_not_end_the_process() -> None:
    """Without the lock of first operations torch 2.11 crashes: so this runs in a process of its own."""
    made = subprocess.run([sys.executable, "-c", MANY_GROUPS], capture_output=True, text=True, timeout=100)
    assert made.returncode == 0, made.stderr[-2000:]


MANY_GROUPS = """
import sys, threading
from offbeat_mesh import open_store
from offbeat_weightsync import WeightGroup, _weight_group
from offbeat_weightsync._connection import Deadline, GroupAddress

make_group, together = _weight_group._MAKERS["gloo"], threading.Barrier(4)

def make_together(*arguments):
    group = make_group(*arguments)
    together.wait(60)
    return group

def make(thread):
    for number in range(200):
        group, deadline = WeightGroup("cpu"), Deadline("a test", 30)
        place = GroupAddress(f"{thread}/{number}", 0, 1, "127.0.0.1", store.port)
        group.join(place, "127.0.0.1", deadline, store)
        group.await_members(lambda: None, deadline)

_weight_group._MAKERS["gloo"] = make_together
sys.setswitchinterval(1e-6)
store = open_store("127.0.0.1")
threads = [threading.Thread(target=make, args=(thread,)) for thread in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


def test_torch_takes_what_is_given_to_nccl() -> None:
    """A build without CUDA has no such class: its stub says what the class takes."""
    stub = Path(torch._C.__file__).parent / "_C" / "_distributed_c10d.pyi"
    (nccl,) = re.findall(r"^class ProcessGroupNCCL\(Backend\):\n((?:    .*\n|\n)+)", stub.read_text(), re.MULTILINE)
    assert "class Options(Backend.Options):" in nccl
    (first,) = re.findall(r"def __init__\(\s*self,\s*store: Store,\s*rank: int,\s*size: int,\s*options: Options", nccl)
    assert first
    assert "_timeout" in stub.read_text()
    assert set(weight_group._MAKERS) == {"gloo", "nccl"}


def test_other_kinds_of_device_are_sent_to_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        kind, collective_backend, torch_device = "other", "occl", torch.device("cpu")

    monkeypatch.setattr(weight_group, "open_device", lambda _: Other())
    with pytest.raises(ConfigError, match="weights go over a group of gloo or nccl; other has occl"):
        WeightGroup("other")
