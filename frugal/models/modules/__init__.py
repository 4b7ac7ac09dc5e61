"""Modules that take the place of transformers' own: same children, same parameter names, frugal operations inside."""
