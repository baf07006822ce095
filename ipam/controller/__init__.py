"""The controller of cluster-wide addresses: what no single node can do.

It makes pools from definitions (`definitions`), decides how each is cut into blocks (`block_sizes`)
and writes the pools' statuses (`pool_status`). It frees the blocks of dead nodes (`death_proofs`
has the proofs, `reclaim` the acts), and it alone knows whereabouts' objects
(`whereabouts_coexistence`). `rounds` does all of that once; `leader` does it again and again while
it leads. Nothing depends on it for safety: nodes claim and return blocks without it.
docs/controller.md has what an administrator needs.
"""
