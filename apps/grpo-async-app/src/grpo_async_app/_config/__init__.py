"""Settings of a run, its placement and needs, and what is wrong with it before it starts."""
