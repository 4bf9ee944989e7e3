"""Local training of stacked copies of the word LSTM, without autograd."""
