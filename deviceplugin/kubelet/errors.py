"""The error of everything that reads the kubelet's records."""


class KubeletUnreadable(Exception):
    """The kubelet's records cannot be read. The text names socket or file, and what to do."""
