"""`podfabric check`: pods that test the fabric between nodes, and that partitions are separate.

The command creates the pods (`check_pods`) and prints the `matrix`. Each pod runs `probes`.
"""
