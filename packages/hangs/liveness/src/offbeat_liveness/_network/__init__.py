"""The other processes of the run: who they are, and what they say of themselves."""
