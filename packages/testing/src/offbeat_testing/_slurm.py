"""Stand-ins of Slurm's sbatch, srun and scontrol, which start everything on this machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

_FOLDER: Final = "OFFBEAT_SLURM_STANDIN"
_NODES: Final = "OFFBEAT_SLURM_STANDIN_NODES"
_OPTIONS: Final = ("--nodes", "--ntasks", "--nodelist", "--cpu-bind", "--mem", "--overlap")
_LOOK_EVERY_S: Final = 0.05


class SlurmStandIn:
    """A cluster of Slurm whose nodes node-0, node-1, … are names: all tasks run on this machine.

    `sbatch` runs a script at once, again for as long as it asks to be requeued, and exits with its exit code. `srun`
    forwards signals to its task. It knows the options that the scripts of offbeat give, and refuses others.

    Args:
        folder: that does not exist; the commands go there.
        num_nodes: of each job.
    """

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self._folder, self._num_nodes = folder, num_nodes
        folder.mkdir()
        for name in ("sbatch", "srun", "scontrol"):
            command = f'exec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"'
            (folder / name).write_text(f"#!/bin/sh\n{command}\n")
            (folder / name).chmod(0o755)

    def submit(self, script: Path, job: int = 7, **environment: str) -> "subprocess.Popen[str]":
        """Start `sbatch SCRIPT` in a session of its own; what it prints can be read from its stdout.

        Args:
            script: to run.
            job: its id.
            environment: variables beside those of this process.
        """
        path = f"{self._folder}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, _FOLDER: str(self._folder), _NODES: str(self._num_nodes), "SLURM_JOB_ID": str(job)}
        return subprocess.Popen(
            ["sbatch", str(script)],
            executable=str(self._folder / "sbatch"),
            env=os.environ | environment | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def send_signal(self, name: str) -> None:
        """Send a signal, such as "USR1", to the script of the running job and not to its tasks."""
        (self._folder / "new").write_text(name)
        (self._folder / "new").rename(self._folder / "signal")

    def break_node(self, name: str) -> None:
        """Let `ray start` do nothing on a node from now on."""
        (self._folder / "broken").write_text(name)


def _sbatch(folder: Path, script: str) -> int:
    num_restarts = 0
    while True:
        names = {
            "SLURM_JOB_NODELIST": f"node-[0-{int(os.environ[_NODES]) - 1}]",
            "SLURMD_NODENAME": "node-0",
            "SLURM_RESTART_COUNT": str(num_restarts),
        }
        process = subprocess.Popen(["bash", script], env=os.environ | names)
        while process.poll() is None:
            time.sleep(_LOOK_EVERY_S)
            if (folder / "signal").exists():
                process.send_signal(signal.Signals[f"SIG{(folder / 'signal').read_text()}"])
                (folder / "signal").unlink()
        if not (folder / "requeued").exists():
            return process.returncode
        (folder / "requeued").unlink()
        num_restarts += 1
        print(f"slurm: restart {num_restarts}", flush=True)


def _scontrol(folder: Path, *words: str) -> int:
    match words:
        case ("show", "hostnames", _):
            print("\n".join(f"node-{number}" for number in range(int(os.environ[_NODES]))))
        case ("requeue", job) if job == os.environ["SLURM_JOB_ID"]:
            (folder / "requeued").touch()
        case _:
            sys.exit(f"scontrol: {words}")
    return 0


def _srun(folder: Path, *words: str) -> int:
    rest, options = list(words), dict[str, str]()
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0).partition("=")
        if name not in _OPTIONS:
            sys.exit(f"srun: unknown option {name}")
        options[name] = value
    broken = folder / "broken"
    if rest[0] == "ray" and broken.exists() and options["--nodelist"] == broken.read_text():
        rest = ["sleep", "1000"]
    task = subprocess.Popen(rest, env=os.environ | {"SLURMD_NODENAME": options["--nodelist"]})

    def forward(number: int, _: FrameType | None) -> None:
        task.send_signal(number)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, forward)
    code = task.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    commands: dict[str, Callable[..., int]] = {"sbatch": _sbatch, "srun": _srun, "scontrol": _scontrol}
    sys.exit(commands[sys.argv[1]](Path(os.environ[_FOLDER]), *sys.argv[2:]))
