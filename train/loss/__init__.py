"""The objective of training: losses, class weights and distillation."""
