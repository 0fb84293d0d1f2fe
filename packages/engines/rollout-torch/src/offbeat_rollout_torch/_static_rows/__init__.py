"""Decoding in rows that stay where they are: their cache, recorded and compiled steps, and attention by length."""
