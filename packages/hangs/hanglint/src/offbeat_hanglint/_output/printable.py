"""Names and lines of the files that are read, made fit for a terminal and a log."""


def printable(text: str) -> str:
    """Write control characters as escapes: a terminal would obey them, and what is read may come from anywhere."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
