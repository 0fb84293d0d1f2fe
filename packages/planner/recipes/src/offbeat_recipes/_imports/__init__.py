"""Options of other frameworks, read from their files and written as a recipe of ours, with what does not carry over."""
