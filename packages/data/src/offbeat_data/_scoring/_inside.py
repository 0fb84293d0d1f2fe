"""Runs inside the sandbox, with the standard library alone: takes its limits on, gives its rights away, and becomes
the program. Called as `python _inside.py SOURCE LIMITS`, the second as JSON.
"""

import json
import os
import resource
import sys


def take_limits(limits: dict[str, int]) -> None:
    """Set what a program may use, for good: the hard limit is the same, and nobody without rights raises it."""
    kinds = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in kinds.items():
        resource.setrlimit(kind, (value, value))


def give_rights_away(uid: int) -> None:
    """Become a user that nobody else is: rights of root end with it, and processes are counted for it alone."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def main() -> None:
    limits = json.loads(sys.argv[2])
    with open(sys.argv[1], encoding="utf-8", errors="surrogateescape") as file:
        source = file.read()
    take_limits(limits)
    if limits["uid"]:
        give_rights_away(limits["uid"])
    sys.path[:] = [entry for entry in sys.path if not entry.startswith("/sandbox")] + limits["packages"]
    sys.argv[:] = ["main.py"]
    space = {"__name__": "__main__", "__builtins__": __builtins__, "__file__": "main.py"}
    exec(compile(source, "main.py", "exec"), space)


if __name__ == "__main__":
    main()
