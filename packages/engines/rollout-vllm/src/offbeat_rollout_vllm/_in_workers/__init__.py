"""Code that runs in vLLM's workers: it loads what comes, and reads what serves."""
