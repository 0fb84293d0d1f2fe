"""Roles in the processes of a run: trainer, rollout and others. Started by the launcher, by name."""
