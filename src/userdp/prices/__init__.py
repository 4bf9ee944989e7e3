"""What is paid: the table of prices, marks that promise nothing, paid looks, and their sum."""
