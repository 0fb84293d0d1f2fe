"""Command lines of the applications: their boundary, the signals that end them, and examination of the machine."""
