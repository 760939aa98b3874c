"""From seeds to ready mini-batches: neighbour sampling on one rank or by several together, features, loader."""
