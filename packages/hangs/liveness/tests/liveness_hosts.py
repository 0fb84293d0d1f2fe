"""Two processes on two hosts: namespaces of networks and of processes, a cable, a name and a pid in common.

    unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc python liveness_hosts.py FOLDER CASE

A driver and a role that it calls; or two ranks, that have a store in common, or the name of a head which that head
itself takes for 127.0.1.1, as on Debian. Each has a dump folder of its own. Prints one line of JSON: what either says
about which process waits for which.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import offbeat_liveness as liveness

HERE, THERE = "10.76.0.1", "10.76.0.2"
STALL_AFTER_S = 1.0
PATIENCE_S = 30.0


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=30)


def watch(name: str, folder: Path) -> liveness.Monitor:
    return liveness.watch(stall_after_s=STALL_AFTER_S, directory=folder / name, name=name)


def listening() -> list[str]:
    """Addresses at which anything on this host listens.

    Source: proc_pid_net(5), tcp: the second field is the address in hexadecimal, the fourth 0A of a listening socket.
    """
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {bytes.fromhex(line[1].partition(":")[0]) for line in lines if line[3] == "0A"}
    return sorted(".".join(map(str, address[::-1])) for address in found)


def wait_for(monitor: liveness.Monitor, what: str, on: str) -> dict[str, object]:
    with liveness.waiting(what, on=on):
        return notify(monitor)


def notify(monitor: liveness.Monitor) -> dict[str, object]:
    """The first fatal verdict (under load a straggler may come first), and what there is to know of this process."""
    end_s = time.monotonic() + PATIENCE_S
    while ((verdict := monitor.verdict) is None or not verdict.may_end) and time.monotonic() < end_s:
        time.sleep(0.05)
    return {
        "pid": os.getpid(),
        "kind": verdict.kind if verdict else "",
        "headline": verdict.headline if verdict else "",
        "parties": sorted({party.name for party in verdict.parties}) if verdict else [],  # of some, two threads
        "torch": "torch" in sys.modules,
        "listening": listening(),
    }


def be_driver(there: "Orders", folder: Path) -> dict[str, object]:
    monitor = watch("driver", folder)
    there.give(monitor.invite(HERE))
    there.receive()  # it waits
    return wait_for(monitor, "rollout-0.generate", "rollout-0")


def be_role(driver: "Orders", folder: Path) -> dict[str, object]:
    os.environ |= driver.receive()
    monitor = watch("rollout-0", folder)
    driver.give("ready")
    return wait_for(monitor, "prompts.get", "driver")


def be_first_rank(there: "Orders", folder: Path) -> dict[str, object]:
    from offbeat_mesh import open_store

    store = open_store(HERE)
    there.give(store.port)
    return be_rank(0, "va", folder, is_waiting=True, store=store)


def be_second_rank(here: "Orders", folder: Path) -> dict[str, object]:
    from torch.distributed import TCPStore

    return be_rank(1, "vb", folder, is_waiting=False, store=TCPStore(HERE, here.receive(), is_master=False))


def be_head(there: "Orders", folder: Path) -> dict[str, object]:
    name_head(folder, "127.0.1.1")
    return be_rank(0, "va", folder, is_waiting=False)


def be_far_from_head(head: "Orders", folder: Path) -> dict[str, object]:
    name_head(folder, HERE)
    return be_rank(1, "vb", folder, is_waiting=True)


def name_head(folder: Path, address: str) -> None:
    hosts = folder / f"hosts-{address}"
    hosts.write_text(f"127.0.0.1 localhost\n{address} head\n")
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True, capture_output=True, timeout=30)
    os.environ |= {"MASTER_ADDR": "head", "MASTER_PORT": "29600"}


def be_rank(rank: int, card: str, folder: Path, *, is_waiting: bool, store: Any = None) -> dict[str, object]:
    """Enter the world, through the store alone where there is one."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = card
    monitor = watch("", folder / str(rank))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if is_waiting:
        threading.Thread(target=dist.all_reduce, args=(torch.ones(1),), daemon=True).start()
    return notify(monitor)


class Orders:
    """Messages between two hosts before there is a network: lines of JSON."""

    def __init__(self, reader: IO[str], writer: IO[str]) -> None:
        self._reader, self._writer = reader, writer

    def give(self, value: object) -> None:
        print(json.dumps(value), file=self._writer, flush=True)

    def receive(self) -> Any:
        return json.loads(self._reader.readline())


def connect(card: str, address: str) -> None:
    ip("link set lo up")
    ip(f"addr add {address}/24 dev {card}")
    ip(f"link set {card} up")


def be_here(folder: Path, case: str) -> None:
    """Start the other host, lay the cable, and print what is said on both."""
    host = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with subprocess.Popen(
        [*host, sys.executable, __file__, folder, case, "there"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as there:
        assert there.stdin
        assert there.stdout
        orders = Orders(there.stdout, there.stdin)
        orders.receive()  # it has a network now
        ip(f"link add va type veth peer name vb netns {there.pid}")
        connect("va", HERE)
        orders.give("connected")
        said = {"driver": be_driver, "rank": be_first_rank, "head": be_head}[case](orders, folder)
        print(json.dumps([said, orders.receive()]), flush=True)
        there.stdin.close()  # neither leaves before the other has spoken
    os._exit(0)  # the collective never ends


def be_there(folder: Path, case: str) -> None:
    orders = Orders(sys.stdin, sys.stdout)
    orders.give("started")
    orders.receive()
    connect("vb", THERE)
    orders.give({"driver": be_role, "rank": be_second_rank, "head": be_far_from_head}[case](orders, folder))
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    (be_there if "there" in sys.argv else be_here)(Path(sys.argv[1]), sys.argv[2])
