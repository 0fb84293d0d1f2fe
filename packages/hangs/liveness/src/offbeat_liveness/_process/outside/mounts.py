"""Type of the file system of a path, by the names of the mounts: no file system is asked."""

import re

from offbeat_liveness._process.outside.kernel_calls import read_proc


def file_system(path: str) -> str:
    """Return the type of the file system of a path, by the names of the mounts; "" if unknown."""
    best, kind = -1, ""
    for _, place, found in mounts():
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= best:  # a later mount on the same place hides the earlier one
            best, kind = len(place), found
    return kind


def mounts() -> list[tuple[str, str, str]]:
    """Number, place and type of each mount.

    Source: proc_pid_mountinfo(5): "36 35 98:0 /root /place rw,noatime [optional fields] - type source options".
    """
    found = []
    for line in read_proc("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        found.append((fields[0], place, after.split(" ")[0]))
    return found
