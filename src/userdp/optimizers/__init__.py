"""What takes the noised gradients: optimizers and schedules by name, averages, public gradients."""
