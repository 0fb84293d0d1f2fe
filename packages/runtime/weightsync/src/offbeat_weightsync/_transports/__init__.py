"""The transports, a module each: the trainer's side, the engine's side, and when it can be used."""
