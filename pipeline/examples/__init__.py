"""Examples of `Loader` in training loops (plain PyTorch, timm, Lightning, Accelerate, Transformers); demo photos."""
