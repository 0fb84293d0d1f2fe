"""Runs inside the sandbox, with as little of the standard library as will do: takes its limits on, gives its rights
away, and becomes the program. Called as `python inside.py SOURCE NAME=NUMBER … -- PACKAGES`.
"""

import os
import resource
import sys


def take_limits(limits: dict[str, int]) -> None:
    """Set what a program may use, for good: the hard limit is the same, and no process without rights raises it.

    Bubblewrap's own process in the sandbox gets the same: a program of the same user can write to its memory.
    """
    kinds = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    bounded = [0, 1] if limits["meter"] >= 0 and os.getppid() == 1 else [0]
    for kind, value in kinds.items():
        for process in bounded:
            resource.prlimit(process, kind, (value, value))


def give_rights_away(uid: int) -> None:
    """Become a user that no other process has: rights of root end with it, and processes are counted for it alone."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def hand_out_measures(meter: int) -> None:
    """Send this sandbox's /proc and /tmp to the process that measures them."""
    import _socket  # socket itself takes as long to load as a short program runs

    folders = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in ("/proc", "/tmp")]
    words = b"".join(each.to_bytes(4, sys.byteorder) for each in folders)
    with_folders = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, words)]
    ours = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM, fileno=meter)
    ours.sendmsg([b"."], with_folders)
    ours.close()
    for each in folders:
        os.close(each)


def main() -> None:
    at = sys.argv.index("--")
    limits = {name: int(number) for name, _, number in (word.partition("=") for word in sys.argv[2:at])}
    packages = sys.argv[at + 1 :]
    with open(sys.argv[1], encoding="utf-8", errors="surrogateescape") as file:
        source = file.read()
    if limits["meter"] >= 0:
        hand_out_measures(limits["meter"])
    take_limits(limits)
    if limits["uid"]:
        give_rights_away(limits["uid"])
    sys.path[:] = [entry for entry in sys.path if not entry.startswith("/sandbox")] + packages
    sys.argv[:] = ["main.py"]
    space = {"__name__": "__main__", "__builtins__": __builtins__, "__file__": "main.py"}
    exec(compile(source, "main.py", "exec"), space)


if __name__ == "__main__":
    main()
