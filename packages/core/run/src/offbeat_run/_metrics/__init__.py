"""Metrics: their names, their file, series for a report, and other programs that get them."""
