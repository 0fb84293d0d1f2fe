"""What completions are worth: rewards by name, functions of a user, a judge, a sandbox for code."""
