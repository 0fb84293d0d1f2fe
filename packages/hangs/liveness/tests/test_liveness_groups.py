"""The groups that a process knows: the ranks of their members, how far they came, how long torch waits."""

import gc
import os
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from liveness_launch import launch
from liveness_standing import until
from liveness_worlds import run_two_worlds, use

from offbeat_liveness import current_monitor
from offbeat_liveness._process import ledger, process_groups, reading
from offbeat_liveness._process.flight_recorder import StillRecorder
from offbeat_liveness._process.ledger import LEDGER, watch_torch_calls
from offbeat_liveness._process.process_groups import group_snapshots, seconds_of
from offbeat_liveness._process.progress import ProgressTracker
from offbeat_liveness._process.snapshot import GroupSnapshot

LIMIT_S = 20.0


def head_now(progress=None):
    return reading.read_snapshot(
        progress or ProgressTracker(60.0), name="", world="", rank=0, world_size=2, stall_after_s=60.0
    )


def waits_when(condition, progress=None):
    end_s = time.monotonic() + LIMIT_S
    progress = progress or ProgressTracker(60.0)
    while time.monotonic() < end_s:
        found = [wait for wait in head_now(progress).waits if condition(wait)]
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(head_now(progress).waits)


def in_thread(function, *args, **named):
    thread = threading.Thread(target=ignoring_errors, args=(function, args, named), daemon=True)
    thread.start()
    return thread


def ignoring_errors(function, args, named):
    try:
        function(*args, **named)
    except RuntimeError:
        return


def both_groups(group) -> tuple[int, int, list[GroupSnapshot]]:
    use(group)
    dist.all_reduce(torch.ones(1))
    return dist.get_rank(), group.rank(), list(group_snapshots(None))


def test_a_group_over_another_store_has_members_of_unknown_worlds() -> None:
    answers = run_two_worlds(both_groups)
    across = [next(each for each in heads if each.name == "weight_sync") for _, _, heads in answers]
    own = [next(each for each in heads if each.name != "weight_sync") for _, _, heads in answers]
    assert [(each.is_foreign, each.ranks, each.size) for each in across] == [(True, (), 4)] * 4
    places = {each.place for each in across}
    assert len(places) == 1
    assert places.pop().startswith("127.0.0.1:")
    assert {each.timeout_s for each in across} == {77.0}
    assert [(each.is_foreign, each.ranks, each.place) for each in own] == [(False, (0, 1), "")] * 4
    assert [each.size for each in own] == [2] * 4


def waits_across(group) -> list[tuple[str, tuple[int, ...], int | None]]:
    """Rank 0 of each world waits for number 1 across, which is rank 1 of the first world alone."""
    watch_torch_calls()
    found = []
    if group.rank() == 0:
        receiver = in_thread(dist.recv, torch.ones(1), src=1, group=group)
        found = [(wait.kind, wait.peers, wait.root) for wait in waits_when(lambda wait: wait.kind == "p2p")]
        dist.barrier()
        receiver.join(LIMIT_S)
    elif group.rank() == 1:
        dist.barrier()
        dist.send(torch.ones(1), dst=0, group=group)
    else:
        dist.barrier()
    return found


def test_no_rank_of_this_world_is_blamed_for_a_member_of_another() -> None:
    answers = run_two_worlds(waits_across)
    assert answers[0] == [("p2p", (), None)]


@pytest.mark.ranks(2, liveness=False)
def test_groups_of_the_own_store_are_the_worlds_own(rank):
    part = dist.new_group([rank], use_local_synchronization=True)
    both = dist.new_group([0, 1], timeout=timedelta(seconds=33))
    heads = {head.name: head for head in group_snapshots(None)}
    assert [each.is_foreign for each in heads.values()] == [False] * 3
    assert heads[part.group_name].ranks == (rank,)
    assert (heads[both.group_name].ranks, heads[both.group_name].timeout_s) == ((0, 1), 33.0)


