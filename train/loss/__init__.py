"""What is minimised: losses, class weights and distillation."""
