"""Reading of files: which ones, by how many processes, and what is kept of them between runs."""
