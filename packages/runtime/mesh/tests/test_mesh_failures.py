"""A rank that fails, dies, stops, leaves or does not come: the others raise, and the error names it."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from offbeat_core import DeadlineError, PeerFailedError
from offbeat_mesh import Mesh, _control, join_world
from offbeat_mesh._control import ControlClient, ControlServer
from offbeat_mesh._control_messages import Ask, Hello, Inbox, Left, Record, pack

PROMPT_S = 5.0  # the promise: errors of one member are raised on all members within 5 s
LONG_S = 50.0  # so that no deadline of a call can be what ended it

CALLS = {
    "all_reduce": lambda g: g.all_reduce(torch.ones(2)),
    "broadcast": lambda g: g.broadcast(torch.ones(2), source=1),
    "gather_data": lambda g: g.gather_data(g.rank),
    "recv": lambda g: g.recv(torch.ones(2), 1) if g.rank != 1 else None,
    "recv_data": lambda g: g.recv_data(1) if g.rank != 1 else None,
    "barrier": lambda g: g.barrier(),
}

SHORTEST = ((2, "all_reduce"), (4, "recv"), (4, "gather_data"))


def survive(group, call, store):
    """Make a call that cannot end well: what it raised, and how long after the failure."""
    with pytest.raises((PeerFailedError, DeadlineError)) as first:
        call(group)
    after_s = time.monotonic() - float(store.get("failed_at"))
    with pytest.raises(first.type) as again:
        group.barrier()
    assert str(again.value) == str(first.value)
    return [first.type.__name__, str(first.value), after_s]


def fail_at(store):
    store.set("failed_at", str(time.monotonic()))


def wait_stopped(pid):
    """Wait until a process has come to its SIGSTOP."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


def check_survivors(ended, failed, name, text):
    for rank, one in enumerate(ended):
        if rank == failed:
            continue
        assert not one.error, one.text
        kind, said, after_s = one.value
        assert kind == name
        assert text in said, said
        assert after_s < PROMPT_S


@pytest.mark.parametrize(
    ("size", "call"),
    [
        pytest.param(size, call, marks=[] if (size, call) in SHORTEST else pytest.mark.nightly)
        for size in (2, 4)
        for call in CALLS
    ],
)
def test_a_killed_member_is_named_by_all_survivors(run_group, call, size):
    def body(rank, group, store):
        group.all_reduce(torch.ones(2))
        if rank == 1:
            time.sleep(0.3)  # the others wait by then
            fail_at(store)
            os.kill(os.getpid(), signal.SIGKILL)
        return survive(group, CALLS[call], store)

    ended = run_group(size, body)
    assert ended[1].signal == signal.SIGKILL
    check_survivors(ended, 1, "PeerFailedError", "rank 1 (dp 1) failed: its process ended without a word")


@pytest.mark.nightly
def test_a_killed_member_is_named_though_rank_0_which_relays_it_stands_still(run_ranks):
    def body(rank, num_ranks, store):
        store.set(f"pid{rank}", str(os.getpid()))
        with join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=LONG_S):
            group = Mesh(dp=num_ranks).group("dp")
            group.all_reduce(torch.ones(2))
            if rank == 1:
                time.sleep(0.3)  # the others wait by then
                server = int(store.get("pid0"))
                fail_at(store)
                os.kill(server, signal.SIGSTOP)
                subprocess.Popen(["sh", "-c", f"sleep 2.6; kill -CONT {server}"])
                os.kill(os.getpid(), signal.SIGKILL)
            return survive(group, CALLS["all_reduce"], store)

    check_survivors(run_ranks(4, body), 1, "PeerFailedError", "rank 1 (dp 1) failed: its process ended without a word")


def test_rank_0_killed_takes_the_control_server_with_it_and_is_named_all_the_same(run_group):
    def body(rank, group, store):
        group.barrier()
        if rank == 0:
            fail_at(store)
            os.kill(os.getpid(), signal.SIGKILL)
        return survive(group, CALLS["all_reduce"], store)

    check_survivors(run_group(4, body), 0, "PeerFailedError", "rank 0 (dp 0) failed: its process ended without a word")


