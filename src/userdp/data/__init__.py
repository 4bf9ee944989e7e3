"""From raw records to rows of tokens with known owners. Nothing here imports torch."""
