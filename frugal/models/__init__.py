"""Models: find a base, read its weights, build it with adapters, replace modules that are proven equal."""