@pytest.mark.ranks(2, liveness=False)
def test_a_group_over_another_file_is_foreign_by_its_path(rank):
    path = f"/tmp/offbeat-file-store-{os.getppid()}"
    store = dist.FileStore(path, 2)
    group, _ = dist.distributed_c10d._new_process_group_helper(
        2, rank, [], "gloo", store, group_name="side", timeout=timedelta(seconds=LIMIT_S)
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    head = next(each for each in group_snapshots(None) if each.name == "side")
    dist.barrier()
    if rank == 0:
        os.unlink(path)
    assert (head.is_foreign, head.place, head.ranks) == (True, path, ())


@pytest.mark.ranks(2, liveness=False)
def test_how_far_a_group_came_is_unknown_where_its_counter_counts_transfers_as_well(rank):
    watch_torch_calls()
    exact, mixed = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (exact, mixed):
        dist.all_reduce(torch.ones(1), group=group)
    for _ in range(3):
        if rank == 0:
            dist.send(torch.ones(1), dst=1, group=mixed)
        else:
            dist.recv(torch.ones(1), src=0, group=mixed)
    unread = {head.name: head.entered for head in group_snapshots(None)}
    assert (unread[exact.group_name], unread[mixed.group_name]) == (1, None)
    recorder = StillRecorder(patience_s=LIMIT_S)
    read = {head.name: head.entered for head in group_snapshots(recorder.entries())}
    assert (read[exact.group_name], read[mixed.group_name]) == (1, 1)


@pytest.mark.ranks(1, liveness=False)
def test_a_group_that_was_used_before_anybody_looked_may_have_transferred():
    early = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=early)
    watch_torch_calls()
    late = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=late)
    entered = {head.name: head.entered for head in group_snapshots(None)}
    assert (entered[early.group_name], entered[late.group_name]) == (None, 1)


@pytest.mark.ranks(2, liveness=False)
def test_a_posted_transfer_is_a_wait_while_a_thread_stands_in_it(rank):
    watch_torch_calls()
    if rank == 0:
        work = dist.irecv(torch.ones(1), src=1)
        sent = dist.isend(torch.ones(1), dst=1)
        time.sleep(0.05)
        assert [wait for wait in head_now().waits if wait.kind == "p2p"] == []
        waiter = in_thread(work.wait, timedelta(seconds=11))
        (wait,) = waits_when(lambda wait: wait.kind == "p2p")
        assert (wait.what, wait.peers, wait.timeout_s) == ("recv", (1,), 11.0)
        dist.distributed_c10d._get_default_store().set("seen", "")
        waiter.join(LIMIT_S)
        sent.wait()
        assert LEDGER.open_waits() == []
    else:
        dist.distributed_c10d._get_default_store().clone().get("seen")
        dist.send(torch.ones(1), dst=0)
        dist.recv(torch.ones(1), src=0)


@pytest.mark.ranks(2, liveness=False)
def test_waits_say_when_torch_ends_them(rank):
    watch_torch_calls()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=44))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.clone().get("seen")
        dist.barrier(group=group)
        dist.monitored_barrier(timeout=timedelta(seconds=22))
        return
    second = store.clone()
    in_thread(second.wait, ["never"], timedelta(seconds=15))
    (waits,) = [waits_when(lambda wait: wait.kind == "store")]
    assert {wait.timeout_s for wait in waits} == {15.0}
    blocked = in_thread(dist.barrier, group=group)
    time.sleep(0.1)
    (wait,) = waits_when(lambda wait: wait.kind == "collective")
    assert (wait.group, wait.timeout_s) == (group.group_name, 44.0)
    checked = in_thread(dist.monitored_barrier, timeout=timedelta(seconds=22))
    (wait,) = waits_when(lambda wait: wait.kind == "barrier")
    assert (wait.what, wait.timeout_s) == ("monitored_barrier", 22.0)
    store.clone().set("seen", "")
    blocked.join(LIMIT_S)
    checked.join(LIMIT_S)


@pytest.mark.ranks(2, liveness=False)
def test_only_the_first_rank_of_a_monitored_barrier_minds_the_timeout_of_the_call(rank):
    """Torch lets the others wait as long as the group's timeout."""
    watch_torch_calls()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=44))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.clone().get("seen")
        dist.monitored_barrier(group=group, timeout=timedelta(seconds=22))
        return
    checked = in_thread(dist.monitored_barrier, group=group, timeout=timedelta(seconds=22))
    (wait,) = waits_when(lambda wait: wait.kind == "barrier")
    assert (wait.timeout_s, wait.has_own_deadline) == (44.0, False)
    store.clone().set("seen", "")
    checked.join(LIMIT_S)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(timedelta(minutes=1), 60.0), (timedelta(0), None), (timedelta(seconds=-1), None), (None, None), (5, 5.0)],
)
def test_no_timeout_is_none(given, seconds):
    assert seconds_of(given) == seconds


