"""Layers of megatron-core that this engine replaces, or changes."""
