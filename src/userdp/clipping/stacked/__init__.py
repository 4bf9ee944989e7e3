"""Local training of many users side by side, each on a copy of the weights.

records      the users' records, padded to one size
clip         every user's update clipped by its own norm
vectorised   a local step of any model, by torch.func
lora         a local step of adapters: the frozen base runs once for all users
lstm         a local step of the word LSTM, written out without autograd
cells, words, room, workers, triton_words   what `lstm` is made of
"""
