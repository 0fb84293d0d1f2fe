"""Readings of this process: its threads, waits, groups, and whether it moves."""
