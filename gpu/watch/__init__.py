"""Compares the use of each GPU with the limits of the groups.

`usage_watch` is the loop. `attribution` finds the group of each process, `enforcement` reports or
kills, `compute_shares` corrects shares of time, `gpu_metrics` shows the figures.
"""
