"""Pure functions on arrays, counts, state dicts and records: statistics, curves, KL, hacking, gradients, weights."""
