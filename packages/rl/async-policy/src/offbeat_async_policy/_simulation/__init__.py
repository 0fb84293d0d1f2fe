"""The simulator: the real policy on a simulated clock, and what is made of its scenarios and reports."""
