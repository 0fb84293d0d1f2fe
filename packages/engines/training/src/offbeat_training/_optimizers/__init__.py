"""Optimizers, and the formats in which they hold their moments."""
