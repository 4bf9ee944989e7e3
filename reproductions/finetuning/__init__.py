"""Fine-tuning on real text: what user-level privacy costs, and which choices matter.

python -m reproductions.finetuning.prepare TOKENIZER SET.jsonl.gz ... --out rows/     (any machine)
python -m reproductions.finetuning.compare MODEL rows/SET.npz --table epsilon --json FILE  (a GPU)
"""
