"""Optimizers for rewritten models: parameter groups, state in 8 bits, and states that are checked when loaded."""
