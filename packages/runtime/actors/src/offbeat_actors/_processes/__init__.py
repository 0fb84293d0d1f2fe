"""Processes of this machine: room for them, their output, and the end of all that they have started."""
