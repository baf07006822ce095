"""What a tenant tries: whoever may write network configurations and annotate pods, and no more.

Each test is one attack, against plugins as a runtime calls them. The node's rules are the default
ones unless a test says which it changes.
"""
