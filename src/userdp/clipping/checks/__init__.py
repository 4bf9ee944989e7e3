"""Does the fast path give what the plain loop gives? Asked on made-up records.

verify          the comparison
made_up         records with real shapes and made-up values
wide_reference  gradients in float32, to judge paths that run in half precision
"""
