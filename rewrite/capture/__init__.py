"""Turn a model into graphs, one for each region, by running it once on fake tensors."""
