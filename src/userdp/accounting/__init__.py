"""What a run costs: events, with one function for each theorem, and how they are priced."""
