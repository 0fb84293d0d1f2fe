"""Typed configuration: what a class declares, what a file and the command line say, and how it is written down."""
