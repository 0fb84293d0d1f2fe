"""Nodes of the roles of a run: `places.json` in its folder, written by the driver, read by `where`.

It is a file, so that it can be read while the cluster does not answer, and after the run.
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._preflight.placement import device_widths
from grpo_async_app._run.log.run_logger import RunLogger
from offbeat_actors import RolePlace, RoleState
from offbeat_core import ConfigError, RoleName, RunFolderError
from offbeat_run import RunFolder, Writer

LOOKED_EVERY_S: Final = 0.5
"""Between two looks at the roles; the file is written when something has changed."""


@dataclass(frozen=True, kw_only=True)
class RoleStatus(RolePlace):
    """A line of the table.

    Args:
        restarts: how often the role was started again.
        version: of the policy: what a trainer has trained, or whose weights an engine holds; None for other roles.
    """

    restarts: int = 0
    version: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunPlaces:
    """The driver's last written record of where its roles are.

    Args:
        driver: process id of the driver.
        host: machine of the driver.
        written_s: Unix time.
        roles: in the order of their names.
    """

    driver: int
    host: str
    written_s: float
    roles: list[RoleStatus] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, with the names of roles as text."""
        return {**asdict(self), "roles": [{**asdict(role), "role": str(role.role)} for role in self.roles]}

    def is_by(self, writer: Writer | None) -> bool:
        """Return whether the process that holds the lock of the run folder has written them.

        Machines in containers give their drivers the same process id again, so the time counts too.
        """
        if writer is None or writer.pid != self.driver:
            return False
        return not writer.host or (writer.host == self.host and writer.since_s <= self.written_s)


def read_places(run: RunFolder) -> RunPlaces:
    """Read the file of a run.

    Raises:
        RunFolderError: no role of it was ever placed, or the file is not one of ours.
    """
    try:
        held = json.loads(run.places.read_text())
        return RunPlaces(**{**held, "roles": [_read_role(role) for role in held["roles"]]})
    except FileNotFoundError:
        raise RunFolderError(
            f"{run.path}: holds no {run.places.name}: no role was placed yet, or an older version has run it"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        raise RunFolderError(f"{run.places}: cannot be read: {type(error).__name__}: {error}") from error


def _read_role(held: dict[str, Any]) -> RoleStatus:
    devices = {node: tuple(devices) for node, devices in held["devices"].items()}
    return RoleStatus(**{**held, "role": RoleName.parse(held["role"]), "devices": devices})


class PlacesFile:
    """The file of a run, written when something has changed. A full disk ends the file, and not the run.

    Use it in a `with` block around that of the fleet. It begins with no role, in place of those of an earlier driver;
    when the block is left, every process has ended.
    """

    def __init__(self, run: RunFolder, fleet: Fleet, config: GrpoConfig, logger: RunLogger) -> None:
        self._run, self._fleet, self._config, self._logger = run, fleet, config, logger
        self._written: list[RoleStatus] | None = None
        self._fails = False

    def __enter__(self) -> "PlacesFile":
        self._write([])
        return self

    def __exit__(self, *_: object) -> None:
        now_s = time.time()
        self._write(
            [
                role
                if role.state == "ended"
                else replace(role, state="ended", since_s=now_s, reason="ended with the run")
                for role in self._written or ()
            ]
        )

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Keep the file up to date while the block lasts, inside that of the fleet: its launcher is open."""
        looking = asyncio.create_task(self._keep_up())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            self._write(self._look())  # the last update may be younger than the last look

    async def _keep_up(self) -> None:
        while True:
            self._write(self._look())
            await asyncio.sleep(LOOKED_EVERY_S)

    def _look(self) -> list[RoleStatus]:
        return [self._status(place) for place in self._fleet.places()]

    def _status(self, place: RolePlace) -> RoleStatus:
        kind = place.role.kind
        version = self._logger.version if kind == "trainer" else self._fleet.engines.versions.get(str(place.role))
        named = {} if place.devices else self._named_devices(kind, place.node)
        return RoleStatus(
            **{**vars(place), "devices": {**place.devices, **named}},
            restarts=self._fleet.num_restarts(place.role),
            version=version,
        )

    def _named_devices(self, kind: str, node: str) -> Mapping[str, tuple[str, ...]]:
        """Return the devices from the one on that the configuration names by number, which no plan gives out."""
        key = {"trainer": "engine.device", "reward_model": "reward.reward_model.device"}.get(kind, f"{kind}.device")
        name, _, first = self._config.devices.get(key, "").partition(":")
        if not first.isdecimal():
            return {}
        width = device_widths(self._config).get(key, 1)
        return {node: tuple(f"{name} {number}" for number in range(int(first), int(first) + width))}

    def _write(self, roles: list[RoleStatus]) -> None:
        if roles == self._written or self._fails:
            return
        places = RunPlaces(driver=os.getpid(), host=socket.gethostname(), written_s=time.time(), roles=roles)
        try:
            self._run.write_text(self._run.places, json.dumps(places.to_json(), indent=1))
        except (OSError, RunFolderError) as error:
            self._fails = True
            self._fleet.events.message(f"{self._run.places.name} is not written any more: {error}")
        self._written = roles


def state_of(role: RoleStatus, driver_lives: bool) -> tuple[RoleState | str, float]:
    """Return what is shown of a role: its state and the Unix time since when; processes end with their driver."""
    if role.state == "ended" or driver_lives:
        return role.state, role.since_s
    return "gone with the driver", 0.0
