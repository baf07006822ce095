"""Rows G1 to G15 of bench/gpu.sh: the limits of a GPU, on a GPU or over the stand-in."""
