"""Advantages: their estimators, the advantage of every token, and the critic of PPO."""
