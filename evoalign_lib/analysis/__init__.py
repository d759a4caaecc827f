"""Pure functions on arrays, counts, state dicts and records: statistics, curves, KL, hacking, the gradient, weights."""
