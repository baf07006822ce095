"""The controller of cluster-wide addresses does work that no single node can do.

`definitions` makes pools. `block_sizes` decides the block size of each pool, and `pool_status`
makes the pool's status. `death_proofs` and `reclaim` free the blocks of dead nodes.
`whereabouts_coexistence` reads and changes whereabouts' objects. `rounds` does one round of this
work, and `leader` repeats rounds while this process leads. Safety does not depend on the
controller, because nodes claim and return blocks without it. docs/operate/controller.md is for
administrators.
"""
