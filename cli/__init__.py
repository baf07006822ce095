"""The command `podfabric`: the top layer, which may import every other."""
