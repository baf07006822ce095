"""Compares the use of each GPU with the limits of the groups.

`usage_watch` takes samples of the use. `attribution` finds the group of each process.
`context_overhead` measures the memory of CUDA contexts. `enforcement` reports or kills processes
above their limit. `compute_shares` corrects shares of time by `sampled_time` and `time_account`.
`gpu_metrics` makes metrics from the samples.
"""
