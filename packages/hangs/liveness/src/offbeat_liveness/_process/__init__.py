"""What this process does: its threads, waits, groups, and whether it moves."""
