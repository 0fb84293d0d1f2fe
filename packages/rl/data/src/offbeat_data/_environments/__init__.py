"""Environments: what a model acts in, the tools and servers behind them, and the episodes played with them."""