@pytest.mark.ranks(1, liveness=False)
def test_a_store_without_a_server_is_named():
    watch_torch_calls()
    in_thread(dist.TCPStore, "127.0.0.1", 1, is_master=False, timeout=timedelta(seconds=9))
    (wait,) = waits_when(lambda wait: wait.what == "TCPStore")
    assert (wait.kind, wait.on, wait.timeout_s) == ("rendezvous", "127.0.0.1:1", 18.0)  # torch tries twice


@pytest.mark.ranks(1, liveness=False)
def test_a_rendezvous_without_a_server_is_named():
    watch_torch_calls()
    in_thread(lambda: list(dist.rendezvous("tcp://127.0.0.1:1", 1, 2, timeout=timedelta(seconds=9))))
    (wait,) = waits_when(lambda wait: wait.kind == "rendezvous")
    assert (wait.what, wait.on) == ("rendezvous", "127.0.0.1:1")


@pytest.mark.ranks(1, liveness=False)
def test_an_empty_queue_of_a_store_is_a_store_wait():
    watch_torch_calls()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    in_thread(store.queue_pop, "samples")
    (wait,) = waits_when(lambda wait: wait.kind == "store")
    assert (wait.what, wait.on, wait.timeout_s) == ("store.queue_pop", "samples", 300.0)


@pytest.mark.ranks(2, liveness=False)
def test_a_group_that_the_others_do_not_make_names_the_ranks_that_were_asked(rank):
    watch_torch_calls()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.clone().get("seen")
        dist.new_group([0, 1])
        return
    second = store.clone()
    maker = in_thread(dist.new_group, [0, 1], timeout=timedelta(seconds=18))
    (wait,) = waits_when(lambda wait: wait.kind == "rendezvous")
    assert (wait.what, wait.peers, wait.on, wait.timeout_s) == ("new_group", (0, 1), "ranks 0-1", 18.0)
    second.set("seen", "")
    maker.join(LIMIT_S)


class StatelessProcessGroup:
    """Stands for vLLM's, by the file that its methods are in."""

    def __init__(self, store):
        self.rank, self.world_size, self.store = 1, 2, store


@pytest.mark.ranks(1, liveness=False)
@pytest.mark.parametrize(
    ("keys", "text"),
    [(["a", b"b"], "a, b"), (("a",), "a"), ({"a"}, ""), ({"a": 1}.keys(), "")],
    ids=["list", "tuple", "set", "keys of a dict"],
)
def test_whatever_names_keys_for_a_store_does_so_while_it_is_watched(keys, text):
    watch_torch_calls()
    store = dist.HashStore()
    in_thread(store.wait, keys, timedelta(seconds=LIMIT_S))
    (wait,) = waits_when(lambda wait: wait.kind == "store")
    assert (wait.what, wait.on) == ("store.wait", text)
    for key in ("a", "b"):
        store.set(key, "1")


def test_a_key_in_bytes_is_reported_as_its_text():
    assert ledger._keys((b"url",)) == "url"


@pytest.mark.ranks(1, liveness=False)
def test_a_group_that_torch_has_no_table_of_is_named_by_its_store():
    watch_torch_calls()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    source = "def broadcast_obj(self, obj, src):\n    return self.store.get(f'broadcast_from/{src}/0')\n"
    names = {}
    exec(compile(source, "/venv/site-packages/vllm/distributed/utils.py", "exec"), names)
    in_thread(names["broadcast_obj"], StatelessProcessGroup(store), None, 0)
    (wait,) = waits_when(lambda wait: wait.kind == "store")
    assert wait.what == "StatelessProcessGroup.broadcast_obj as rank 1 of 2 with 0"
    assert wait.on == f"127.0.0.1:{store.port}"


