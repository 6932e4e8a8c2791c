"""What a rewritten module promises to be: an ordinary module."""
