"""The rules, one file per family, the finding that they report, and their pages."""
