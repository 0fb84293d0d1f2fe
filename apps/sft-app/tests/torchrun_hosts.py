"""Two hosts on one machine, on each of which torchrun starts a command: network namespaces with a cable between them.

    unshare --user --map-root-user --net --mount python torchrun_hosts.py FOLDER WORD...

As on Debian, the head itself takes its name for 127.0.1.1. The words follow `python -m`. Prints one line of JSON: the
exit codes of torchrun on both hosts.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
HEAD, OTHER = "10.79.0.1", "10.79.0.2"
DEADLINE_S = 300


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def connect(folder: Path, card: str, address: str, head: str) -> None:
    """Bring up the network of this host, where the name "head" stands for an address of its own."""
    for line in ("link set lo up", f"addr add {address}/24 dev {card}", f"link set {card} up"):
        run("ip", *line.split())
    hosts = folder / f"hosts-{card}"
    hosts.write_text(f"127.0.0.1 localhost\n{head} head\n")
    run("mount", "--bind", str(hosts), "/etc/hosts")
    os.environ["GLOO_SOCKET_IFNAME"] = card


def start_torchrun(folder: Path, number: int, words: list[str]) -> int:
    """Run torchrun with one of the CPUs, so that neither host has room for both ranks; return its exit code."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[number % len(cpus)]})
    line = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1"),
        *("--master-addr=head", "--master-port=29600", "-m", *words),
    ]
    with (folder / f"host-{number}.log").open("wb") as log:
        return subprocess.run(line, stdout=log, stderr=log, timeout=DEADLINE_S, check=False).returncode


def main(folder: Path, words: list[str]) -> None:
    """Fork the other host, lay the cable, and be the head."""
    answers, orders = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(orders[1])  # so that it ends with its parent
        _be_other_host(folder, words, orders[0], answers[1])
    os.close(answers[1])
    os.read(answers[0], 1)
    run("ip", *f"link add va type veth peer name vb netns {pid}".split())
    connect(folder, "va", HEAD, "127.0.1.1")
    os.write(orders[1], b"\n")
    codes = [start_torchrun(folder, 0, words)]
    with os.fdopen(answers[0]) as pipe:
        codes.append(int(pipe.read()))
    os.waitpid(pid, 0)
    print(json.dumps(codes))


def _be_other_host(folder: Path, words: list[str], orders: int, answers: int) -> None:
    """Never returns."""
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET | CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        os.write(answers, b"\n")
        if os.read(orders, 1):  # nothing, if the parent is gone
            connect(folder, "vb", OTHER, HEAD)
            os.write(answers, str(start_torchrun(folder, 1, words)).encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
