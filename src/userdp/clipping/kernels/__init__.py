"""The arithmetic of users' gradients. Triton and Gluon code is imported on CUDA machines only.

reference     everything in torch: what the CPU runs, and what the kernels are tested against
running       compiled on CUDA, and in full precision
products      every user's product a_u^T b_u, with its squared norm
hopper        the same in one kernel, for Hopper GPUs (Gluon)
gram          norms of pairs, and scaling with its rounding errors (Triton, `gram_kernels`)
inner         inner products of tied embeddings and heads (Triton)
stored        norms and sums of stored gradients (Triton)
settle        pairs scaled once more, or set to zero (Triton)
tables        addresses of many tensors for one kernel launch
"""
