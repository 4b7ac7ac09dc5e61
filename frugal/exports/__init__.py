"""Formats that a trained adapter is written in: one file and one row of `registry.FORMATS` each."""
