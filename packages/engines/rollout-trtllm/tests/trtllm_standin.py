"""Stands where TensorRT-LLM is: the part of its interface that the adapter calls, written anew for tests.

Names, parameters, fields, tags and routes are those of `recorded/`; a contract test compares them. The model behind
it is the real one under transformers. It keeps TensorRT-LLM's ways that an adapter must live with: names that it does
not know are ignored, a request in flight ends before weights change, stop strings are not looked for across tokens,
`/update_weights` answers 500 where a worker fails, and what a request leaves out is the C++ runtime's default, by which
it decodes greedily.
"""

import asyncio
import base64
import contextlib
import inspect
import json
import os
import random
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from trtllm_vision_standin import InputProcessor, read_prompt

VERSION = "1.2.1"

# defaultDecodingParams.h of cpp/include/tensorrt_llm/layers (21c8b6d4, 30f34f00), samplingTopKKernels.h: see `cut`.
DEFAULT_TOP_K, DEFAULT_TOP_P, TOP_K_MAX = 0, 0.0, 1024


@dataclass
class Faults:
    """What goes wrong, on demand.

    Args:
        partial: whether the model loads in parts; None makes the question fail.
        refuse_flush, die_at_flush: number of the flush, counted from 0 in each update.
        delay_s: before each flush is loaded.
        spoil_flush: number of the flush in which the last worker opens other bytes.
        token_delay_s: before each token.
    """

    partial: bool | None = True
    refuse_flush: int | None = None
    die_at_flush: int | None = None
    delay_s: float = 0.0
    spoil_flush: int | None = None
    token_delay_s: float = 0.0


class Record:
    """What was asked of the engine."""

    def __init__(self) -> None:
        self.num_questions = self.num_resets = 0
        self.flushes: list[list[str]] = []
        self.weights: dict[str, list[Any]] = {}
        self.tags: list[list[Any]] = []


