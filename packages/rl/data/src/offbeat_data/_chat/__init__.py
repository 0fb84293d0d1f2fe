"""Chat templates: rendering, the tokens that they write around turns, and the thoughts that they open."""
