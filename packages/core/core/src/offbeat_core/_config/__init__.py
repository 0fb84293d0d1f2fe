"""The configuration machine: settings are declared, and a file with its overrides becomes checked sections."""
