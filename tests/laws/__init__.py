"""Laws that every registered pass obeys, alone and after any other."""
