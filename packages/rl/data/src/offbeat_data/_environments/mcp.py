"""Tools of an MCP server, which is started as a program and talked to over its standard streams.

Source: https://modelcontextprotocol.io/specification (tools); https://github.com/modelcontextprotocol/python-sdk
(`mcp.Client`), whose context must be entered and left in one task, so each server has a task of its own.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Final

from offbeat_core import BackendError, ConfigError, DataError
from offbeat_data._datasets.prompts import Prompt
from offbeat_data._environments.tools import ToolEnvironment
from offbeat_data._images import image_part

DESCRIBE_TIMEOUT_S: Final = 60.0
"""Limit for a server to start and to name its tools before a run begins."""


def import_mcp() -> Any:
    """Return the package.

    Raises:
        BackendError: it is not installed.
    """
    try:
        return import_module("mcp")
    except ImportError as error:
        line = 'pip install "offbeat-data[mcp]"'
        raise BackendError(f"environment.name = 'mcp' needs the package mcp; install it with: {line}") from error


class McpServer:
    """One server.

    Args:
        command: the program and its arguments.
        variables: environment variables besides the few that programs get (PATH, HOME and the like).
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        self._command, self._variables = list(command), dict(variables or {})
        self._over = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve())

    async def describe(self) -> list[dict[str, Any]]:
        """Its tools, as chat templates know them.

        Raises:
            DataError: it cannot be started, or does not speak the protocol.
        """
        found, cursor = [], None
        client = await self._connected()
        while True:
            page = await client.list_tools(cursor=cursor)
            found += [_described(tool) for tool in page.tools]
            cursor = page.next_cursor
            if not cursor:
                return found

    async def call(self, name: str, /, **arguments: Any) -> list[Any]:
        """Call a tool, for the blocks of its result; what goes wrong is raised as DataError, for the model to read."""
        client = await self._connected()
        result = await client.call_tool(name, arguments)
        if result.is_error:
            raise DataError(_text(result.content))
        return list(result.content)

    async def close(self) -> None:
        """End it."""
        self._over.set()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _connected(self) -> Any:
        return await asyncio.shield(self._client)

    async def _serve(self) -> None:
        mcp = import_mcp()
        program, *words = self._command
        server = mcp.StdioServerParameters(command=program, args=words, env=self._variables)
        try:
            async with mcp.Client(mcp.stdio_client(server)) as client:
                self._client.set_result(client)
                await self._over.wait()
        except Exception as error:  # noqa: BLE001  what waits for it gets the reason
            failure = DataError(f"the MCP server {' '.join(self._command)} is gone: {type(error).__name__}: {error}")
            if not self._client.done():
                self._client.set_exception(failure)
                self._client.exception()  # retrieved here, as nothing may be waiting


class McpEnvironment(ToolEnvironment):
    """The model may call the tools of an MCP server; its first turn without a call is its answer.

    Args:
        command: the server and its arguments.
        variables: environment variables of the server.
        is_shared: all episodes ask one server, which then must not remember anything; else each has its own.
        shows_images: the model sees the images in results; else it reads [image] in their places.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        is_shared: bool = False,
        shows_images: bool = False,
    ) -> None:
        super().__init__({})
        if not command or isinstance(command, str):
            raise ConfigError(f"environment.options: command must be a list, the program first; got {command!r}")
        self._command, self._variables, self._is_shared = tuple(command), dict(variables or {}), is_shared
        self._notify = _parts if shows_images else _text
        self._server: McpServer | None = None

    async def reset(self, prompt: Prompt) -> None:
        self._server = self._find() if self._is_shared else McpServer(self._command, self._variables)
        try:
            described = await self._server.describe()
        except BaseException:
            self._forget(self._server)
            raise
        names = [tool["function"]["name"] for tool in described]
        self._tools = {name: partial(self._ask, self._server, name) for name in names}

    async def close(self) -> None:
        if self._server is not None and not self._is_shared:
            await self._server.close()

    async def _ask(self, server: McpServer, name: str, /, **arguments: Any) -> str | list[dict[str, Any]]:
        return self._notify(await server.call(name, **arguments))

    def _find(self) -> McpServer:
        """Return the server of all episodes with this command."""
        shared, key = _shared_servers(), (self._command, tuple(sorted(self._variables.items())))
        if key not in shared:
            shared[key] = McpServer(self._command, self._variables)
        return shared[key]

    def _forget(self, server: McpServer) -> None:
        """Let the next episode start another in place of one that does not answer."""
        shared = _shared_servers()
        for key in [key for key, one in shared.items() if one is server]:
            del shared[key]


@lru_cache(maxsize=1)
def _shared_servers() -> dict[Any, McpServer]:
    """Return the servers of this process, by what they are; they end with it."""
    return {}


def describe_tools(command: Sequence[str], variables: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Start a server, ask for its tools, end it. Outside of event loops.

    Raises:
        DataError: it did not name them in time, or could not be started.
        BackendError: the package mcp is not installed.
    """
    import_mcp()

    async def ask() -> list[dict[str, Any]]:
        server = McpServer(command, variables)
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                return await server.describe()
        except TimeoutError:
            text = f"the MCP server {' '.join(command)} did not name its tools within {DESCRIBE_TIMEOUT_S:g} s"
            raise DataError(text) from None
        finally:
            await server.close()

    return asyncio.run(ask())


def _described(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(blocks: Sequence[Any]) -> str:
    """Return a result as text; what is no text is named."""
    return "\n".join(str(block.text) if block.type == "text" else f"[{block.type}]" for block in blocks)


def _parts(blocks: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return a result with its images, as parts of a chat message; without any, as text."""
    if not any(block.type == "image" for block in blocks):
        return _text(blocks)
    return [
        image_part(block.mime_type, block.data) if block.type == "image" else {"type": "text", "text": _text([block])}
        for block in blocks
    ]
