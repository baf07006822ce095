"""Measurements against other CNI plugins, both sides in one run: ratios, not milliseconds.

`attach` compares launcher and agent, with the plugin `moved`, with Go's plugins as whole processes
(`processes`). `devices` measures the device plugin. `python -m bench` runs both.

`gpu.sh` measures the libraries of containers with a part of a GPU, on a real GPU or over the tests'
stand-in. `make bench-gpu` runs the part that needs no GPU.
"""
