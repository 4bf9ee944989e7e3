"""The arithmetic of users' gradients: `reference` in torch, and CUDA kernels that agree with it.

`gram`, `inner`, `stored`, `settle`, `tables` (Triton) and `hopper` (Gluon) are imported on CUDA
machines only.
"""
