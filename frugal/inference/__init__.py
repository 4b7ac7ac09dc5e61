"""Load a finished run or a base, generate, chat."""
