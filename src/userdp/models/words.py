"""A dictionary of words as a Hugging Face tokenizer, made from public text.

Words are what white space and punctuation separate, in lower case. The most frequent ones make the
dictionary, and every other word is one and the same unknown word. A text begins with BOS and ends
with EOS (McMahan et al. 2018, App. B); `begins_texts` tells the training so.

The text must be public, or nobody who is protected: which words are in the dictionary is released
with the model, and no noise hides it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

from userdp.errors import InputError

UNKNOWN, BEGIN, END, PADDING = "<unk>", "<s>", "</s>", "<pad>"
SPECIAL = (UNKNOWN, BEGIN, END, PADDING)
_SPLIT = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
_NORMAL = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])


def words_of(text: str) -> list[str]:
    """The words of a text, as the dictionary sees them.

    >>> words_of("Hello, World")
    ['hello', ',', 'world']
    """
    return [word for word, _ in _SPLIT.pre_tokenize_str(_NORMAL.normalize_str(text))]


def most_frequent(public_texts: Iterable[str], count: int) -> list[str]:
    """The `count` most frequent words of public texts; of equally frequent ones the first by code.

    >>> most_frequent(["b a b", "c a b"], 2)
    ['b', 'a']
    """
    found: Counter[str] = Counter()
    for text in public_texts:
        found.update(words_of(text))
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return [word for word, _ in ranked[:count]]


def word_tokenizer(words: Sequence[str]) -> Any:
    """The tokenizer of a dictionary; the special tokens come first and count towards its size.

    >>> tokenizer = word_tokenizer(["the", "cat"])
    >>> tokenizer.convert_ids_to_tokens(tokenizer("The cat sat").input_ids)
    ['<s>', 'the', 'cat', '<unk>', '</s>']
    """
    both = set(words) & set(SPECIAL)
    if both or len(set(words)) != len(words) or not words:
        raise InputError(
            "a dictionary is a list of different words, none of which is a special token "
            f"({', '.join(SPECIAL)})."
        )
    numbers = {word: number for number, word in enumerate((*SPECIAL, *words))}
    core = tokenizers.Tokenizer(models.WordLevel(vocab=numbers, unk_token=UNKNOWN))
    core.normalizer = _NORMAL
    core.pre_tokenizer = _SPLIT
    core.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}",
        special_tokens=[(BEGIN, numbers[BEGIN]), (END, numbers[END])],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PADDING,
        begins_texts=True,
    )
