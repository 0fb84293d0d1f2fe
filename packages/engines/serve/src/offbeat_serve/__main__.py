"""The command `offbeat-serve`, or `python -m offbeat_serve`."""

import argparse
import asyncio
import dataclasses
import json
import signal
import sys
import typing
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Final, TypeVar

from offbeat_core import (
    METADATA_KEY,
    ConfigError,
    DeadlineError,
    OffbeatError,
    RolloutEngine,
    RolloutEngineConfig,
    Setting,
    defer_device_backends,
    load_backend,
    local_model,
    printable,
)
from offbeat_data import load_tokenizer
from offbeat_http import raise_descriptor_limit
from offbeat_serve._server import RolloutServer
from offbeat_serve._settings import TOKEN_VARIABLE, ServedModel, ServeSettings, read_token

T = TypeVar("T", ServeSettings, RolloutEngineConfig)
INTERRUPTED: Final = 130
DESCRIPTION: Final = f"""Serve a model folder as an OpenAI-compatible endpoint, with any rollout engine of offbeat.
The token comes from a file or from {TOKEN_VARIABLE}, never from the command line, which others can read."""
EXIT_CODES: Final = "exit codes: 0 ended by Ctrl-C or SIGTERM, 2 a setting or the model is wrong, 3 failed, 4 too slow"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    raise_descriptor_limit()
    defer_device_backends()
    words = vars(_parser().parse_args(argv))
    try:
        settings = _read_settings(ServeSettings, words)
        config = _read_settings(RolloutEngineConfig, {**words, "model_path": local_model(words["model"])})
        asyncio.run(_serve(words["backend"], words["model_name"], settings, config))
    except OffbeatError as error:
        print(printable(f"offbeat-serve: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED  # while the engine was loading, or for the second time
    return 0


async def _serve(backend: str, model_name: str, settings: ServeSettings, config: RolloutEngineConfig) -> None:
    """Start the engine, serve it until a signal asks it to end, close it."""
    token = read_token(settings)  # before a model is loaded for nothing
    if sys.stderr.isatty():  # elsewhere a wrong setting is one line
        print(printable(f"offbeat-serve: loading {config.model_path} ..."), file=sys.stderr, flush=True)
    tokenizer = await asyncio.to_thread(load_tokenizer, config.model_path, config.trust_remote_code)
    model = ServedModel.read(config, model_name)
    engine = await _start(backend, config, settings.start_deadline_s)
    try:
        ending = _catch_signals()
        async with RolloutServer(engine, tokenizer, model, settings) as server:
            print(printable(f"offbeat-serve: {model.name} at {server.url}/v1 (Ctrl-C ends)"), flush=True)
            if not token:
                notice = f"every user of this machine is answered; {TOKEN_VARIABLE} makes it ask for a token"
                print(f"offbeat-serve: {notice}", file=sys.stderr)
            await ending.wait()
    finally:
        await engine.close()


async def _start(backend: str, config: RolloutEngineConfig, deadline_s: float) -> RolloutEngine:
    engine_type = load_backend("offbeat.rollout", backend)
    try:
        async with asyncio.timeout(deadline_s):
            engine: RolloutEngine = await engine_type.create(config)
    except TimeoutError:
        advice = "raise --start-deadline-s"
        raise DeadlineError("serve.start", f"the {backend} engine to load", deadline_s, advice) from None
    return engine


def _catch_signals() -> asyncio.Event:
    """Set at the first Ctrl-C or SIGTERM; the next one ends the process."""
    ending, loop, caught = asyncio.Event(), asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def notify() -> None:
        ending.set()
        for number in caught:
            loop.remove_signal_handler(number)

    for number in caught:
        loop.add_signal_handler(number, notify)
    return ending


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offbeat-serve",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        allow_abbrev=False,  # --token SECRET is an error, and not a file named SECRET
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{parser.prog} {version(parser.prog)}")
    parser.add_argument("model", metavar="MODEL_FOLDER", help="Hugging Face model folder")
    parser.add_argument("--backend", default="torch", help="rollout engine: torch, vllm, or another that is installed")
    parser.add_argument(
        "--model-name", default="", metavar="NAME", help="what clients call it; empty: the folder's name"
    )
    _add_settings(parser.add_argument_group("server"), ServeSettings)
    _add_settings(parser.add_argument_group("engine"), RolloutEngineConfig)
    return parser


def _add_settings(group: "argparse._ArgumentGroup", settings: type[ServeSettings] | type[RolloutEngineConfig]) -> None:
    """An option for every setting that has a default, documented and checked as it is declared."""
    types = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        setting: Setting = field.metadata[METADATA_KEY]
        option, kind = f"--{field.name.replace('_', '-')}", types[field.name]
        if field.default is True or field.default is False:
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default, help=setting.doc)
        elif field.default is not dataclasses.MISSING:
            metavar = (setting.unit or kind.__name__).upper()
            group.add_argument(option, type=kind, default=field.default, metavar=metavar, help=setting.doc)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
            reader = partial(_read_json, kind=type(default))
            group.add_argument(option, type=reader, default=default, metavar="JSON", help=setting.doc)


def _read_json(text: str, kind: type) -> Any:
    """Return an object or a list in JSON, as the setting's default is."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        wanted = 'an object, such as {"a": 1}' if kind is dict else 'a list, such as ["a"]'
        raise argparse.ArgumentTypeError(f"must be JSON, {wanted}: got {text!r:.80}")
    return value


def _read_settings(settings: type[T], words: dict[str, Any]) -> T:
    fields = dataclasses.fields(settings)
    for field in fields:
        if complaint := field.metadata[METADATA_KEY].complaint(words[field.name]):
            raise ConfigError(f"--{field.name.replace('_', '-')} must be {complaint}, got {words[field.name]!r}")
    return settings(**{field.name: words[field.name] for field in fields})


if __name__ == "__main__":
    sys.exit(main())
