"""What the process of a role is started with, whoever starts it."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from offbeat_actors._frames import Bytes, FrameWriter, Start
from offbeat_actors._liveness import invite
from offbeat_actors._specs import RoleSpec
from offbeat_types import RunFolderError

_THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def child_command(fd: int, guardian_fd: int, name: str) -> list[str]:
    """Command line of the process of a role.

    Args:
        fd: socket that it inherits and talks over.
        guardian_fd: its end of the pipe of its guardian, inherited.
        name: of the role.
    """
    return [sys.executable, "-P", "-m", "offbeat_actors._child", str(fd), str(guardian_fd), name]


def own_environment(spec: RoleSpec, run_name: str, driver_address: str) -> Mapping[str, str]:
    """Variables of this role, to be added to those of the process that starts it.

    Args:
        spec: of the role.
        run_name: of the run.
        driver_address: IP address of this machine, as the role's machine sees it.
    """
    threads = dict.fromkeys(_THREAD_VARIABLES, str(spec.num_threads)) if spec.num_threads else {}
    run = {"PYTHONUNBUFFERED": "1", "OFFBEAT_RUN": run_name, "OFFBEAT_ROLE": spec.name}
    return {**run, **invite(driver_address, spec.liveness_policy), **threads, **spec.env}


def write_start(spec: RoleSpec) -> Bytes:
    """The first frame: what to import and how to construct it.

    Raises:
        TypeError: an argument is neither plain data, nor a dataclass, nor an array.
    """
    writer = FrameWriter()
    kwargs = {key: writer.pack(value) for key, value in spec.kwargs.items()}
    return writer.finish(Start(spec.target, list(sys.path), kwargs))


def open_log(path: Path, role: str) -> int:
    """Open a log file to append to it; its folder is made.

    Raises:
        RunFolderError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunFolderError(f"{role} needs a log file at {path}: {error.strerror}") from error
