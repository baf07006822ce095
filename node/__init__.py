"""Reads the state of a node and of its pods from files, sysfs and the kubelet, for the commands.

`state` reads the node. `pods` compares the devices and attachments of a pod. `node_gpus` reads the
GPUs.
"""
