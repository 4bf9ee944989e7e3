"""One update per user, each clipped once, and their sum.

    contract      what a clipping rule is
    rules         the clipping rules, and how far one user can move the sum (no torch)
    factors       from an update's norm to the factor that it is scaled by
    plain         the loop over users, one at a time: the oracle for everything below
    flat          the buffer that sums are added up in
    layer_groups  which parameters are clipped together

    fast          the way in: the same sum from batches of users, one backward pass each
    batches/      users into batches: padded to one size, ragged, several records in a row
    execute/      how the model runs: compiled, captured, checkpointed, with layers swapped
    gradients/    what each layer contributes: every user's gradient, norms and clipped sums
    kernels/      the arithmetic: a reference in torch, and CUDA kernels
    checks/       comparing the fast path with the plain loop, on made-up records

Imports inside the fast path point one way: fast -> checks -> gradients -> execute, batches ->
kernels.
"""
