"""Models as people bring them: loading, LoRA, and the check that examples do not mix."""
