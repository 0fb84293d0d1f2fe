"""The run folder: its names, its lock, its sessions, and its files of lines."""
