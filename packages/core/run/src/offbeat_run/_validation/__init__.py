"""Validations: what each item was answered, the estimates papers report, and what changed between two."""
