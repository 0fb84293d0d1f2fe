"""Roles that the tests start in processes of their own."""

import asyncio
import concurrent.futures
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offbeat_core import (
    Completion,
    ConfigError,
    DeadlineError,
    EngineHealth,
    GenerateRequest,
    Metrics,
    OffbeatError,
    PeerFailedError,
    RolloutEngineConfig,
    ShapeError,
    TrainSequence,
    WeightProof,
    WeightSyncError,
)


class OwnError(WeightSyncError):
    """An offbeat error that the parent does not know."""


class Echo:
    """Gives back what it gets, and notes which thread and what type it came in."""

    def __init__(
        self, config: RolloutEngineConfig | None = None, weights: npt.NDArray[np.float32] | None = None
    ) -> None:
        self.config, self.weights, self.order = config, weights, list[str]()

    def get_config(self) -> RolloutEngineConfig | None:
        return self.config

    def get_weights(self) -> npt.NDArray[np.float32] | None:
        return self.weights

    def completions(self, value: list[Completion]) -> list[Completion]:
        assert all(isinstance(item, Completion) for item in value)
        return value

    async def request(self, value: GenerateRequest) -> GenerateRequest:
        assert isinstance(value, GenerateRequest)
        return value

    def sequences(self, value: list[TrainSequence]) -> list[TrainSequence]:
        assert all(isinstance(item, TrainSequence) for item in value)
        return value

    def metrics(self, value: Metrics) -> Metrics:
        return value

    def proof(self, *, value: WeightProof) -> WeightProof:
        assert isinstance(value, WeightProof)
        return value

    def health(self, value: EngineHealth) -> EngineHealth:
        return value

    def path(self, value: Path) -> Path:
        assert isinstance(value, Path)
        return value

    def anything(self, value: Any) -> Any:
        return value

    def array(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return value

    def double(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        value *= 2  # arrays arrive writable
        return value

    def kinds(self, first: int, *rest: float, **named: str) -> list[str]:
        return [type(item).__name__ for item in (first, *rest, *named.values())]

    def note(self, name: str, seconds: float) -> list[str]:
        self.order.append(f"{name} begins")
        time.sleep(seconds)
        self.order.append(f"{name} ends")
        return self.order


class Counting:
    """Works for a while, and says meanwhile how far it is."""

    def __init__(self) -> None:
        self._so_far = ""

    def work(self, num_steps: int, seconds: float) -> None:
        for number in range(num_steps):
            self._so_far = f"{number + 1} of {num_steps}"
            time.sleep(seconds)

    async def beat(self) -> str:
        return self._so_far


class Patient:
    """Has a long sync method, async methods beside it, and leaves a trace of what happened in a file."""

    def __init__(self, trace: Path | None = None) -> None:
        self.trace, self.cancelled = trace, False
        self.made_in = threading.current_thread()
        self.released = threading.Event()

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_waiting = asyncio.Event()

    def in_main_thread(self) -> list[bool]:
        return [thread is threading.main_thread() for thread in (self.made_in, threading.current_thread())]

    async def started(self) -> bool:
        return self.loop is asyncio.get_running_loop()

    def compute(self, seconds: float) -> str:
        self._write("compute began")
        time.sleep(seconds)
        return "computed"

    def wait_released(self) -> str:
        self.released.wait()
        return "released"

    async def release(self) -> None:
        self.released.set()

    async def waiting(self) -> None:
        await self.is_waiting.wait()

    async def wait_long(self) -> None:
        self.is_waiting.set()
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def was_cancelled(self) -> bool:
        return self.cancelled

    async def pid(self) -> int:
        return os.getpid()

    def thread_settings(self) -> tuple[str, int]:
        import torch

        return os.environ["OMP_NUM_THREADS"], torch.get_num_threads()

    async def environment(self, key: str) -> str:
        return os.environ.get(key, "")

    async def visible_devices(self) -> list[str]:
        """What Ray's variables of visible devices say, whatever their kind."""
        lists = {value for key, value in os.environ.items() if "VISIBLE_DEVICES" in key}
        return [device for value in lists for device in value.split(",") if device]

    async def open_files(self) -> list[str]:
        return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd))

    def start_subprocess(self, first: str = "") -> int:
        """Start a process that does `first`, and then sleeps; its id, when it has done it."""
        code = f"import signal, time; {first or 'pass'}; print(flush=True); time.sleep(100)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    def close(self) -> None:
        self._write("closed")

    def _write(self, text: str) -> None:
        if self.trace is not None:
            with self.trace.open("a") as file:
                file.write(text + "\n")


def _raise_memory_error(*_: Any, **__: Any) -> Any:
    raise MemoryError


class NoMemoryForItError(Exception):
    """An error whose text cannot be made for lack of memory."""

    __str__ = _raise_memory_error


