"""The kubelet's APIs: its public .proto files and what grpcio-tools makes of them."""
