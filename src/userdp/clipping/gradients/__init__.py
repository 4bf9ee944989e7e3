"""Every user's gradient of every layer, their norms, and the sum of the clipped gradients.

many_users   the way in: the clipped sum of a batch of users, in one backward pass
one_user     the clipped gradient of one large user, by ordinary backward passes
survey       which layers a model has, their rules, and how they are called
probes       which form each parameter's gradient is handed out in
layers       the rules of products, norms and embeddings; also lstm, merged_lora, any_layer
forms        the three forms of a gradient: stored, pair, embedding rows
batch_forms  all forms of one batch, and whose they are
sums         their squared norms and their weighted sums
"""
