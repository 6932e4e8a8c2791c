"""How the values of a recompute segment are had again in the backward."""
