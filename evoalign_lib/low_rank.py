"""Low-rank members as factors, so that many of them decode in one batch.

A member's matrix is W + sigma E with E = A B^T / sqrt(rank) (the noise law, step 4). So x (W + sigma E)^T is the
product x W^T, which all members share, plus sigma (x B) A^T / sqrt(rank), which costs rank (rows + cols)
multiplications a row instead of rows * cols. `Population` holds the factors of some members; `engines.decode` adds
their part to each row of a batch. Sums are rounded in another order than with a member's own matrices, so near-ties may
be resolved differently.

Source: Sarkar et al., "Evolution Strategies at the Hyperscale" (EGGROLL), arXiv 2511.16652. This differs from their
code (HyperscaleES) in five points:

1. The factors of a member are drawn once per step, not once per token and layer; the noise of a step is never reused
   (their `noise_reuse=0` repeats the noise of the first epoch in every epoch).
2. The update is the paper's, alpha / N sum z E; their code multiplies it once more by sigma and sqrt(N)
   (`update_scaling` "hyperscale" in older ledgers, which are replayed that way).
3. z is standardised over the population (`update_rules`); their code divides by the standard deviation of all scores,
   over members and prompts.
4. All parameters move, those with one dimension by full-rank noise; their code freezes embeddings, head, norms and
   biases by default.
5. Pairs of opposite sign are optional (`antithetic`); in their code the sign is the parity of the member.
"""

from collections.abc import Sequence

import numpy as np

from evoalign_lib import noise
from evoalign_lib.update_rules import Member


class Population:
    """The low-rank factors of some members of a population.

    Args:
        master: float32 (layout.size,), the weights that the members perturb.
        layout: layout of the master.
        members: their keys and signs.
        sigma: standard deviation of the perturbation, weight units.
        distribution: distribution of the noise.
        rank: rank of the noise of matrices, 1 or more.
    """

    def __init__(
        self,
        master: np.ndarray,
        layout: noise.Layout,
        members: Sequence[Member],
        sigma: float,
        distribution: str = "gaussian",
        rank: int = 1,
    ):
        keys = np.array([member.key for member in members], np.uint64)
        scales = np.array([noise.signed_sigma(sigma, member.sign) for member in members])
        self.size = len(members)
        """number of members"""
        self.matrices: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """name -> a (members, rank, rows) times sign, sigma, 1 / sqrt(rank), and b (members, rank, cols), float32"""
        self.vectors: dict[str, np.ndarray] = {}
        """name -> each member's weights of a tensor with one dimension or none, float32 (members, cols)"""
        for entry, weights in zip(layout.entries, layout.views(master).values(), strict=True):
            if noise.is_low_rank(entry.shape, rank):
                a, b = noise.factors(keys, entry.id, entry.shape, rank, distribution=distribution)
                a *= scales[:, None, None]
                self.matrices[entry.name] = a, b
            else:
                eps = noise.vectors(keys, entry.id, weights.size, distribution)
                self.vectors[entry.name] = weights.reshape(-1) + scales[:, None] * eps
