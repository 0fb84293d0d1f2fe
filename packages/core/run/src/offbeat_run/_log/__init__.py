"""The log of a run and of its roles, with live progress and the timeline."""
