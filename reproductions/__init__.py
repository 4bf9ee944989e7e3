"""What only a figure or a table of a paper needs: one folder for each paper."""
