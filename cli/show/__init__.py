"""Commands that show what a node has, and who holds it.

`devices` lists HCAs and GPUs, `topo` their distances, `top` the traffic of ports. `explain` shows
one pod.
"""
