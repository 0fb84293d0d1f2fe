"""Supervision: actors as one group, a pool of them that is kept alive, and an actor that is started on call."""
