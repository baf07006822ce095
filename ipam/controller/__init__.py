"""The controller of cluster-wide addresses: work that no single node can do.

It makes pools from definitions (`definitions`), decides the block size of each pool
(`block_sizes`), and writes the pools' statuses (`pool_status`). It frees the blocks of dead nodes
(`death_proofs`, `reclaim`). Only the controller reads whereabouts' objects
(`whereabouts_coexistence`). `rounds` does one round of this work. `leader` repeats rounds while
this process leads. Safety does not depend on the controller: nodes claim and return blocks without
it. docs/operate/controller.md is for administrators.
"""
