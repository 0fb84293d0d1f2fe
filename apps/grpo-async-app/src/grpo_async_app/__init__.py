"""Asynchronous GRPO for language models, from a command line."""

from typing import TYPE_CHECKING

from offbeat_core import load_lazily

if TYPE_CHECKING:
    from grpo_async_app._config.sections import GrpoConfig

__all__ = ["GrpoConfig"]

__getattr__, __dir__ = load_lazily(__name__, {"_config.sections": "GrpoConfig"})
