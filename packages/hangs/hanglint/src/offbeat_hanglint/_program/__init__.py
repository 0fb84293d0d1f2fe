"""Source files to facts, facts to a call graph, and what follows from it."""
