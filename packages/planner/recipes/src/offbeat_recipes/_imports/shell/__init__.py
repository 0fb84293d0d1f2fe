"""Follows a shell script as bash would, and gives the words of the commands it would start. Nothing is run."""
