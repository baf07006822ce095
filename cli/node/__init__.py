"""The state of a node and of its pods, for the commands: read from files, sysfs and the kubelet.

`state` reads the node, `pods` joins devices and attachments of pods, `node_gpus` has the GPUs.
"""
