"""Ranks that train, die at a chosen place, and are replaced: real processes, of which the last ones are spares.

A store of the test's process takes the part of a driver: who dies says so there before it does, each other rank then
interrupts its calls, and a spare takes the place.
"""

import ctypes
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from torch._C._distributed_c10d import TCPStore

from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._state.copies import PeerCopies, pack_state
from offbeat_engine_torch._state.ring import Ring
from offbeat_mesh import Group, Mesh, current_world, interrupt_calls, join_world

LIMIT_S = 240.0
DEADLINE_S = 200.0  # so that no deadline of a call can be what ended it


@dataclass(frozen=True)
class Death:
    """Ranks that die at once.

    Args:
        place: see `doom`.
        update: in which, or in the first one after it that is done; from 1 on.
    """

    place: str
    update: int
    ranks: tuple[int, ...]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def instead(owner, name, *, after=False):
    """Die in place of a call, or at its end."""
    real = getattr(owner, name)

    def call(*args, **named):
        if after:
            real(*args, **named)
        die()

    setattr(owner, name, call)


def doom(place, engine):
    """Make this process die at a place of the update that it is about to do."""
    if place == "forward":
        instead(engine._policy, "ask", after=True)
    elif place == "backward":
        instead(engine, "_backward")
    elif place == "reduction":
        instead(param_group, "foreach_reduce")
    elif place == "before step":
        instead(engine, "step")
    elif place == "step":
        instead(engine._optimizer, "step", after=True)
    elif place == "before copying":
        instead(PeerCopies, "keep")
    elif place == "sending":  # others wait for what this rank sends, or have some of it

        def send_half(ring, own):
            ring._outgoing.sendall(own[: len(own) // 2])
            time.sleep(0.1)
            die()

        Ring._send = send_half
    elif place == "not sent":  # all have ended this update, and die in the next one without copies of it
        PeerCopies.keep = lambda *args: time.sleep(LIMIT_S)
        kept = engine.keep_copies

        def keep(*args):
            kept(*args)
            doom("backward", engine)

        engine.keep_copies = keep
    elif place == "copying":  # all have sent, and some may know that the others have received
        instead(Group, "barrier")
    elif place == "copied":
        instead(PeerCopies, "keep", after=True)
    elif place == "weights":
        instead(engine._ranks, "gather", after=True)
    else:
        raise ValueError(place)


class Life:
    """One rank's training, through all worlds that it is a part of."""

    def __init__(self, store, config, axes, num_updates, deaths, update):
        self.store, self.config, self.axes, self.num_updates = store, config, axes, num_updates
        self.deaths, self.update = deaths, update
        self.size = torch.Size(axes.values()).numel()
        self.engine, self.losses = None, {}

    def join(self, rank, number):
        """Become a rank of the world of this number, with the state that the ranks have in common."""
        copies = self.engine.copies if self.engine else None
        if self.engine:
            self.engine.close()
            current_world().abandon()
        store = _connect(int(self.store.get(f"port-{number}")))  # ranks of a world have joined over its store as often
        world = join_world(rank=rank, size=self.size, store=store, device="cpu", deadline_s=DEADLINE_S)
        if number == 0:
            self.engine = TorchTrainEngine.create(self.config, Mesh(**self.axes))
            self.engine.keep_copies(0, b"{}")
            return 0
        self.engine, version, note = TorchTrainEngine.recover(self.config, Mesh(**self.axes), copies)
        self.losses = {int(key): value for key, value in json.loads(note).items()}
        assert world is current_world()
        return version

    def train_on(self, rank, number, version):
        """Train to the end, or to the death of this process."""
        death = self.deaths[number] if number < len(self.deaths) else None
        for now in range(version + 1, self.num_updates + 1):
            if death and rank in death.ranks and now >= death.update:
                doom(death.place, self.engine)
                self.store.add(f"dying-{number}", 1)
                while int(self.store.add(f"dying-{number}", 0)) < len(death.ranks):
                    time.sleep(0.01)
                death = None
            self.losses[now] = self.update(self.engine, now)
            self.engine.keep_copies(now, json.dumps(self.losses).encode())
            for _ in self.engine.weights():
                pass

    def run(self, rank, number=0):
        version = self.join(rank, number)
        while True:
            _interrupt_after(self.store, number)
            try:
                self.train_on(rank, number, version)
            except Exception:
                if number >= len(self.deaths):
                    raise
                number += 1
                version = self.join(rank, number)
            else:
                return


def _connect(port):
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))


def _open():
    timeout = timedelta(seconds=LIMIT_S)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)


def _interrupt_after(store, number):
    """Interrupt this process once one has died, as a driver does."""

    def wait(own):
        own.get(f"died-{number}")
        interrupt_calls()

    threading.Thread(target=wait, args=[store.clone()], daemon=True).start()


def _digest(engine):
    """Digest of weights, moments, random state and counts of one rank."""
    state = pack_state(engine._policy, engine._optimizer, engine._device, engine.steps_refused, b"")
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


def _member(number, port_of, results, life_args):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.set_num_threads(1)
    store = _connect(port_of.get())
    try:
        life = Life(store, *life_args)
        if number < life.size:
            rank, world = number, 0
        else:  # a spare
            rank, world = json.loads(store.get(f"spare-{number - life.size}"))
            if rank < 0:
                return
        life.run(rank, world)
        results.put((rank, _digest(life.engine), life.losses))
        current_world().leave()
    except BaseException as error:  # noqa: BLE001 - reported to the test
        traceback.print_exc(file=sys.stderr)
        results.put((number, f"{type(error).__name__}: {error}", {}))
    finally:
        results.close()
        results.join_thread()
        os._exit(0)


def train(config, axes, num_updates: int, deaths: Sequence[Death], update):
    """Train on ranks of which some die; what each rank has at the end: digest of its state, and all losses.

    Args:
        update: does one update, given an engine and its number, and returns its loss.
    """
    context = multiprocessing.get_context("fork")
    size, num_spares = torch.Size(axes.values()).numel(), sum(len(death.ranks) for death in deaths)
    ports, results = [context.Queue() for _ in range(size + num_spares)], context.Queue()
    args = (config, axes, num_updates, deaths, update)
    members = [
        context.Process(target=_member, args=(number, ports[number], results, args), daemon=True)
        for number in range(size + num_spares)
    ]
    for member in members:
        member.start()
    store, worlds = _open(), [_open() for _ in range(len(deaths) + 1)]  # after the forks: they have threads
    for number, world in enumerate(worlds):
        store.set(f"port-{number}", str(world.port))
    for port in ports:
        port.put(store.port)
    end_s, holders, next_spare = time.monotonic() + LIMIT_S, list(range(size)), 0
    try:
        for number, death in enumerate(deaths):
            for rank in death.ranks:
                members[holders[rank]].join(max(0.0, end_s - time.monotonic()))
                assert members[holders[rank]].exitcode == -signal.SIGKILL, (death, results.get(timeout=5))
            store.set(f"died-{number}", "")
            for rank in death.ranks:
                holders[rank] = size + next_spare
                store.set(f"spare-{next_spare}", json.dumps([rank, number + 1]))
                next_spare += 1
        ended = [results.get(timeout=max(1.0, end_s - time.monotonic())) for _ in range(size)]
    finally:
        for member in members:
            member.kill()
            member.join()
    return [rest for _, *rest in sorted(ended)]
