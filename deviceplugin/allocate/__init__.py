"""What a container is given, how it is told to whom, and which device ids go best together."""
