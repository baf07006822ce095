"""What a tenant tries by a NetworkAttachmentDefinition, a pod's annotations or a connection."""
