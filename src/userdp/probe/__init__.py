"""Whether one user moves the clipped sum by at most the clip norm, tried on this very model."""
