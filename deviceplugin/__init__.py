"""The RDMA device plugin: pools of HCAs for the kubelet, and a checkpoint of who got which."""