def test_an_error_inside_a_call_is_raised_on_all_members(run_group):
    def body(rank, group, store):
        group.barrier()
        if rank == 2:
            fail_at(store)
            with pytest.raises(Exception, match="cannot travel"):
                group.all_gather_data({1, 2})
            return None
        return survive(group, lambda g: g.all_gather_data(1), store)

    ended = run_group(4, body)
    assert not ended[2].error
    check_survivors(ended, 2, "PeerFailedError", "rank 2 (dp 2) in all_gather_data of dp of ranks 0, 1, 2, 3 failed:")
    assert "the value to gather is a set" in ended[0].value[1]


@pytest.mark.parametrize("others_are", ["in a call", "at the end", "late"])
def test_an_error_while_working_together_is_raised_on_all_members(run_group, others_are):
    def body(rank, group, store):

        def work():
            with group.together("load the shards"):
                if rank == 1:
                    time.sleep(0.2)
                    fail_at(store)
                    raise FileNotFoundError("shard 7")
                if others_are == "in a call":
                    group.barrier()
                elif others_are == "late":
                    time.sleep(0.6)

        if rank == 1:
            with pytest.raises(FileNotFoundError):
                work()
            return None
        return survive(group, lambda _: work(), store)

    text = "rank 1 (dp 1) in load the shards of dp of ranks 0, 1, 2 failed: FileNotFoundError: shard 7"
    check_survivors(run_group(3, body), 1, "PeerFailedError", text)


def test_working_together_ends_together(run_group):
    def body(rank, group, store):
        with group.together("work"):
            if rank == 1:
                time.sleep(0.3)
                store.set("done", "1")
        return store.check(["done"])

    assert [one.value for one in run_group(2, body)] == [True, True]


def test_the_first_failure_is_named_through_other_groups(run_ranks):
    # Rank 3 fails in its tp group with rank 2, which leaves with that; ranks 0 and 1 wait for them in dp groups.
    def body(rank, num_ranks, store):
        with join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=LONG_S):
            mesh = Mesh(dp=2, tp=2)
            tp, dp = mesh.group("tp"), mesh.group("dp")
            if rank == 3:
                fail_at(store)
                with tp.together("load"):
                    raise ValueError("bad shard")
            if rank == 2:
                tp.barrier()
            return survive(dp, CALLS["all_reduce"], store)

    ended = run_ranks(4, body)
    assert (ended[3].error, ended[2].error) == ("ValueError", "PeerFailedError")
    for rank in (0, 1):
        assert not ended[rank].error, ended[rank].text
        kind, text, after_s = ended[rank].value
        assert kind == "PeerFailedError"
        assert "rank 3" in text
        assert "ValueError: bad shard" in text
        assert after_s < PROMPT_S


@pytest.mark.parametrize("how", ["world left", "function returns", "sys.exit", "uncaught error"])
def test_a_member_that_ends_early_is_named(run_ranks, how):
    def body(rank, num_ranks, store):
        world = join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=LONG_S)
        group = Mesh(dp=num_ranks).group("dp")
        group.barrier()
        if rank == 1:
            fail_at(store)
            if how == "world left":
                with pytest.raises(ValueError, match="enough"), world:
                    raise ValueError("enough")
                return None
            if how == "uncaught error":  # what the interpreter does before it runs the exit handlers
                import sys

                sys.last_value = RuntimeError("boom")
            if how != "function returns":
                import atexit

                atexit._run_exitfuncs()
            os._exit(0)
        said = survive(group, CALLS["all_reduce"], store)
        world.leave()
        return said

    texts = {
        "world left": "ValueError: enough",
        "function returns": "its process ended without a word",
        "sys.exit": "it has left the world",
        "uncaught error": "RuntimeError: boom",
    }
    check_survivors(run_ranks(2, body), 1, "PeerFailedError", f"rank 1 (dp 1) failed: {texts[how]}")


@pytest.mark.parametrize(
    "call",
    [
        "all_reduce",
        pytest.param("recv", marks=pytest.mark.nightly),
        pytest.param("gather_data", marks=pytest.mark.nightly),
    ],
)
def test_a_deadline_names_who_did_not_come_and_all_raise_it(run_ranks, call):
    def body(rank, num_ranks, store):
        with join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=LONG_S):
            group = Mesh(dp=num_ranks, deadline_s=1.5).group("dp")
            group.all_reduce(torch.ones(1))
            fail_at(store)
            if rank == 1:
                time.sleep(2.5)
                fail_at(store)  # from here on for this rank; the others have raised
                return survive(group, CALLS["all_reduce"], store)
            return survive(group, CALLS[call], store)

    ended = run_ranks(3, body)
    check_survivors(ended, None, "DeadlineError", "rank 1 (dp 1) (last seen in all_reduce)")
    assert f"{call} " in ended[0].value[1]
    assert "waited 1.5 s for rank 1" in ended[0].value[1]
    assert "rank 0" not in ended[2].value[1].replace("ranks 0", "")


