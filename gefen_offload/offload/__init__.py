"""Moving optimizer state between the GPU and the host, all or nothing."""
