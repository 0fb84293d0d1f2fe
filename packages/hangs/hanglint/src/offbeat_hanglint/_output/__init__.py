"""The forms that a report takes, one file each, and text made fit for a terminal."""
