"""Training: what one step computes, the order of rows, the schedule, the loop, and what is shown and logged meanwhile.

This layer writes no checkpoints (`frugal.checkpoints` is above it): the loop calls what it is given.
"""
