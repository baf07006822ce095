"""Moving over from whereabouts: what its objects hold is foreign to the blocks of our nodes.

Its objects are read only for pools whose `compat` is not None (docs/whereabouts.md). They are
never converted: they shrink as pods of whereabouts end, so the way back stays open.
"""
