"""Pools: reads their configuration in three formats, and assigns HCAs to them."""
