"""The report of a run: findings with their level, without those that a comment or a baseline leaves out."""
