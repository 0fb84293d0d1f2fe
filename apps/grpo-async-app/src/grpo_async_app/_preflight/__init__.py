"""Checks of a run before it starts: the model, the data, the machine, the placement, and what each costs in memory."""
