"""The state of a node and of its pods, for the commands: read from files, sysfs and the kubelet."""
