"""The controller of cluster-wide addresses: what no single node can do.

It makes pools from definitions (`pool_maker`), decides how each is cut into blocks (`plans`) and
writes the pools' statuses (`pool_status`). It frees the blocks of dead nodes (`machines` has the
proofs, `reclaim` the acts). `rounds` does all of that once; `process` does it again and again while
`leadership` says that this process leads. Nothing depends on it for safety: nodes claim and return
blocks without it. docs/controller.md has what an administrator needs.
"""
