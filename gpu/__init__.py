"""Limits of GPUs: how much memory and time of a GPU each container may use, and what it uses.

Imports `host` and `base`. It knows neither the kubelet nor pools: the device plugin says which
group of containers has which limits.
"""
