"""Loggers, which show a run's scalars in other tools: CSV files, TensorBoard, Weights & Biases and MLflow."""