def test_a_deadline_names_the_rank_that_does_not_answer(run_ranks):
    def body(rank, num_ranks, store):
        join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=LONG_S)
        group = Mesh(dp=num_ranks).group("dp")
        group.barrier()
        fail_at(store)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        wait_stopped(int(store.get("pid1")))
        if rank == 2:  # the only one that knows the stopped process lets it continue in the end
            store.get("said")
            return ["DeadlineError", "(does not answer: stopped", 0.0]
        said = survive(group, lambda g: g.all_reduce(torch.ones(1), deadline_s=1.0), store)
        store.set("said", "1")
        return said

    def body_and_wake(rank, num_ranks, store):
        store.set(f"pid{rank}", str(os.getpid()))
        try:
            return body(rank, num_ranks, store)
        finally:
            if rank == 2:
                os.kill(int(store.get("pid1")), signal.SIGCONT)

    check_survivors(run_ranks(3, body_and_wake), 1, "DeadlineError", "(does not answer: stopped")


def test_a_failure_elsewhere_does_not_end_a_group_without_that_member(run_ranks):
    def body(rank, num_ranks, store):
        world = join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=LONG_S)
        tp = Mesh(dp=2, tp=2).group("tp")
        tp.barrier()
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank < 2:
            world.client.wait_until(lambda: bool(world.client.records), LONG_S)
            answer = [int(tp.all_reduce(torch.ones(1))) for _ in range(20)]
            world.leave()
            return answer
        fail_at(store)
        return survive(tp, CALLS["barrier"], store)[0]

    ended = run_ranks(4, body)
    assert ended[0].value == ended[1].value == [2] * 20
    assert ended[2].value == "PeerFailedError"


def test_a_worker_forked_by_a_dead_rank_does_not_hide_its_death(run_group):
    def body(rank, group, store):
        group.barrier()
        if rank == 1:
            worker = os.fork()  # as a data loader does; it holds copies of all of its parent's sockets
            if worker == 0:
                time.sleep(4 * PROMPT_S)
                os._exit(0)
            store.set("worker", str(worker))
            fail_at(store)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return survive(group, CALLS["all_reduce"], store)
        finally:
            os.kill(int(store.get("worker")), signal.SIGKILL)

    check_survivors(run_group(2, body), 1, "PeerFailedError", "rank 1 (dp 1) failed: its process ended without a word")


def test_ranks_leave_in_any_order_without_harm(run_group):
    def body(rank, group, store):
        if rank != 0:
            time.sleep(0.8)  # the source is done, and about to leave, before the others come
        return group.broadcast(torch.full((1000,), float(rank + 5)), source=0)[0].item()

    assert [one.value for one in run_group(3, body)] == [5.0] * 3


def test_a_second_thread_is_refused_and_a_channel_is_its_way(run_ranks):
    def body(rank, num_ranks, store):
        with join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=LONG_S):
            mesh = Mesh(dp=num_ranks)
            group, channel = mesh.group("dp"), mesh.group("dp", channel="data")
            assert mesh.group("dp", channel="data") is channel is not group
            totals = []

            def use(which, count):
                totals.extend(int(which.all_reduce(torch.ones(1))) for _ in range(count))

            other = threading.Thread(target=use, args=(channel, 50))
            other.start()
            use(group, 50)
            other.join()
            assert totals == [num_ranks] * 100
            use(channel, 1)  # its thread has ended, so the channel is free for this one
            refused = []

            def trespass():
                try:
                    use(group, 1)
                except Exception as error:  # noqa: BLE001 - shown to the test
                    refused.append([type(error).__name__, str(error)])

            second = threading.Thread(target=trespass, name="trespasser")
            second.start()
            second.join()
            return refused[0]

    for one in run_ranks(2, body):
        assert not one.error, one.text
        kind, text = one.value
        assert kind in ("GroupError", "PeerFailedError")  # whichever gets the other's refusal first
        assert "was called from the thread 'trespasser', but the group belongs to 'MainThread'" in text


