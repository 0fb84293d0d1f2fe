"""Healthy programs with long pauses, as real processes under the policy that ends runs: each ends by itself."""

import contextlib
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from liveness_launch import Body, Outcome, Programs, launch

PAUSE_S = 4.0


def assert_in_peace(outcome: Outcome) -> None:
    proofs = [each.headline for each in outcome.verdicts if each.is_proof]
    assert (proofs, set(outcome.exit_codes)) == ([], {0}), "\n".join(outcome.outputs)


def use(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1), group=group)


def two_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Of both ranks, and used already."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    use(first)
    use(second)
    return first, second


def two_broadcasts_at_once(rank: int) -> None:
    """A group of the world that stays in use beside one of each half; the halves have roots of their own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank % 2 == 0:
        time.sleep(PAUSE_S)
    work = dist.broadcast(torch.ones(4), 0, async_op=True)
    dist.broadcast(torch.ones(2), src=rank // 2 * 2, group=halves[rank // 2])
    work.wait()
    dist.barrier()


def a_new_thread_takes_a_group_over(rank: int) -> None:
    first, second = two_groups()
    time.sleep(0.5)

    def serve() -> None:
        time.sleep(PAUSE_S)
        use(second)

    if rank == 0:
        server = threading.Thread(target=serve)
        server.start()
        use(first)
        server.join()
    else:
        use(second)
        use(first)
    dist.barrier()


def a_side_group_is_made_again(rank: int) -> None:
    side = dist.new_group()
    use(side)
    dist.destroy_process_group(side)
    if rank == 1:
        time.sleep(PAUSE_S)
    dist.new_group()
    dist.monitored_barrier()


def an_operation_is_posted_before_an_answer_is_awaited(rank: int) -> None:
    """Rank 0 has posted in one group and reads from a socket; rank 1 is in the other group, which comes next there."""
    first, second = two_groups()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=first, async_op=True)
        here, there = socket.socketpair()
        threading.Timer(PAUSE_S, there.send, (b"answer",)).start()
        here.recv(16)
        use(second)
        work.wait()
    else:
        use(second)
        use(first)
    dist.barrier()


def an_operation_is_asked_for_now_and_then(rank: int) -> None:
    first, second = two_groups()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=first, async_op=True)
        end_s = time.monotonic() + PAUSE_S
        while not work.is_completed():
            time.sleep(0.05)
            if time.monotonic() > end_s:
                use(second)
                break
        work.wait()
    else:
        use(second)
        use(first)
    dist.barrier()


def an_operation_is_posted_beside_a_loop(rank: int) -> None:
    side = dist.new_group()
    use(side)
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=side, async_op=True)
        for _ in range(round(PAUSE_S / 0.3)):
            time.sleep(0.3)
            torch.ones(64, 64) @ torch.ones(64, 64)
        dist.send(torch.ones(4), 1)
        work.wait()
    else:
        dist.recv(torch.ones(4), 0)
        use(side)
    dist.barrier()


def a_timeout_of_a_call_is_an_answer(rank: int) -> None:
    side = dist.new_group()
    message = torch.ones(1)
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            dist.monitored_barrier(side, timeout=timedelta(seconds=PAUSE_S), wait_all_ranks=True)
        dist.send(message, 1)
    else:
        dist.recv(message, 0)
    dist.barrier()


def a_wait_is_tried_again(rank: int) -> None:
    first, second = two_groups()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=first, async_op=True)
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(seconds=PAUSE_S))
        use(second)
        work.wait()
    else:
        use(second)
        use(first)
    dist.barrier()


def a_handler_of_a_server_sends(rank: int) -> None:
    weights = dist.new_group()
    use(weights)
    message = torch.ones(4)
    if rank == 0:

        class Sender(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                dist.send(message, 1, group=weights)

        server = socketserver.TCPServer(("127.0.0.1", 0), Sender)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threading.Timer(PAUSE_S, lambda: socket.create_connection(server.server_address)).start()
    else:
        dist.recv(message, 0, group=weights)
    dist.barrier()


def a_thread_trains_while_the_main_thread_joins_it(rank: int) -> None:
    def train() -> None:
        for _ in range(4):
            time.sleep(1.2)
            use(dist.group.WORLD)

    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    thread.join()


HEALTHY = {
    an_operation_is_asked_for_now_and_then: 2,
    an_operation_is_posted_beside_a_loop: 2,
    a_timeout_of_a_call_is_an_answer: 2,
    a_wait_is_tried_again: 2,
    a_handler_of_a_server_sends: 2,
    a_thread_trains_while_the_main_thread_joins_it: 2,
    two_broadcasts_at_once: 4,
    a_new_thread_takes_a_group_over: 2,
    a_side_group_is_made_again: 2,
    an_operation_is_posted_before_an_answer_is_awaited: 2,
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(HEALTHY, tmp_path_factory.mktemp("healthy"), policy="abort")


@pytest.mark.nightly
@pytest.mark.parametrize("body", HEALTHY, ids=lambda body: body.__name__)
def test_a_run_with_a_pause_ends_by_itself(body: Body, healthy: Programs) -> None:
    assert_in_peace(healthy.outcome(body))


def enter_again(path: Path, rank: int, size: int) -> None:
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(path), size), rank=rank, world_size=size)


@pytest.mark.nightly
def test_what_the_recorder_has_of_an_earlier_world_says_nothing_of_this_one(tmp_path: Path) -> None:
    """Ranks 0 and 1 send and receive, which gloo's recorder does not have, and rank 2 waits in a first collective."""

    def body(rank: int) -> None:
        enter_again(tmp_path / "store", rank, 3)
        message = torch.zeros(2)
        for _ in range(round(PAUSE_S / 0.2)):
            if rank == 0:
                dist.send(message, 1)
            elif rank == 1:
                dist.recv(message, 0)
            if rank < 2:
                time.sleep(0.2)
        dist.barrier()

    outcome = launch(body, 3, tmp_path, policy="abort")
    assert_in_peace(outcome)
    assert set(outcome.verdicts[0].missing) <= {"rank 0", "rank 1"}


