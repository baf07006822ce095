"""Cluster-wide addresses on a real API server and etcd, without a node.

`make test-cluster` runs these tests, and `make test` does not: they need Kubernetes' programs.
"""