@pytest.mark.ranks(1, liveness=False)
@pytest.mark.parametrize(
    ("file", "head", "kind", "what"),
    [
        ("distributed_c10d.py", "destroy_process_group(group=None)", "rendezvous", "destroy_process_group"),
        ("distributed_c10d.py", "_store_based_barrier(timeout=None)", "rendezvous", "store_based_barrier"),
        ("distributed_c10d.py", "split_group(split_ranks=None)", "rendezvous", "split_group"),
        ("rpc/api.py", "rpc_sync(to='ps')", "declared", "rpc_sync to ps"),
        ("rpc/api.py", "shutdown(graceful=True)", "rendezvous", "rpc.shutdown"),
        ("rpc/__init__.py", "init_rpc(name='ps')", "rendezvous", "rpc.init_rpc"),
    ],
)
def test_calls_that_nothing_writes_down_are_read_off_the_stack(file, head, kind, what):
    """By the names of torch's functions and files: a stand-in has both."""
    end = threading.Event()
    names = {"end": end}
    source = f"def {head}:\n    end.wait({LIMIT_S})\n"
    exec(compile(source, f"/venv/site-packages/torch/distributed/{file}", "exec"), names)
    in_thread(names[head.partition("(")[0]])
    (wait,) = waits_when(lambda wait: wait.what == what)
    end.set()
    assert (wait.kind, wait.thread.startswith("Thread")) == (kind, True)


@pytest.mark.ranks(2, liveness=False)
def test_a_functional_collective_is_seen_by_the_recorder(rank):
    from torch.distributed import _functional_collectives as functional

    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.clone().get("seen")
        functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD))
        return
    second = store.clone()
    caller = in_thread(lambda: functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)))
    waits = waits_when(lambda wait: wait.kind == "collective")
    assert {(wait.what, wait.seq) for wait in waits} <= {("allreduce", 1), ("all_reduce", 1)}
    second.set("seen", "")
    caller.join(LIMIT_S)


@pytest.mark.ranks(1, liveness=False)
def test_no_group_is_reported_before_there_is_one_and_foreign_ones_without_a_world(monkeypatch):
    heads = group_snapshots(None)
    assert process_groups.has_groups()
    monkeypatch.setattr(process_groups, "default_group", lambda: None)
    assert [head.is_foreign for head in group_snapshots(None)] == [True] * len(heads)


def sent_and_never_waited_for(rank):
    """Rank 1 has what rank 0 sent it; rank 0 keeps the handle and sleeps outside torch, as one that evaluates does."""
    if rank == 0:
        work = dist.isend(torch.ones(1), dst=1)
        time.sleep(4)
        dist.all_reduce(torch.ones(1))
        work.wait()
    else:
        dist.recv(torch.ones(1), src=0)
        dist.all_reduce(torch.ones(1))


@pytest.mark.nightly
def test_a_delivered_message_that_no_rank_waits_for_makes_no_circle(tmp_path):
    outcome = launch(sent_and_never_waited_for, 2, tmp_path, policy="report")
    assert outcome.exit_codes == [0, 0]
    assert {verdict.kind for verdict in outcome.verdicts} <= {"missing-member", "straggler"}


def two_play_while_the_third_waits(rank):
    if rank == 2:
        dist.all_reduce(torch.ones(1))
        return
    end_s, word = time.monotonic() + 4, torch.ones(1)
    while word.item():
        if rank == 0:
            word.fill_(time.monotonic() < end_s)
            dist.send(word, dst=1)
            dist.recv(torch.ones(1), src=1)
        else:
            dist.recv(word, src=0)
            dist.send(torch.ones(1), dst=0)
    dist.all_reduce(torch.ones(1))


@pytest.mark.nightly
def test_transfers_of_the_others_are_not_taken_for_the_collective_that_one_waits_in(tmp_path):
    outcome = launch(two_play_while_the_third_waits, 3, tmp_path, policy="report")
    assert outcome.exit_codes == [0, 0, 0]
    assert not [each.headline for each in outcome.verdicts if each.kind == "stuck-call"]


def destroys_its_groups(rank):
    part = dist.new_group([0, 1])
    if rank == 0:
        dist.send(torch.ones(1), dst=1, group=part)
    else:
        dist.recv(torch.ones(1), src=0, group=part)
    until(current_monitor()._peers.is_settled)
    dist.barrier()
    destroyed = [weakref.ref(part), weakref.ref(dist.group.WORLD)]
    del part
    dist.destroy_process_group()
    gc.collect()
    assert [each() for each in destroyed] == [None, None]


def test_a_group_that_is_destroyed_is_let_go(tmp_path):
    """Its connections are closed with it, which is how the others learn that this rank has gone."""
    outcome = launch(destroys_its_groups, 2, tmp_path, policy="report", stall_after_s=LIMIT_S)
    assert outcome.exit_codes == [0, 0], outcome.outputs
