"""`podfabric check`: pods that test the fabric between nodes, and that partitions are separate.

The command creates the pods (`check_pods`) in a `ring`. Each pod runs `probes`.
"""
