"""What a run costs: events (one function per theorem) and their evaluation."""
