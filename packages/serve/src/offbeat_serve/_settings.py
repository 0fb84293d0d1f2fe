"""What a user may set of the server, and what it serves."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from offbeat_types import ConfigError, ModelError, RolloutEngineConfig, setting


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Where the endpoint listens, how much it takes on, and how long it waits.

    Raises:
        ConfigError: one request may ask for more samples than may be in flight.
    """

    host: str = setting("127.0.0.1", "Address to listen on; any but loopback needs a token.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    token_file: str = setting("", "File that holds the token; empty: OFFBEAT_SERVE_TOKEN where it is set.")
    max_in_flight: int = setting(1024, "Samples asked for and not answered yet; more get a 429.", "samples", ge=1)
    max_prompts: int = setting(16, "Prompts of one request at most.", "prompts", ge=1)
    max_samples: int = setting(64, "n: samples of one prompt at most.", "samples", ge=1)
    max_body_bytes: int = setting(4 * 2**20, "Longer request bodies get a 413.", "bytes", ge=1024)
    default_max_tokens: int = setting(
        0, "Longest completion where a request names none; 0: 16, and for a chat all that fits.", "tokens", ge=0
    )
    start_deadline_s: float = setting(600.0, "Longest wait of the command for the engine to load the model.", "s", gt=0)
    body_deadline_s: float = setting(30.0, "Longest wait for a request's body.", "s", gt=0)
    generate_deadline_s: float = setting(600.0, "Longest wait for the engine to finish a request.", "s", gt=0)
    abort_deadline_s: float = setting(10.0, "Longest wait for the engine to end a request.", "s", gt=0)
    health_deadline_s: float = setting(10.0, "Longest wait for the engine to say how it is.", "s", gt=0)
    close_deadline_s: float = setting(10.0, "Time for requests in flight to end when the server closes.", "s", gt=0)

    def __post_init__(self) -> None:
        if self.max_prompts * self.max_samples > self.max_in_flight:
            raise ConfigError(
                f"max_prompts times max_samples, what one request may ask for, must be at most max_in_flight: "
                f"got {self.max_prompts} times {self.max_samples}, and {self.max_in_flight}"
            )


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model behind the endpoint.

    Args:
        name: what clients call it.
        max_model_len: prompt and completion together at most, tokens.
        vocab_size: ids are below this; it may be more than the tokenizer has.
    """

    name: str
    max_model_len: int
    vocab_size: int

    @classmethod
    def read(cls, config: RolloutEngineConfig, name: str = "") -> Self:
        """Read the model folder of an engine.

        Args:
            config: the engine's.
            name: what clients call the model; empty: the folder's name.

        Raises:
            ModelError: config.json is missing or corrupt, or names no vocabulary.
        """
        folder = Path(config.model_path).expanduser()
        outer = _read_config(folder / "config.json")
        inner = outer.get("text_config")
        text = {**outer, **inner} if isinstance(inner, dict) else outer
        vocab_size, positions = text.get("vocab_size"), text.get("max_position_embeddings")
        if not isinstance(vocab_size, int):
            raise ModelError(f"{folder / 'config.json'} needs vocab_size, an integer: got {vocab_size!r}")
        limits = [config.max_model_len, *([positions] if isinstance(positions, int) else [])]
        return cls(name=name or folder.resolve().name, max_model_len=min(limits), vocab_size=vocab_size)


def _read_config(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; give a Hugging Face model folder") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} needs a JSON object and holds a {type(content).__name__}")
    return content
