"""Supervised fine-tuning of language models, from a command line."""

from typing import TYPE_CHECKING

from offbeat_core import load_lazily

if TYPE_CHECKING:
    from sft_app._config import SftConfig

__all__ = ["SftConfig"]

__getattr__, __dir__ = load_lazily(__name__, {"_config": "SftConfig"})
