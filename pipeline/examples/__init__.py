"""Examples of `Loader` in other training loops (plain PyTorch, timm, Lightning, Accelerate, Transformers), and a demo data
set.
"""
