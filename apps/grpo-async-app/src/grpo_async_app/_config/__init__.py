"""What a run is told, where it goes, what it needs, and what is wrong with it before it starts."""