class ExecutorMemoryType(StrEnum):
    """Memory tags."""

    SAMPLER = "sampler"
    DRAFTER = "drafter"
    GUIDED_DECODER = "guided_decoder"
    SPEC_RESOURCES = "spec_resource_manager"
    INIT_KV_CACHE = "_no_capture_init_kv_cache"
    INIT_EXTRA_RESOURCES = "_no_capture_init_extra_resources"
    MODEL_EXTRA = "model_extra"
    EXTRA_RESOURCES = "executor_extra"
    KV_CACHE = "kv_cache"
    MODEL_ENGINE_MAIN = "model"
    MODEL_ENGINE_DRAFT = "draft_model"


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        """What `_validate` and the C++ SamplingConfig refuse: cpp/tensorrt_llm/executor/samplingConfig.cpp."""
        if not 0 < (1.0 if self.top_p is None else self.top_p) <= 1 or (self.top_k or 0) < 0:
            raise ValueError(f"require 0 < top_p <= 1 and top_k >= 0, got {self.top_p} and {self.top_k}")
        if not 0 <= (self.seed or 0) < 1 << 64:
            raise TypeError(f"a seed is a uint64_t, got {self.seed}")

    def cut(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Set to 0 what is never drawn.

        Source: regularizeTopKTopP in cpp/tensorrt_llm/kernels/samplingTopKKernels.h (stored 264519637), called by
        setup() of topKSamplingLayer.cpp (89fd9b74) and topPSamplingLayer.cpp (57fc4a8a); SamplingConfig.validate in
        cpp/include/tensorrt_llm/runtime/samplingConfig.h (09e2cf77) for temperature 0.
        """
        top_k = DEFAULT_TOP_K if self.top_k is None else min(self.top_k, TOP_K_MAX)
        top_p = DEFAULT_TOP_P if self.top_p is None else self.top_p
        if self.temperature == 0 or (top_k == 0 and top_p == 0):
            top_k = 1
        if top_k > 0 and top_p == 0:
            top_p = 1.0
        held, ids = probabilities.sort(descending=True)
        held = held[: top_k or None]
        if top_p < 1:
            held = held[held.cumsum(0) - held < top_p * float(held.sum())]
        return torch.zeros_like(probabilities).index_copy(0, ids[: len(held)], held)


@dataclass(kw_only=True)
class KvCacheConfig:
    """The cache."""

    enable_block_reuse: bool = True
    free_gpu_memory_fraction: float = 0.9
    dtype: str = "auto"


@dataclass(slots=True)
class Logprob:
    """Of one token."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """What a sample has become."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerationResult:
    """A request. It runs whether or not a caller listens: iterate for its tokens."""

    def __init__(self, llm: "AsyncLLM", inputs: Any, params: SamplingParams) -> None:
        self._llm, self._params = llm, params
        self._prompt_ids, self._images = read_prompt(llm, inputs)
        self.outputs = [CompletionOutput(0)]
        self._aborted, self._changed = False, asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._prompt_ids

    def abort(self) -> None:
        self._aborted = True

    def __aiter__(self) -> Any:
        return self._steps()

    async def _steps(self) -> Any:
        while self.outputs[0].finish_reason is None:
            await self._changed.wait()
            self._changed.clear()
            yield self

    async def _run(self) -> None:
        self._llm.num_running += 1
        try:
            seed = self._llm.seeds.getrandbits(64) if self._params.seed is None else self._params.seed
            generator = torch.Generator().manual_seed(seed)
            ids, cache = torch.tensor([self._prompt_ids]), None
            while self.outputs[0].finish_reason is None:
                await asyncio.sleep(self._llm.faults.token_delay_s)
                if self._aborted:
                    self.outputs[0].finish_reason = "cancelled"
                else:
                    ids, cache = self._step(ids, cache, generator)
                self._changed.set()
        finally:
            self._llm.num_running -= 1

    def _step(self, ids: Any, cache: Any, generator: torch.Generator) -> tuple[Any, Any]:
        output, params = self.outputs[0], self._params
        with torch.no_grad():
            passed = self._pass(ids, cache)
        logprobs = torch.log_softmax(passed.logits[0, -1].float() / (params.temperature or 1.0), -1)
        top = int(logprobs.argmax())
        token = int(torch.multinomial(params.cut(logprobs.exp()), 1, generator=generator))
        output.token_ids.append(token)
        output.logprobs.append({each: Logprob(float(logprobs[each])) for each in (top, token)})
        if token in (params.stop_token_ids or ()):
            output.finish_reason, output.stop_reason = "stop", token
        elif len(output.token_ids) >= params.max_tokens:
            output.finish_reason = "length"
        if self._llm.input_processor is not None:
            return torch.cat([ids, torch.tensor([[token]])], 1), None
        return torch.tensor([[token]]), passed.past_key_values

    def _pass(self, ids: Any, cache: Any) -> Any:
        """With vision all tokens anew: the model of transformers keeps the places of one request's images alone."""
        processor = self._llm.input_processor
        if processor is None:
            return self._llm.model(ids, past_key_values=cache, use_cache=True)
        return self._llm.model(**processor.model_inputs(ids, self._images), use_cache=False)


class WholeModel:
    """A model that TensorRT-LLM cannot load in parts."""

    def load_weights(self, weights: dict[str, Any]) -> None:
        raise NotImplementedError


class PartialModel:
    """A model that it can."""

    def load_weights(self, weights: dict[str, Any], allow_partial_loading: bool = False) -> None:
        raise NotImplementedError


class ModelLoader:
    """Loads what it knows, and says nothing of the rest."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm

    def reload(self, model: Any, weights: dict[str, Any], allow_partial_loading: bool = False) -> None:
        if allow_partial_loading and "allow_partial_loading" not in inspect.signature(model.load_weights).parameters:
            raise TypeError("load_weights() got an unexpected keyword argument 'allow_partial_loading'")
        self._llm.record.flushes.append(sorted(weights))
        self._llm.record.weights |= {name: tensor.flatten()[:4].tolist() for name, tensor in weights.items()}
        if self._llm.model is not None:
            self._llm.model.load_state_dict(weights, strict=False)
            self._llm.model.tie_weights()


class StandinWorker:
    """One rank of the engine."""

    def __init__(self, llm: "AsyncLLM", device_id: int) -> None:
        self._llm, self.device_id = llm, device_id
        self.engine = SimpleNamespace(
            model_engine=SimpleNamespace(model=None, model_loader=ModelLoader(llm)), reset_prefix_cache=self._reset
        )

    def _reset(self) -> None:
        self._llm.record.num_resets += 1

    def choose_model(self) -> None:
        self.engine.model_engine.model = PartialModel() if self._llm.faults.partial else WholeModel()


class WorkerExtension:
    """Loads weights from handles. The handles are a file's name and what lies where in it."""

    def update_weights(self, ipc_handles: dict[str, str] | None = None) -> None:
        if ipc_handles is None:
            self.engine.reset_prefix_cache()
            return
        device_uuid = get_device_uuid(self.device_id)
        if device_uuid not in ipc_handles:
            raise ValueError(f"Device UUID {device_uuid} not found in ipc_handles")
        weights = open_handles(ipc_handles[device_uuid])
        faults = self._llm.faults
        if faults.spoil_flush == self._llm.flush and self.device_id == len(self._llm.workers) - 1:
            next(iter(weights.values())).view(-1)[0] += 1
        self.engine.model_engine.model_loader.reload(
            self.engine.model_engine.model, weights, allow_partial_loading=True
        )


def get_device_uuid(device_idx: int) -> str:
    return f"GPU-standin-{device_idx}"


class AsyncLLM:
    """The engine."""

    def __init__(
        self,
        placement_groups: Any = None,
        placement_bundle_indices: Any = None,
        per_worker_gpu_share: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.arguments, self.faults, self.record = kwargs, Faults(), Record()
        self.num_running, self.flush = 0, 0
        # DefaultDecodingParams::generateRandomSeed: one generator, seeded with 0 in every process.
        self.seeds = random.Random(0)
        folder = Path(kwargs["model"])
        self.model: Any = None
        self.tokenizer: Any = None
        self.input_processor: InputProcessor | None = None
        if (folder / "config.json").is_file():
            self._load(folder, skip_tokenizer=kwargs["skip_tokenizer_init"])
        module, _, name = kwargs["ray_worker_extension_cls"].rpartition(".")
        extension = getattr(import_module(module), name)
        worker = type("Worker", (StandinWorker, extension), {})
        self.workers = [worker(self, index) for index in range(kwargs["tensor_parallel_size"])]

    def _load(self, folder: Path, *, skip_tokenizer: bool) -> None:
        transformers: Any = import_module("transformers")
        if not skip_tokenizer:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        kind = transformers.AutoModelForCausalLM
        if hasattr(transformers.AutoConfig.from_pretrained(folder), "vision_config"):
            kind = transformers.AutoModelForImageTextToText
            self.input_processor = InputProcessor(folder, self.tokenizer)
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()

    def __await__(self) -> Any:
        return self._ready().__await__()

    async def _ready(self) -> "AsyncLLM":
        return self

    def generate_async(
        self, inputs: Any, sampling_params: Any = None, lora_request: Any = None, streaming: bool = False
    ) -> GenerationResult:
        assert streaming, "the stand-in streams"
        return GenerationResult(self, inputs, sampling_params)

    async def release(self, tags: list[str]) -> None:
        self.record.tags.append(["sleep", *[ExecutorMemoryType(tag).value for tag in tags]])

    async def resume(self, tags: list[str]) -> None:
        self.record.tags.append(["wakeup", *[ExecutorMemoryType(tag).value for tag in tags]])

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None, unique_reply_rank: int | None = None
    ) -> list[Any]:
        for worker in self.workers:
            worker.choose_model()
        if method == "supports_partial_loading":
            self.record.num_questions += 1
            if self.faults.partial is None:
                raise RuntimeError("the model loader does not answer")
        if method == "begin_weights":
            self.flush = 0
        if method == "update_weights":
            while self.num_running:  # control_action drains what is in flight
                await asyncio.sleep(0.005)
            if args[0] is not None:
                await self._misbehave()
        answers = [getattr(worker, method)(*args) for worker in self.workers]
        if method == "update_weights" and args[0] is not None:
            self.flush += 1
        return answers

    async def _misbehave(self) -> None:
        await asyncio.sleep(self.faults.delay_s)
        if self.flush == self.faults.die_at_flush:
            os._exit(9)
        if self.flush == self.faults.refuse_flush:
            raise RuntimeError(f"flush {self.flush} does not fit")

    def shutdown(self) -> None:
        self.record.tags.append(["shutdown"])


class OpenAIServer:
    """Its HTTP application: the stock routes that the adapter uses, and two for tests."""

    def __init__(self, llm: AsyncLLM, model: str, tool_parser: Any, server_role: Any, metadata_server_cfg: Any) -> None:
        self.llm = llm

    async def app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = (await receive()).get("body", b"")
        status, answer = await self._answer(scope["method"], scope["path"], json.loads(body) if body else {})
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        done = {"status": "success"}
        try:
            match method, path:
                case "GET", "/version":
                    return 200, {"version": VERSION}
                case "GET", "/health":
                    return 200, None
                case "POST", "/update_weights":
                    await self.llm.collective_rpc("update_weights", args=(body["weights"],))
                    return 200, done
                case "POST", "/release_memory":
                    await self.llm.release(body["tags"])
                    return 200, done
                case "POST", "/resume_memory":
                    await self.llm.resume(body["tags"])
                    return 200, done
                case "POST", "/standin/faults":
                    self.llm.faults, self.llm.record = Faults(**body), Record()
                    return 200, done
                case "GET", "/standin/record":
                    return 200, {**vars(self.llm.record), "num_running": self.llm.num_running}
        except Exception as error:  # noqa: BLE001 - as a web framework answers
            return 500, {"error": f"{type(error).__name__}: {error}"}
        return 404, {"error": f"no route {method} {path}"}


@dataclass
class Config:
    """Of the web server, uvicorn, on which TensorRT-LLM's runs."""

    app: Any
    host: str
    port: int
    log_level: str
    timeout_keep_alive: int


class Server:
    """As much of uvicorn as HTTP/1.0 needs."""

    listening = staticmethod(print)

    def __init__(self, config: Config) -> None:
        self._config = config

    async def serve(self) -> None:
        server = await asyncio.start_server(self._handle, self._config.host, self._config.port)
        Server.listening(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, path, _ = (await reader.readline()).decode().split()
        headers = []
        while line := (await reader.readline()).strip():
            name, _, value = line.partition(b":")
            headers.append((name.lower(), value.strip()))
        content = await reader.readexactly(int(dict(headers).get(b"content-length", 0)))

        events = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not events:
                await reader.read()  # until the client closes
            return events.pop() if events else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                writer.write(f"HTTP/1.0 {message['status']} .\r\n\r\n".encode())
            else:
                writer.write(message["body"])
            with contextlib.suppress(ConnectionError):  # uvicorn says nothing either when the client has gone
                await writer.drain()

        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        await self._config.app(scope, receive, send)


def install() -> None:
    """Make `import tensorrt_llm` find this, in this process."""
    contents: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {"AsyncLLM": AsyncLLM, "SamplingParams": SamplingParams, "__version__": VERSION},
        "tensorrt_llm.llmapi": {"KvCacheConfig": KvCacheConfig, "SamplingParams": SamplingParams},
        "tensorrt_llm.llmapi.rlhf_utils": {"WorkerExtension": WorkerExtension},
        "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.utils": {"get_device_uuid": get_device_uuid},
        "tensorrt_llm.serve": {"OpenAIServer": OpenAIServer},
        "uvicorn": {"Config": Config, "Server": Server},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content, __path__=[])
        sys.modules[name] = module


def open_handles(text: str) -> dict[str, torch.Tensor]:
    """What `HostHandles.pack` wrote."""
    described = json.loads(base64.b64decode(text))
    memory = bytearray(Path(described["file"]).read_bytes())
    weights = {}
    for name, dtype, shape, start, num_bytes in described["tensors"]:
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)
        weights[name] = flat.clone().view(getattr(torch, dtype)).view(shape)
    return weights
