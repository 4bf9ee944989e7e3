"""Loading models, adding LoRA, and checking that a model does not mix examples."""
