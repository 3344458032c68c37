"""How does the stream serve a loop that is not ours? In plain PyTorch, with timm's parts, and with Accelerate."""
