"""Supervised fine-tuning of language models, from a command line."""

__all__: list[str] = []
