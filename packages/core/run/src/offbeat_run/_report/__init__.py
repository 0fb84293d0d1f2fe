"""report.html: its page and its figures."""
