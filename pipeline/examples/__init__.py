"""Examples of `Loader` in other training loops: plain PyTorch, timm and Hugging Face Accelerate."""
