"""The command line: arguments to a configuration to one call of the public functions."""
