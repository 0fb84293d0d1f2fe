"""A sandbox for programs of a model: its walls and limits, and the files that run inside."""