class Faulty:
    """Fails in every way a role can."""

    def config_error(self) -> None:
        raise ConfigError("rollout.dtype must be one of float32: got 'float7'")

    def shape_error(self) -> None:
        raise ShapeError("a and b differ")

    async def deadline_error(self) -> None:
        raise DeadlineError("queue.get", "scorer-0", 3.0, "start it")

    def peer_error(self) -> None:
        raise PeerFailedError("scorer-0", "ValueError: no", "its last line")

    def own_error(self) -> None:
        raise OwnError("no other process knows my type")

    def value_error(self) -> None:
        raise ValueError("7 is not even")

    async def async_value_error(self) -> None:
        raise ValueError("8 is even")

    async def cancelled_error(self) -> None:
        raise asyncio.CancelledError

    def stop_iteration(self) -> None:
        raise StopIteration

    def system_exit(self) -> None:
        sys.exit(5)

    async def async_system_exit(self) -> None:
        sys.exit(5)

    async def no_memory_for_an_async_error(self) -> None:
        raise NoMemoryForItError

    async def no_memory_for_a_callback(self) -> None:
        """Await what a thread has done, and could not say."""
        loop, answer = asyncio.get_running_loop(), concurrent.futures.Future[None]()
        wakes = asyncio.wrap_future(answer)
        loop.call_soon_threadsafe = _raise_memory_error  # type: ignore[method-assign]
        threading.Thread(target=answer.set_result, args=(None,)).start()
        await wakes

    async def no_memory_in_a_thread(self) -> None:
        """Await what a thread was to do that has ended."""
        threading.Thread(target=_raise_memory_error).start()
        await asyncio.Event().wait()

    def wrong_type(self) -> str:
        return "a string"

    def unsendable(self) -> object:
        return object()

    def leave(self, code: int) -> None:
        print("these are my last words")
        os._exit(code)

    def crash(self) -> None:
        ctypes.string_at(0)

    async def hang(self) -> None:
        print("hanging")
        await asyncio.sleep(100)

    async def hold_lock(self) -> None:
        """Compute without ever giving the interpreter lock back."""
        ctypes.PyDLL(None).sleep(100)


class Sleeper:
    """An engine that goes to sleep, unless it is stuck."""

    def __init__(self) -> None:
        self.stuck = False

    async def get_stuck(self) -> None:
        self.stuck = True

    async def sleep(self, level: int) -> None:
        while self.stuck:
            await asyncio.sleep(1)


class Blocking:
    """Blocks its event loop, so that it answers nothing."""

    async def generate(self) -> None:
        threading.Event().wait()


class Watched:
    """Waits for another process, and says so to the liveness monitor."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        import offbeat_liveness as liveness

        liveness.watch(stall_after_s=2, directory=folder, name=name)

    async def wait_for(self, what: str, on: str) -> None:
        import offbeat_liveness as liveness

        with liveness.waiting(what, on=on):
            await asyncio.sleep(1000)


class RefusesConfig:
    def __init__(self, text: str) -> None:
        raise ConfigError(text)


class RefusesValue:
    def __init__(self) -> None:
        raise ValueError("no value is good enough")


class StartFails:
    async def start(self) -> None:
        raise OffbeatError("the engine does not start")


class NeverReady:
    async def start(self) -> None:
        print("loading the model", flush=True)
        await asyncio.sleep(100)


class DiesEarly:
    def __init__(self) -> None:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class CloseFails:
    def close(self) -> None:
        raise DiskFullError("the disk is full")


class DiskFullError(OffbeatError):
    """Raised while closing."""


class Stubborn:
    """Does not leave politely, nor on SIGTERM."""

    def __init__(self) -> None:
        self.closing = False

    async def start(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: print("no", flush=True))

    async def close(self) -> None:
        await asyncio.sleep(100)


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


class Deserter:
    """Starts processes that leave its process group."""

    def fork(self) -> int:
        """Fork a child that leads a session of its own, and holds all that this process holds."""
        ours, theirs = os.pipe()
        if pid := os.fork():
            os.close(theirs)
            os.read(ours, 1)  # until it has a session: a signal to this process's group no longer reaches it
            os.close(ours)
            return pid
        os.setsid()
        os.close(theirs)
        time.sleep(600)
        os._exit(0)

    def start_daemon(self) -> int:
        """Start a program whose parent has ended, as daemons do."""
        quiet = "start_new_session=True, stdout=subprocess.DEVNULL"
        text = f"import subprocess; print(subprocess.Popen(['sleep', '600'], {quiet}).pid)"
        done = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, check=True)
        return int(done.stdout)

    def end(self) -> None:
        os._exit(3)


class Chatty:
    """Prints much, and dies."""

    def chat(self, num_characters: int) -> None:
        """Print, and end the process with an error."""
        print("\x1b[1mfirst words", "x" * num_characters)
        print("these are my last words", flush=True)
        os._exit(1)
