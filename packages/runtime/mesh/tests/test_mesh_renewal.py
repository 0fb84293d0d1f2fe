"""A rank that dies is replaced: those that are left end their calls, leave, and join anew together with another."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from offbeat_mesh import Rendezvous, current_world, interrupt_calls, open_rendezvous

PROMPT_S = 5.0
LONG_S = 50.0  # so that no deadline of a call can be what ended it
SIZE = 4
STUCK = {  # of torch itself, which no bookkeeping of ours breaks off, and of ours
    "torch's all_gather": lambda mesh: dist.all_gather_into_tensor(
        torch.empty(SIZE * 2**16), torch.ones(2**16), group=mesh.group("dp").process_group
    ),
    "a chain": lambda mesh: mesh.group("dp").recv(
        torch.empty(1), (mesh.rank + 1) % SIZE
    ),  # each waits for the next one, which lives
}


def place_of(port, rank):
    deadlines = {"start_deadline_s": LONG_S, "call_deadline_s": LONG_S}
    return Rendezvous(rank=rank, size=SIZE, host="127.0.0.1", port=port, **deadlines)


@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.parametrize("stuck", STUCK.values(), ids=STUCK)
def test_those_that_are_left_join_anew_with_a_new_rank(run_ranks, stuck, dead):
    """Rank 0 too, in which the control server lived. The fifth process takes the place of the one that dies."""

    def body(rank, num_processes, store):
        if rank == SIZE:
            opened = [open_rendezvous("127.0.0.1", SIZE, start_deadline_s=LONG_S)[0] for _ in range(2)]
            store.set("ports", " ".join(str(each.port) for each in opened))
        first_port, second_port = map(int, store.get("ports").split())
        if rank < SIZE:
            mesh = place_of(first_port, rank).join("cpu", name=f"trainer-{rank}", stall_after_s=LONG_S)
            mesh.group("dp").all_reduce(torch.ones(2))
            if rank == dead:
                store.set("died_at", str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=lambda: (store.clone().get("died_at"), time.sleep(0.5), interrupt_calls())).start()
            with pytest.raises(Exception, match=r".") as error:
                stuck(mesh)
            assert not isinstance(error.value, AssertionError)
            current_world().abandon()
            assert current_world() is None
        else:
            rank = dead
            store.get("died_at")
        mesh = place_of(second_port, rank).join("cpu", name=f"trainer-{rank}", stall_after_s=LONG_S)
        with current_world():
            total = mesh.group("dp").all_reduce(torch.tensor([float(rank + 1)]))
            dist.all_reduce(total, group=mesh.group("dp").process_group)
            return [float(total), time.monotonic() - float(store.get("died_at"))]

    ended = run_ranks(SIZE + 1, body)
    for rank, one in enumerate(ended):
        if rank == dead:
            assert one.signal == signal.SIGKILL
            continue
        assert not one.error, one.text
        total, after_s = one.value
        assert total == SIZE * SIZE * (SIZE + 1) / 2
        assert after_s < PROMPT_S
