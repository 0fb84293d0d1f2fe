"""The job that torchrun has started this process in, and the store in which its processes find the driver."""

import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, Final

import msgspec

from offbeat_core import BackendError, ConfigError, DeadlineError

_NEEDED: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OTHERS: Final = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
_KEY: Final = "offbeat/driver"
_POLL_S: Final = 0.2


class DriverAddress(msgspec.Struct, frozen=True):
    """Location of the driver, which it leaves in the store.

    Args:
        hosts: names and addresses of its machine, the likeliest first.
        port: where it listens.
        token: that opens it; as secret as the store.
    """

    hosts: list[str]
    port: int
    token: str


@dataclass(frozen=True)
class Job:
    """The variables of one process of the job.

    Args:
        rank: among all processes; rank 0 is the driver.
        size: processes of the job.
        local_rank: among the processes of this node; number 0 is its agent.
        host: of the store.
        port: of the store.
        hosts_store: this process has to host the store: torchrun hosts one itself, srun and mpirun do not.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    hosts_store: bool

    @classmethod
    def take(cls, command: str) -> "Job":
        """Read the variables and remove them: what this process starts is not a rank of the job.

        Args:
            command: module and words of the program, for the error.

        Raises:
            ConfigError: one is missing, with the command that sets them; or is not a number.
        """
        if missing := [name for name in _NEEDED if not os.environ.get(name)]:
            raise ConfigError(
                f'cluster.launcher = "torchrun" needs the environment variables {", ".join(_NEEDED)}, and '
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; start it on every node with: "
                f"torchrun --nnodes N --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m {command}"
            )
        numbers = {name: os.environ[name] for name in _NEEDED if name != "MASTER_ADDR"}
        for name, value in numbers.items():
            if not (value.isascii() and value.isdecimal()):
                raise ConfigError(f"the environment variable {name} is a number: got {value!r}")
        rank, size, local_rank, port = map(int, numbers.values())
        if local_rank > rank or rank >= size:
            raise ConfigError(f"RANK is below WORLD_SIZE and LOCAL_RANK: got {rank}, {size} and {local_rank}")
        hosts_store = rank == 0 and os.environ.get(_AGENT_STORE) != "True"
        job = cls(rank, size, local_rank, os.environ["MASTER_ADDR"], port, hosts_store)
        for name in [*_NEEDED, *_OTHERS, *(each for each in os.environ if each.startswith("TORCHELASTIC_"))]:
            os.environ.pop(name, None)
        return job

    def open_store(self, deadline_s: float) -> Any:
        """Return the store of the job.

        Raises:
            BackendError: torch is not installed.
            DeadlineError: it does not answer.
        """
        try:
            dist = import_module("torch.distributed")
        except ImportError as error:
            raise BackendError('cluster.launcher = "torchrun" needs torch: pip install torch') from error
        try:
            return dist.TCPStore(
                self.host,
                self.port,
                is_master=self.hosts_store,
                timeout=timedelta(seconds=deadline_s),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:  # torch's errors of a store, which are RuntimeErrors
            at = f"the store of the job at {self.host}:{self.port}"
            raise DeadlineError(f"rank {self.rank}: connecting", at, deadline_s, str(error).splitlines()[0]) from error

    def publish(self, store: Any, address: DriverAddress) -> None:
        """Leave the driver's address for the other processes."""
        store.set(_KEY, msgspec.json.encode(address).decode())

    def find_driver(self, store: Any, end_s: float, deadline_s: float) -> DriverAddress:
        """Wait for the driver's address.

        Args:
            store: of the job.
            end_s: on the monotonic clock.
            deadline_s: what that is, for the error.

        Raises:
            DeadlineError: the driver has not left it in time.
        """
        while time.monotonic() < end_s:
            try:
                if store.check([_KEY]):
                    return msgspec.json.decode(store.get(_KEY), type=DriverAddress)
            except RuntimeError as error:
                at = f"the store of the job at {self.host}:{self.port}"
                raise DeadlineError(f"rank {self.rank}: asking", at, deadline_s, str(error).splitlines()[0]) from error
            time.sleep(_POLL_S)
        advice = "see what rank 0 prints, or raise cluster.start_timeout_s"
        raise DeadlineError(f"rank {self.rank} of {self.size}", "the driver, rank 0", deadline_s, advice)


def command_words(program: str) -> str:
    """Return how this program was called, after `-m`."""
    return " ".join([program, *sys.argv[1:]])
