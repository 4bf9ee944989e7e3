"""How a model is run for one batch.

execution   the way in: dtype, compiled blocks, and what is put aside while the model runs
layer_swap  layers with another `forward` for a while
chunked_head  the loss without the logits of all tokens
checkpoint  blocks that run again in the backward pass
capture     a step as a CUDA graph
models      what the fast path needs to know of a Hugging Face model
"""
