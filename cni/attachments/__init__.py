"""The journal: what has been attached, by whom, and how to undo it.

One versioned file per attachment, on disk before the first change to the kernel and gone only
when nothing is left to undo. `entry` is what a file says, `journal` the directory of them.
"""
