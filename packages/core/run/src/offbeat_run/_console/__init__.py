"""Text for people: printing, quantities as they are read, and the line that says what a command is doing."""
