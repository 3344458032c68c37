"""The network: building it, its norms, its head, freezing, and regularisation that depends on the stage."""
