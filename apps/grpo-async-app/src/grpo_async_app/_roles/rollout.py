"""The rollout role: one rollout engine of any backend in a process of its own."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from grpo_async_app._roles.residence import resident_bytes
from offbeat_data import load_tokenizer
from offbeat_mesh import Profiler, TraceFiles, open_device
from offbeat_types import (
    BackendError,
    Completion,
    ConfigError,
    EngineHealth,
    GenerateRequest,
    PauseMode,
    RolloutEngine,
    RolloutEngineConfig,
    TracePlan,
    TracingEngine,
    WeightProof,
    load_backend,
)
from offbeat_weightsync import receive


class Recorder(Protocol):
    """What traces an engine; see `TracingEngine`, which does so itself."""

    async def begin_trace(self) -> None:
        """Trace from here on."""
        ...

    async def end_trace(self) -> list[Path]:
        """Trace no further; the files."""
        ...


class ProcessRecorder:
    """Traces this process and its device, for an engine that computes in it.

    Args:
        device: of the engine.
        path: takes each trace, which is taken away before the next comes.
    """

    _profiler: Profiler

    def __init__(self, device: str, path: Path) -> None:
        self._device, self._path = open_device(device), path

    async def begin_trace(self) -> None:
        """See `Recorder`."""
        self._profiler = self._device.profiler()
        self._profiler.start()

    async def end_trace(self) -> list[Path]:
        """See `Recorder`."""
        self._device.synchronize()
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self._profiler.export_chrome_trace, str(self._path))  # the role must answer meanwhile
        return [self._path]


class VersionTrace:
    """Traces from new weights on, until the next come or the stretch is long enough. Belongs to one event loop.

    Args:
        plan: under the weights of which updates.
        recorder: of the engine.
        longest_s: of one stretch.
    """

    def __init__(self, plan: TracePlan, recorder: Recorder, longest_s: float) -> None:
        self._files, self._recorder, self._longest_s = TraceFiles(plan), recorder, longest_s
        self._over = asyncio.Event()
        self._stretch: asyncio.Task[None] | None = None

    async def begin(self, version: int) -> None:
        """These weights are served now."""
        if self._files.wants(version):
            self._over.clear()
            await self._recorder.begin_trace()
            self._stretch = asyncio.create_task(self._end_in_time(version))

    async def _end_in_time(self, version: int) -> None:
        try:
            async with asyncio.timeout(self._longest_s):
                await self._over.wait()
        except TimeoutError:
            pass
        self._files.keep(version, await self._recorder.end_trace())

    async def end(self) -> None:
        """These weights are served no longer: what was traced is written."""
        if self._stretch is not None:
            self._over.set()
            await self._stretch
            self._stretch = None


if TYPE_CHECKING:
    from offbeat_serve import RolloutServer

SERVED_NAME = "policy"
"""What agents outside call the model."""


class RolloutRole:
    """Serves one engine, and takes its weights straight from the trainer.

    Args:
        backend: name under the entry-point group `offbeat.rollout`.
        config: the engine's.
        serve_port: where agents outside are served too, from the first weights on; 0: a free one, told in the log.
        serve_deadline_s: seconds one of their requests may take.
        trace: under which weights it traces itself; None for none.
        trace_s: longest stretch of one trace.
        interrupts: weight syncs hold what is being sampled, and let it go on under the new weights.
    """

    _engine: RolloutEngine

    def __init__(
        self,
        *,
        backend: str,
        config: RolloutEngineConfig,
        serve_port: int | None = None,
        serve_deadline_s: float = 600.0,
        trace: TracePlan | None = None,
        trace_s: float = 10.0,
        interrupts: bool = False,
    ) -> None:
        self._interrupts = interrupts
        self._backend, self._config = backend, replace(config, trace_folder=trace.folder) if trace else config
        self._serve_port, self._serve_deadline_s = serve_port, serve_deadline_s
        self._server: RolloutServer | None = None
        self._plan, self._trace_s = trace, trace_s
        self._trace: VersionTrace | None = None

    async def start(self) -> None:
        """Load the model.

        Raises:
            ConfigError: it is to hold FP8 weights, or samples across a weight sync, and cannot.
            BackendError: it is to be served to others, and offbeat-serve is not installed.
        """
        self._engine = await load_backend("offbeat.rollout", self._backend).create(self._config)
        if self._config.weight_format == "fp8" and not self._engine.capabilities.fp8_weights:
            await self._engine.close()
            raise ConfigError(
                f"rollout.weight_format = fp8: an engine of rollout.backend = {self._backend!r} takes no FP8 blocks "
                "from the trainer; set it to dtype (rollout.options may quantise by themselves), or take backend torch"
            )
        if self._interrupts and "keep" not in self._engine.capabilities.pause_modes:
            await self._engine.close()
            raise ConfigError(
                f"async.partial_rollout = true: an engine of rollout.backend = {self._backend!r} cannot go on with a "
                "sample under other weights; set async.partial_rollout = false, or take backend torch or vllm"
            )
        if self._plan is not None:
            self._trace = VersionTrace(self._plan, self._recorder(self._plan), self._trace_s)
        if self._serve_port is not None:
            self._server = self._endpoint(self._serve_port)

    def _recorder(self, plan: TracePlan) -> Recorder:
        """The engine, where it computes elsewhere and traces itself; else what traces this process."""
        if self._engine.capabilities.traces:
            return cast(TracingEngine, self._engine)
        return ProcessRecorder(self._config.device, Path(plan.folder) / f"{plan.role}.partial")

    def _endpoint(self, port: int) -> "RolloutServer":
        try:
            from offbeat_serve import RolloutServer, ServedModel, ServeSettings
        except ImportError as error:
            line = 'pip install "grpo-async-app[serve]"'
            raise BackendError(f"rollout.serve_port needs offbeat-serve; install it with: {line}") from error
        settings = ServeSettings(port=port, generate_deadline_s=self._serve_deadline_s, close_deadline_s=1.0)
        tokenizer = load_tokenizer(self._config.model_path, self._config.trust_remote_code)
        return RolloutServer(self._engine, tokenizer, ServedModel.read(self._config, SERVED_NAME), settings)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        return await self._engine.generate(request)

    async def abort(self, request_id: str) -> None:
        """See `RolloutEngine.abort`."""
        await self._engine.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._engine.resume()

    async def sleep(self, level: int) -> int:
        """Give memory back; see `RolloutEngine.sleep`.

        Returns:
            Bytes of main memory that are held still.
        """
        await self._engine.sleep(level)
        return resident_bytes()

    async def wake(self, tags: list[str]) -> int:
        """Take memory again; see `RolloutEngine.wake`.

        Returns:
            Bytes of main memory that are held now.
        """
        await self._engine.wake(tuple(tags))
        return resident_bytes()

    async def receive_weights(self, socket_path: str, version: int, deadline_s: float, name: str) -> WeightProof:
        """Take `version` from the trainer that listens on `socket_path`, and prove to it what arrived."""
        if self._trace is not None:
            await self._trace.end()
        incoming = receive(socket_path, version, deadline_s, name=name)
        stream = await asyncio.to_thread(incoming.__enter__)
        try:
            proof = await self._engine.update_weights(stream, version)
            await asyncio.to_thread(stream.confirm, proof)
        except BaseException as error:
            incoming.__exit__(type(error), error, error.__traceback__)
            raise
        incoming.__exit__(None, None, None)
        await self._serve()
        if self._trace is not None:
            await self._trace.begin(version)
        return proof

    async def _serve(self) -> None:
        """Let others in, once there is the policy in training to serve, and not what the model folder holds."""
        if self._server and not self._server.url:
            await self._server.start()
            print(f"serves {SERVED_NAME} at {self._server.url}/v1", flush=True)

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`."""
        return await self._engine.health()

    async def close(self) -> None:
        """Answer whoever waits with what there is, and free the engine."""
        if self._trace is not None:
            await self._trace.end()
        if self._server:
            await self._server.close()
        await self._engine.close()
