"""What runs in the processes of a run: trainer and rollout. Started by the launcher, by name."""
