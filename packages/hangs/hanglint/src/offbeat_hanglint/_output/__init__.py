"""The forms that a report takes, one file each."""
