"""Text and JSON of what the library finds. Takes plain records; imports no torch."""
