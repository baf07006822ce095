"""The kubelet's APIs: its public .proto files, and the code that grpcio-tools makes from them."""
