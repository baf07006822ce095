"""Commands that show what a node has, and who holds it.

`status` shows a node or the cluster on one screen. `devices` lists HCAs and GPUs, `topo` their
distances, `top` the traffic of ports. `explain` shows one pod.
"""
