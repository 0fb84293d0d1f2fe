"""What a model acts in: environments, the tools and servers behind them, and the episodes played with them."""
