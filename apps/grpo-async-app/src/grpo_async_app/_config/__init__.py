"""Settings of a run: its sections, sources of prompts and validation sets, and what goes together."""
