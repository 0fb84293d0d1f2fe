"""Roles of a launcher as forks of the process that starts them: a run of many processes imports torch once.

Only the way the roles come to life differs from a real run: they are called over the same sockets, die with their
driver, and take signals alike.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from importlib import import_module

from offbeat_actors import LocalLauncher, RoleSpec, _server
from offbeat_actors._actor import ActorHandle
from offbeat_actors._launcher import open_log, own_environment
from offbeat_actors._local import LocalProcess
from offbeat_actors._wire import Channel, SocketStream
from offbeat_testing._processes import ForkedProcess

_POLL_EVERY_S = 0.02


def fork_roles() -> None:
    """Have the local launcher fork its roles, from here on, in this process and those forked from it.

    Call it in the fork that a `RunningCommand` makes; what the roles import must be imported before that.
    """
    setattr(LocalLauncher, "_spawn", _fork_role)  # noqa: B010  a type checker wants to know nothing of it


def forked_main(application: str, *modules: str) -> Callable[[], object]:
    """Return the command line of an application for a `RunningCommand` all of whose processes are forks of this one.

    Args:
        application: its import name, such as "sft_app".
        modules: what its roles import, such as an engine. They are imported here, before anything is forked.
    """
    for module in (f"{application}._commands", *modules):
        import_module(module)

    def main() -> object:
        fork_roles()
        return import_module(f"{application}._cli").main()

    return main


class _RoleProcess(ForkedProcess):
    """The part of `asyncio.subprocess.Process` that an actor needs."""

    @property
    def returncode(self) -> int | None:
        return self.poll()

    async def wait(self) -> int:
        while (code := self.poll()) is None:
            await asyncio.sleep(_POLL_EVERY_S)
        return code


async def _fork_role(launcher: LocalLauncher, spec: RoleSpec) -> ActorHandle:
    ours, theirs = socket.socketpair()
    log = os.dup(2) if spec.log_path is None else open_log(spec.log_path, spec.name)

    variables = own_environment(spec, launcher._run_name, launcher.address)

    def become_role() -> None:
        ours.close()
        os.environ.update(variables)
        _server.main(theirs.detach())

    process = _RoleProcess(become_role, [spec.name], log)
    theirs.close()
    os.close(log)
    local = LocalProcess(process)  # type: ignore[arg-type]
    return ActorHandle(spec, local, Channel(SocketStream(ours)), launcher._config)
