"""Inference with a trained run: evaluation, prediction and export."""
