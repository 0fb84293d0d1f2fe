"""The folder of a model: its files, their digests, its tensors and how it cuts images."""
