"""Planning to a byte budget: what each node costs, what to keep of each block, and which blocks keep what."""
