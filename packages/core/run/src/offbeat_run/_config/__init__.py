"""Configuration that every application has: its sections, names in it for people, and mistakes found in it."""
