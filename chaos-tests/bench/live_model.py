#!/usr/bin/env python3
"""Makes a tiny random model for `live_streams.py`, in the folder `models/tiny`: a vocabulary trained on the docs of
this repository, weights of seed 1, and `letters.json`, the ids of letters that the vocabulary never merges.

Needs torch, transformers and tokenizers, as they come with vLLM.
"""

import glob
import json
import os
import pathlib
import string

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
FOLDER = "models/tiny"
WORDS = 8192
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train(sorted(glob.glob(f"{DOCS}/**/*.md", recursive=True)), trainer)
    return made


def letters(made):
    """Letters of which no two are merged."""
    model = json.loads(made.to_str())["model"]
    merges = {tuple(it.split(" ")) if isinstance(it, str) else tuple(it) for it in model["merges"]}
    apart = []
    for one in string.ascii_uppercase + string.ascii_lowercase:
        pairs = [pair for other in [*apart, one] for pair in ((one, other), (other, one))]
        if one in model["vocab"] and merges.isdisjoint(pairs):
            apart.append(one)
    return [model["vocab"][one] for one in apart]


def model():
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    made = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            # Larger weights, so that answers vary.
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return made.to(torch.bfloat16)


def main():
    os.makedirs(FOLDER, exist_ok=True)
    made = tokenizer()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(FOLDER)
    model().save_pretrained(FOLDER)
    with open(f"{FOLDER}/letters.json", "w", encoding="utf-8") as file:
        json.dump(letters(made), file)


if __name__ == "__main__":
    main()
