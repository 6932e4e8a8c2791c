"""Turn a tagged program back into an ordinary module."""
