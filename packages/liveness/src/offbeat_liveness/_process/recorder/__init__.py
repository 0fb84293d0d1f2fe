"""What torch has recorded of the collectives of this process, and when it may be read."""