def test_a_call_inside_a_call_is_refused(run_group):
    def body(rank, group, store):
        with pytest.raises(PeerFailedError) as caught:
            group.decide(lambda: group.all_gather_data(1))
        return str(caught.value)

    for one in run_group(2, body):
        assert "all_gather_data over dp of ranks 0, 1 was called inside decide of the same group" in one.value


def test_unchecked_shapes_that_differ_end_a_process_and_the_others_name_it(run_ranks):
    # What gloo does is not ours to change; what the other members say is.
    def body(rank, num_ranks, store):
        with join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=LONG_S):
            group = Mesh(dp=num_ranks, check=False).group("dp")
            group.barrier()
            with pytest.raises(PeerFailedError) as caught:
                group.all_reduce(torch.ones(4 if rank == 0 else 9))
            return caught.value.peer

    ended = run_ranks(3, body)
    dead = [rank for rank, one in enumerate(ended) if one.signal == signal.SIGABRT]
    assert dead
    for one in ended:
        assert one.signal == signal.SIGABRT or one.value in [f"rank {rank} (dp {rank})" for rank in dead], one


@pytest.mark.parametrize("text", ["no file /data/\udce9.bin", "x" * (2 << 20)], ids=["odd", "long"])
def test_an_error_with_any_text_is_received(run_ranks, text):
    """A file name that is no UTF-8 has lone surrogates; one line may hold a whole dictionary."""

    def body(rank, num_ranks, store):
        with join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=LONG_S) as world:
            group = Mesh(dp=num_ranks).group("dp")
            began = time.monotonic()
            try:
                with group.together("load"):
                    if rank == 1:
                        int(text)
            except (ValueError, PeerFailedError) as error:
                world.leave(error)
                return [str(error)[:200], time.monotonic() - began]

    said, after_s = run_ranks(2, body)[0].value
    assert "rank 1" in said
    assert "ValueError" in said
    assert after_s < PROMPT_S


def test_the_control_server_outlives_a_lack_of_descriptors():
    server, unknown = ControlServer("127.0.0.1", "token", 1), socket.socket()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (unknown.fileno() + 1, hard))
        unknown.connect(server.address)
        time.sleep(0.3)  # for the control server to try, and fail
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        ControlClient(0, server.address, "token", 5.0).close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        unknown.close()
        server.close()


@pytest.mark.parametrize(
    "frames",
    [
        [Record(kind="failed", rank=0, reason="made up")],
        [Left(0)],
        [Hello(1, "another token"), Record(kind="failed", rank=0, reason="made up")],
    ],
    ids=["a failure", "an exit notice", "a failure after a hello with a wrong token"],
)
def test_an_unknown_client_is_disconnected_and_ends_no_rank(frames):
    server = ControlServer("127.0.0.1", "token", 1)
    client = ControlClient(0, server.address, "token", LONG_S)
    try:
        with socket.create_connection(server.address, timeout=PROMPT_S) as unknown:
            unknown.sendall(b"".join(map(pack, frames)))
            with contextlib.suppress(ConnectionResetError):  # closed before it had read everything
                assert unknown.recv(1) == b""
        client.ask("", [0])  # answered after whatever the server has relayed
        assert client.records == []
    finally:
        client.close()
        server.close()


def test_a_client_with_a_wrong_token_does_not_take_the_place_of_a_rank():
    server = ControlServer("127.0.0.1", "token", 1)
    try:
        with pytest.raises(PeerFailedError, match="it closed the connection"):
            ControlClient(0, server.address, "another token", PROMPT_S)
        ControlClient(0, server.address, "token", PROMPT_S).close()
    finally:
        server.close()


def test_no_rank_is_welcomed_before_all_have_come():
    """A rank that is done before another has connected ends its process, and rank 0's ends the control server."""
    server = ControlServer("127.0.0.1", "token", 2)
    try:
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(ControlClient, 0, server.address, "token", LONG_S)
            with pytest.raises(TimeoutError):
                first.result(timeout=0.5)
            second = ControlClient(1, server.address, "token", PROMPT_S)
            first.result(timeout=PROMPT_S).close()
            second.close()
    finally:
        server.close()


