"""State of a rank: on disk, and in the memory of another rank."""
