"""The command `podfabric`: the top layer, which may call everything and is called by nobody."""
