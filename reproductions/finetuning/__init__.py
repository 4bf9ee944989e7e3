"""Fine-tuning on real text: what user-level privacy costs, and which choices matter.

prepare, sets            sets of text to rows, and which of them take part
settings, compare        many runs of one model on a GPU, from a table of settings
table, pictures          their results as Markdown and SVG
selections               what each selection selects (Chua et al. 2024, Table 7)
limits                   how long and how alike users' updates are, and how large the noise is
defaults                 the evidence behind the default learning rates
scaled                   whether scaling gradients before the noise helps
"""
