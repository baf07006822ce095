"""Compares the use of each GPU with the limits of groups. A group is the processes of a container.

`usage_watch` takes samples. `enforcement` acts on groups that use too much memory.
`compute_shares` corrects the shares of GPU time. `gpu_metrics` makes metrics from the samples.
"""
