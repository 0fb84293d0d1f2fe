"""Two hosts on one machine: the trainer in one network namespace, the engine in another, a cable between them.

    unshare --user --map-root-user --net python weightsync_hosts.py FAULT

Prints one line of JSON: what became of either side, and after how many seconds. All of it goes with the processes.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from offbeat_core import OffbeatError
from offbeat_weightsync import BucketPlan, describe_tensors, new_address, open_sender, receive

CLONE_NEWNET = 0x40000000
TRAINER, ENGINE = "10.77.0.1", "10.77.0.2"
DEADLINE_S = 4.0
CONNECT_S = 30.0
NUM_TENSORS = 24


def ip(command: str) -> None:
    """Configure the network of this namespace."""
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=30)


def make_tensors(value: float) -> dict[str, Tensor]:
    """24 MiB, which no kernel takes at once."""
    return {f"t{index}": torch.full((1 << 18,), value + index) for index in range(NUM_TENSORS)}


def outcome(body: Callable[[], str]) -> dict[str, object]:
    """What it said, or its error, and how long it took."""
    start = time.monotonic()
    try:
        said = body()
    except OffbeatError as error:
        said = f"{type(error).__name__}: {error}"
    return {"said": said, "seconds": time.monotonic() - start}


def be_engine(address: str, deadline_s: float) -> str:
    """Take version 1."""
    held = make_tensors(-1)
    with receive(address, 1, deadline_s) as stream:
        stream.load(held.__getitem__)
        stream.confirm(stream.prove(held.__getitem__))
    return f"holds {sum(float(tensor[-1]) for tensor in held.values()):g}"


def be_trainer(plan: BucketPlan, send: Callable[[Iterator[tuple[str, Tensor]]], object], fault: str) -> str:
    """Send version 1; the cable is cut after the second tensor, if that is the fault."""

    def give() -> Iterator[tuple[str, Tensor]]:
        for index, pair in enumerate(make_tensors(0).items()):
            if fault == "cut" and index == 2:
                ip("link set va down")
            yield pair

    send(give())
    return f"sent {len(plan.specs)}"


def main(fault: str) -> None:
    """Fork the engine's host, lay the cable, and run a sync."""
    ours, theirs = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(theirs[1])  # so that it ends with its parent
        _be_other_host(theirs[0], ours[1])
    os.close(ours[1])
    os.read(ours[0], 1)
    ip("link set lo up")
    ip(f"link add va type veth peer name vb netns {pid}")
    ip(f"addr add {TRAINER}/24 dev va")
    ip("link set va up")
    plan = BucketPlan.build(describe_tensors(make_tensors(0).items()), 4 << 20)
    deadline_s = CONNECT_S if fault == "none" else DEADLINE_S
    with open_sender(new_address(TRAINER), plan, deadline_s=deadline_s) as sender:
        os.write(theirs[1], json.dumps([sender.address, deadline_s]).encode())
        trainer = outcome(lambda: be_trainer(plan, lambda tensors: sender.send(tensors, 1, 1), fault))
    with os.fdopen(ours[0]) as pipe:
        engine = json.loads(pipe.read())
    os.waitpid(pid, 0)
    print(json.dumps({"trainer": trainer, "engine": engine}))


def _be_other_host(orders: int, answers: int) -> None:
    """Never returns."""
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        os.write(answers, b"\n")
        address, deadline_s = json.loads(os.read(orders, 1000))  # nothing, if the parent is gone
        ip(f"addr add {ENGINE}/24 dev vb")
        ip("link set vb up")
        os.write(answers, json.dumps(outcome(lambda: be_engine(address, deadline_s))).encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
