"""The log of a run: what is written down while it runs, its alarms, and its activity as text."""
