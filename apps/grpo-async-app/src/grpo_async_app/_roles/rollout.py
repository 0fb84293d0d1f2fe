"""The rollout role: one rollout engine of any backend in a process of its own."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._roles.process_memory import resident_bytes
from offbeat_core import (
    LOGPROB,
    BackendError,
    Completion,
    ConfigError,
    EngineHealth,
    Fingerprint,
    Floats,
    GenerateRequest,
    Ids,
    InspectedEngine,
    Inspection,
    LoraAdapter,
    PauseMode,
    ReceivingEngine,
    RecordedSession,
    RoleName,
    RolloutEngine,
    SessionPlan,
    TracePlan,
    TracingEngine,
    WeightPart,
    WeightProof,
    WeightStream,
    load_backend,
)
from offbeat_data import load_tokenizer
from offbeat_device import Profiler, TraceFiles, open_device
from offbeat_run import log_line, log_loaded, log_start, size_text
from offbeat_weightsync import WeightCopy, open_transport


class ProcessRecorder:
    """Traces this process and its device, for an engine that computes in it.

    Args:
        device: of the engine.
        path: takes each trace, which is moved away before the next one is written.
    """

    _profiler: Profiler

    def __init__(self, device: str, path: Path) -> None:
        self._device, self._path = open_device(device), path

    async def begin_trace(self) -> None:
        self._profiler = self._device.profiler()
        self._profiler.start()

    async def end_trace(self) -> list[Path]:
        self._device.synchronize()
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self._profiler.export_chrome_trace, str(self._path))  # the role must answer meanwhile
        return [self._path]


class VersionTrace:
    """Traces from new weights on, until the next come or the stretch is long enough. Belongs to one event loop.

    Args:
        plan: says under the weights of which updates.
        recorder: of the engine.
        longest_s: of one stretch.
    """

    def __init__(self, plan: TracePlan, recorder: TracingEngine | ProcessRecorder, longest_s: float) -> None:
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
"""Name by which agents outside call the model, and its adapter is called where it is a model with an adapter."""


class RolloutRole:
    """Serves one engine, and takes its weights straight from the trainer.

    Args:
        config: of the run.
        role: of the engine.
        model_path: folder it starts from.
        num_threads: of the engine.
        trace_folder: takes the traces of section `profile`.
    """

    _engine: RolloutEngine

    def __init__(
        self, *, config: GrpoConfig, role: RoleName, model_path: str, num_threads: int, trace_folder: str = ""
    ) -> None:
        log_start(config.rollout.device, num_threads)
        self._config, self._role, self._plan = config, role, config.profile.plan(role, Path(trace_folder))
        settings = config.rollout_engine(model_path, num_threads)
        self._settings = replace(settings, trace_folder=trace_folder) if self._plan else settings
        self._server: RolloutServer | None = None
        self._starting_server = asyncio.Lock()
        self._trace: VersionTrace | None = None
        self._copy = WeightCopy() if config.rollout.full_sync_every > 1 else None
        self._transport = open_transport(config.rollout.weight_transport, config.rollout.device)
        self._adapter = ""  # which completes the policy, once it has come

    async def start(self) -> None:
        """Load the model, or say why this backend cannot serve such a run."""
        backend, began_s = self._config.rollout.backend, time.monotonic()
        self._engine = await load_backend("offbeat.rollout", backend).create(self._settings)
        log_loaded(self._settings.model_path, self._settings.dtype, began_s)
        # Changed elements are found on the host, so they come to this process.
        self._workers_receive = self._engine.capabilities.receives and self._transport.on_device and self._copy is None
        if not self._workers_receive or "adapter" in self._config.rollout.weight_parts:
            self._transport.get_ready()
        if self._settings.weight_format == "fp8" and not self._engine.capabilities.fp8_weights:
            await self._engine.close()
            raise ConfigError(
                f"rollout.weight_format = fp8: an engine of rollout.backend = {backend!r} takes no FP8 blocks "
                "from the trainer; set it to dtype (rollout.options may quantise by themselves), or take backend torch"
            )
        if (wish := self._config.rollout.replay_routes) in ("on", "measure") and not self._engine.capabilities.routes:
            await self._engine.close()
            raise ConfigError(
                f"rollout.replay_routes = {wish}: this engine of rollout.backend = {backend!r} does not say which "
                "experts tokens took; leave it at auto, or take backend torch"
            )
        if self._config.async_.partial_rollout and "keep" not in self._engine.capabilities.pause_modes:
            await self._engine.close()
            raise ConfigError(
                f"async.partial_rollout = true: an engine of rollout.backend = {backend!r} cannot continue a "
                "sample under other weights; set async.partial_rollout = false, or take backend torch or vllm"
            )
        if self._plan is not None:
            self._trace = VersionTrace(self._plan, self._recorder(self._plan), self._config.profile.rollout_s)
        self._server = self._endpoint()
        log_line("ready")

    def _recorder(self, plan: TracePlan) -> TracingEngine | ProcessRecorder:
        """Return the engine, where it computes elsewhere and traces itself; else what traces this process."""
        if self._engine.capabilities.traces:
            return cast(TracingEngine, self._engine)
        return ProcessRecorder(self._settings.device, Path(plan.folder) / f"{plan.role}.partial")

    def _endpoint(self) -> "RolloutServer | None":
        """Serves the engine over HTTP where `rollout.serve_port` says so; each engine has a port of its own.

        Agents of section `agent` are served too; without `rollout.serve_port` there are no other clients.
        """
        port = self._config.rollout.serve_port
        if port is None and not self._config.agent.is_set:
            return None
        try:
            from offbeat_serve import RolloutServer, ServedModel, ServeSettings
        except ImportError as error:
            line = 'pip install "grpo-async-app[serve]"'
            needs = "agent.command" if port is None else "rollout.serve_port"
            raise BackendError(f"{needs} needs offbeat-serve; install it with: {line}") from error
        settings = ServeSettings(
            port=port + self._role.index if port else 0,
            # A sync may wait for such a request, which must not use up its deadline.
            generate_deadline_s=self._config.async_.sync_deadline_s / 2,
            close_deadline_s=1.0,
        )
        tokenizer = load_tokenizer(self._settings.model_path, self._settings.trust_remote_code)
        model = ServedModel.read(self._settings, SERVED_NAME)
        if "adapter" in self._config.rollout.weight_parts:
            model = replace(model, adapter=SERVED_NAME)
        return RolloutServer(self._engine, tokenizer, model, settings, sessions_only=port is None)

    # ── agents ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def open_session(self, plan: SessionPlan) -> tuple[str, str, str]:
        """Let an agent in: the address for its calls, its key, and the one that posts its reward, or an empty one."""
        assert self._server is not None
        await self._serve()
        session = self._server.sessions.open(plan)
        return f"{self._server.url}/v1", session.key, session.reward_key

    async def wait_session(self, key: str) -> None:
        """Wait until the agent or the deadline has ended a session."""
        assert self._server is not None
        await self._server.sessions.wait_over(key)

    async def take_session(self, key: str) -> RecordedSession | None:
        """End a session: what came of it; None where it was another process's."""
        assert self._server is not None
        session = self._server.sessions.take(key)
        return None if session is None else await asyncio.to_thread(session.result)

    async def drop_session(self, key: str) -> None:
        """End a session that is no longer needed."""
        assert self._server is not None
        self._server.sessions.take(key)

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        return await self._engine.generate(replace(request, adapter=self._adapter))

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self, level: int) -> int:
        """Give memory back; the bytes of main memory that are held still."""
        await self._engine.sleep(level)
        return resident_bytes()

    async def wake(self, tags: list[str]) -> int:
        """Take memory again; the bytes of main memory that are held now."""
        await self._engine.wake(tuple(tags))
        return resident_bytes()

    async def pull_weights(
        self, addresses: list[str], version: int, deadline_s: float, part: WeightPart = "merged"
    ) -> WeightProof:
        """Take `version` from the trainer that listens at an address, and prove to it what arrived.

        There are several addresses where each worker of the engine takes it from a rank of the trainer of its own. A
        base is completed by the adapter that follows; until then nothing is served.
        """
        began_s = time.monotonic()
        if self._trace is not None:
            await self._trace.end()
        if self._workers_receive and part != "adapter":
            transport, engine = self._config.rollout.weight_transport, cast(ReceivingEngine, self._engine)
            proof = await engine.receive_weights(transport, addresses, version, deadline_s, name=str(self._role))
            size = "by its workers"
        else:
            proof, size = await self._receive(addresses[0], version, deadline_s, part)
        log_line(f"took weights: version {version}, {size} in {time.monotonic() - began_s:.1f} s")
        if part != "base":
            await self._serve()
            if self._trace is not None:
                await self._trace.begin(version)
        return proof

    async def _receive(
        self, address: str, version: int, deadline_s: float, part: WeightPart
    ) -> tuple[WeightProof, str]:
        """Take a version in this process, and give it to the engine; the proof, and how much it was."""
        incoming = self._transport.receive(address, version, deadline_s, name=str(self._role), copy=self._copy)
        stream = await asyncio.to_thread(incoming.__enter__)
        try:
            proof = await self._update(stream, version, part)
            await asyncio.to_thread(stream.confirm, proof)
        except BaseException as error:
            incoming.__exit__(type(error), error, error.__traceback__)
            raise
        incoming.__exit__(None, None, None)
        return proof, size_text(stream.plan.num_bytes)

    async def _update(self, stream: WeightStream, version: int, part: WeightPart) -> WeightProof:
        if part != "adapter":
            return await self._engine.update_weights(stream, version)
        adapter = LoraAdapter(name=SERVED_NAME, scale=self._config.engine.lora_scale)
        proof = await self._engine.update_weights(stream, version, adapter=adapter)
        self._adapter = adapter.name
        return proof

    async def inspect(self, ids: Ids, layer: int | None, temperature: float) -> Inspection:
        """Return what the engine computes of one sequence alone, where it says so; nothing from other engines."""
        if not isinstance(self._engine, InspectedEngine):
            return {}
        return await self._engine.inspect(ids, layer, adapter=self._adapter, temperature=temperature)

    async def score_alone(self, ids: Ids, temperature: float) -> Floats | None:
        """[T] log-probabilities of one sequence alone, in an empty cache; None from an engine that does not say."""
        found = await self.inspect(ids, None, temperature)
        return found[LOGPROB][:, 0] if found else None

    async def fingerprints(self, names: list[str]) -> dict[str, Fingerprint]:
        """Return the fingerprints of tensors that the engine holds, where it says so."""
        return dict(await self._engine.fingerprints(names)) if isinstance(self._engine, InspectedEngine) else {}

    async def _serve(self) -> None:
        """Let clients in, once there is the policy in training to serve, and not what the model folder holds."""
        async with self._starting_server:
            if self._server and not self._server.url:
                await self._server.start()
                print(f"serves {SERVED_NAME} at {self._server.url}/v1", flush=True)

    async def health(self) -> EngineHealth:
        return await self._engine.health()

    async def close(self) -> None:
        """Answer pending requests with what has been sampled, and free the engine."""
        if self._trace is not None:
            await self._trace.end()
        if self._server:
            await self._server.close()
        self._transport.close()
        await self._engine.close()
        log_line("ended")