@pytest.mark.nightly
def test_ranks_that_enter_the_next_world_at_their_own_pace_are_left_in_peace(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        for number in range(2):
            dist.barrier()
            dist.destroy_process_group()
            if rank == number:
                time.sleep(PAUSE_S)
            store = dist.FileStore(str(tmp_path / f"store-{number}"), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    assert_in_peace(launch(body, 2, tmp_path, policy="abort"))


@pytest.mark.nightly
def test_a_rank_that_retries_to_enter_is_not_at_the_end_of_its_timeout(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"

    def body(rank: int) -> None:
        dist.barrier()
        dist.destroy_process_group()
        end_s = time.monotonic() + 10
        while rank == 1 and time.monotonic() < end_s:
            with contextlib.suppress(dist.DistError):  # no other rank is there
                dist.init_process_group("gloo", init_method=address, rank=1, world_size=2, timeout=timedelta(seconds=1))
        time.sleep(max(0.0, end_s + 4 - time.monotonic()))  # no rank is gone before the last try is over

    assert_in_peace(launch(body, 2, tmp_path, policy="abort"))


WITHOUT_DESCRIPTORS = """
import errno, sys, threading, time
import torch.distributed as dist
import offbeat_liveness as liveness
from offbeat_liveness._network import address_book
from offbeat_liveness._process import process_groups

tries = []

def fails(*_):
    tries.append(1)
    raise OSError(errno.EMFILE, "Too many open files")

seen = []
threading.excepthook = seen.append
address_book.Listener = fails
monitor = liveness.watch(stall_after_s=60, directory=sys.argv[1])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
end_s = time.monotonic() + 20
while len(tries) < 3 and time.monotonic() < end_s:
    time.sleep(0.01)
process_groups.group_snapshots = fails
dist.destroy_process_group()
assert monitor._answer({"ask": "pids"}) == {}, "it does not say which"
print(len(tries) >= 3, seen, monitor._error_notes.lines_for("it"), dist.is_initialized())
"""


@pytest.mark.timeout(60)
def test_what_goes_wrong_in_the_monitor_is_said_once_and_is_no_exception_of_the_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "True [] () False\n", done.stderr
    assert done.stderr.count("meeting the others failed: OSError: [Errno 24] Too many open files") == 1
    assert "Traceback" not in done.stderr
