"""Every user's gradient of every layer, their norms, and the sum of the clipped gradients."""
