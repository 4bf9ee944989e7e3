"""Fine-tuning on real text: what user-level privacy costs, and which choices matter.

prepare, compare     sets of text to rows; many runs of one model on a GPU, from a table
selections           which of a user's records take part (Chua et al. 2024, Table 7)
defaults             the evidence behind the default learning rates
scaled               whether scaling gradients before the noise helps
"""
