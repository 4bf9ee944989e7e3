"""Does the fast path give what the plain loop gives? Asked on made-up records."""
