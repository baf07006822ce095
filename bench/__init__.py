"""Measurements against other CNI plugins, both sides in one run: ratios, not milliseconds.

`attach` starts launcher and agent (`agent`, with the plugin `moved`) and Go's plugins as whole
processes (`processes`), `ipam` calls the address store as a library. `python -m bench` is both.
"""
