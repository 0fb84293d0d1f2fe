"""The other processes of the run: their addresses, and what they report about themselves."""
