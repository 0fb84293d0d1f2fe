"""Batch systems: what Slurm, SkyPilot and Kubernetes take to start a run."""
