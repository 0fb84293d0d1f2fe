"""The driver of a run: it samples, drives the loop, validates, and writes down how it goes."""
