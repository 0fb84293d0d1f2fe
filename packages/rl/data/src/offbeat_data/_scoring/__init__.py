"""Rewards of completions: by name, functions of a user, a judge, a sandbox for code."""
