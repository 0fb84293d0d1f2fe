"""The driver of a run: it starts the roles, drives the loop, and writes down how it goes."""
