"""Options of other frameworks, written as a configuration of this one, with everything that does not carry over."""
