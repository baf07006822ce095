"""What a tenant may try, done against real processes: nothing of the node or others breaks."""
