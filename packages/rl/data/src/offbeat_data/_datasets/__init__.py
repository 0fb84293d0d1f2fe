"""Data sets for training: prompts, conversations and preferences, rendered and encoded."""
