"""Asynchronous GRPO for language models, from a command line."""

__all__: list[str] = []
