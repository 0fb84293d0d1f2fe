"""Serves one replica over HTTP, in TensorRT-LLM's environment: `python -m offbeat_rollout_trtllm.serve MODEL`.

It listens on loopback unless told otherwise, and elsewhere only with a token: TensorRT-LLM 1.2 asks nobody who they are
before it loads weights, which come as a pickle.
"""

import argparse
import asyncio
import ipaddress
import json
import os
from typing import Any

from offbeat_rollout_trtllm._app import RolloutApp
from offbeat_rollout_trtllm._http import TOKEN_VARIABLE
from offbeat_rollout_trtllm._local_link import LocalLink
from offbeat_rollout_trtllm._options import TrtllmOptions
from offbeat_rollout_trtllm._surface import import_engine
from offbeat_types import ConfigError, RolloutEngineConfig


async def serve(config: RolloutEngineConfig, *, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Start the engine and serve it until the process is told to end.

    Args:
        config: as for the engine in this process; `options.server` is left out.
        host: address to listen on.
        port: to listen on.

    Raises:
        ConfigError: another address than loopback, and no token.
        BackendError: TensorRT-LLM is not installed, or of a version that is not supported.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not _is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from elsewhere, and whoever reaches it can load weights: set {TOKEN_VARIABLE} to a "
            "secret, for the server and its clients, or listen on 127.0.0.1"
        )
    link = await LocalLink.start(config, TrtllmOptions.parse(config.options))
    openai_server: Any = import_engine("tensorrt_llm.serve").OpenAIServer
    # The first parameter is called llm in some releases and generator in others.
    inner = openai_server(
        link.llm, model=config.model_path, tool_parser=None, server_role=None, metadata_server_cfg=None
    )
    uvicorn: Any = import_engine("uvicorn")  # TensorRT-LLM's own server runs on it
    settings = uvicorn.Config(
        RolloutApp(link, inner.app, token=token), host=host, port=port, log_level="info", timeout_keep_alive=10
    )
    await uvicorn.Server(settings).serve()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description="Serve one replica of a model with TensorRT-LLM for rollouts.")
    parser.add_argument("model", help="Hugging Face model folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of the replica")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the engine, as JSON")
    words = parser.parse_args()
    config = RolloutEngineConfig(
        model_path=words.model, dtype=words.dtype, tensor_parallel=words.tensor_parallel, options=words.options
    )
    asyncio.run(serve(config, host=words.host, port=words.port))


if __name__ == "__main__":
    main()
