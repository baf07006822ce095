"""The controller of cluster-wide addresses: work that no single node can do.

It makes pools from definitions (`definitions`), decides how each is cut into blocks
(`block_sizes`), and writes the pools' statuses (`pool_status`). It frees the blocks of dead nodes
(`death_proofs`, `reclaim`). It alone reads whereabouts' objects (`whereabouts_coexistence`).
`rounds` does all of that once, `leader` repeats it while it leads. Safety does not depend on the
controller: nodes claim and return blocks without it. Administrators read
docs/operate/controller.md.
"""
