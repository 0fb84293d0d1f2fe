"""Two ranks on two hosts: two network namespaces, a cable, and an own idea in each of where "head" is.

    unshare --user --map-root-user --net --mount python mesh_hosts.py FOLDER

As on Debian, the head itself takes its name for 127.0.1.1. Prints one line of JSON: what each rank said.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from offbeat_core import OffbeatError
from offbeat_mesh import Mesh, join_world

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
HEAD, OTHER = "10.78.0.1", "10.78.0.2"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def ip(command: str) -> None:
    run("ip", *command.split())


def name_head(folder: Path, address: str) -> None:
    hosts = folder / f"hosts-{address}"
    hosts.write_text(f"127.0.0.1 localhost\n{address} head\n")
    run("mount", "--bind", str(hosts), "/etc/hosts")


def be_rank(rank: int, card: str) -> str:
    """Join as torchrun would have it, and exchange something by either way of talking."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29600"}
    os.environ["GLOO_SOCKET_IFNAME"] = card
    try:
        with join_world(device="cpu", deadline_s=30.0) as world:
            group = Mesh(dp=2).group("dp")
            group.check_equal("the plan", what="plan")
            return f"{world.host} of {int(group.all_reduce(torch.ones(1)))}"
    except OffbeatError as error:
        return f"{type(error).__name__}: {error}"


def main(folder: Path) -> None:
    """Fork the other host, lay the cable, and be rank 0."""
    ours, theirs = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(theirs[1])  # so that it ends with its parent
        _be_other_host(folder, theirs[0], ours[1])
    os.close(ours[1])
    os.read(ours[0], 1)
    ip("link set lo up")
    ip(f"link add va type veth peer name vb netns {pid}")
    ip(f"addr add {HEAD}/24 dev va")
    ip("link set va up")
    name_head(folder, "127.0.1.1")
    os.write(theirs[1], b"\n")
    said = [be_rank(0, "va")]
    with os.fdopen(ours[0]) as pipe:
        said.append(pipe.read().strip())
    os.waitpid(pid, 0)
    print(json.dumps(said))


def _be_other_host(folder: Path, orders: int, answers: int) -> None:
    """Never returns."""
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET | CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        os.write(answers, b"\n")
        if os.read(orders, 1):  # nothing, if the parent is gone
            ip("link set lo up")
            ip(f"addr add {OTHER}/24 dev vb")
            ip("link set vb up")
            name_head(folder, HEAD)
            os.write(answers, be_rank(1, "vb").encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
