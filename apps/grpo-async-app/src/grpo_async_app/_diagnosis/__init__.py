"""Why trainer and rollout engines give tokens different log-probabilities."""