def test_a_rank_that_does_not_connect_is_named():
    server = ControlServer("127.0.0.1", "token", 3)
    try:
        with pytest.raises(DeadlineError, match=r"join_world: waited 0.5 s for rank 0, 2 to connect to rank 0"):
            ControlClient(1, server.address, "token", 0.5)
    finally:
        server.close()


def test_a_rank_that_has_waited_in_vain_is_not_taken_for_dead_by_those_that_still_wait():
    server = ControlServer("127.0.0.1", "token", 3)
    try:
        with ThreadPoolExecutor(1) as threads:
            patient = threads.submit(ControlClient, 0, server.address, "token", LONG_S)
            time.sleep(0.2)
            for_rank_2 = r"waited 0.5 s for rank 2 to connect to rank 0"
            with pytest.raises(DeadlineError, match=for_rank_2):
                ControlClient(1, server.address, "token", 0.5)
            with pytest.raises(DeadlineError, match=for_rank_2):
                patient.result(timeout=PROMPT_S)
    finally:
        server.close()


def test_a_rank_that_dies_before_all_have_come_is_named():
    server = ControlServer("127.0.0.1", "token", 3)
    try:
        with socket.create_connection(server.address, timeout=PROMPT_S) as dying, ThreadPoolExecutor(1) as threads:
            dying.sendall(pack(Hello(2, "token")))
            first = threads.submit(ControlClient, 0, server.address, "token", LONG_S)
            time.sleep(0.2)
            dying.close()
            with pytest.raises(PeerFailedError, match="rank 2 failed: its process ended without a word"):
                first.result(timeout=PROMPT_S)
        with pytest.raises(PeerFailedError, match="rank 2 failed"):  # one that comes later gets it too
            ControlClient(1, server.address, "token", LONG_S)
    finally:
        server.close()


@pytest.mark.parametrize(("kept_bytes", "loses"), [(16 << 20, False), (1 << 20, True)])
def test_a_stopped_rank_reads_whole_messages_when_it_continues(kept_bytes, loses, monkeypatch):
    """More is sent to it than the sockets' buffers hold."""
    monkeypatch.setattr(_control, "MAX_UNSENT_BYTES", kept_bytes)
    server = ControlServer("127.0.0.1", "token", 2)
    *early, last = (Ask(0, number, "g" * 1000, (1,)) for number in range(12_001))
    inbox, arrived = Inbox(), []
    try:
        with contextlib.ExitStack() as opened:
            sender, stopped = (opened.enter_context(socket.create_connection(server.address)) for _ in range(2))
            for rank, each in enumerate((sender, stopped)):
                each.settimeout(PROMPT_S)
                each.sendall(pack(Hello(rank, "token")))
            sender.sendall(b"".join(map(pack, early)))
            stopped.settimeout(1.0)
            with contextlib.suppress(TimeoutError):
                while len(arrived) < len(early):
                    arrived += inbox.feed(stopped.recv(1 << 20))
            sender.sendall(pack(last))
            while last not in arrived[-1:]:
                arrived += inbox.feed(stopped.recv(1 << 20))
    finally:
        server.close()
    numbers = [each.number for each in arrived if isinstance(each, Ask)]
    assert numbers == sorted(numbers)
    assert (len(numbers) < 12_001) == loses


def test_a_missing_control_server_is_reported_at_once():
    server = ControlServer("127.0.0.1", "token", 2)
    server.close()
    with pytest.raises(PeerFailedError, match=r"rank 0 failed: its control server at .* cannot be reached"):
        ControlClient(1, server.address, "token", LONG_S)


class RecordingGroup:
    """A group that keeps what it receives."""

    key = "a group"

    def __init__(self):
        self.records = []

    def receive(self, record):
        self.records.append(record)

    def standing(self):
        return 0, "", False


def test_a_failure_reaches_a_group_that_is_made_later():
    server, failed = ControlServer("127.0.0.1", "token", 2), Record(kind="failed", rank=0, reason="no more")
    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(ControlClient, rank, server.address, "token", LONG_S) for rank in range(2)]
        first, other = (each.result() for each in joining)
    try:
        first.post(failed)
        other.wait_until(lambda: bool(other.records), PROMPT_S)
        other.listen(group := RecordingGroup())
        assert (other.records, group.records) == ([failed], [failed])
    finally:
        other.close()
        first.close()
        server.close()
