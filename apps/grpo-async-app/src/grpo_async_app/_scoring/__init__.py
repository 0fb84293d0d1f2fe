"""Scoring, as the driver sees it: processes that score, a process that waits for judges, and a reward model."""
