"""One command from start to end: train, evaluate and preview, and what a run records."""
