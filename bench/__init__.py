"""Measurements against other CNI plugins, both sides in one run: ratios, not milliseconds.

`attach` starts launcher and agent, with the plugin `moved`, and Go's plugins as whole processes
(`processes`), and `devices` the device plugin. `python -m bench` is both.

`gpu.sh` measures the libraries of containers with a part of a GPU, on a real one or over the
stand-in of the tests; `make bench-gpu` is what needs no GPU.
"""
