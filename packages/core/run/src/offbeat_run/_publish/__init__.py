"""A checkpoint for others: its model card, and a folder as the Hub takes it."""
