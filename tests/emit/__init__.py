"""From tagged programs to modules."""
