"""Examples of `Loader` in other training loops (plain PyTorch, timm, Hugging Face Accelerate), and a demo data set."""
