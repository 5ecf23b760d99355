"""Makes the quickstart's base model: half a minute on two CPU cores, no download.

    random Qwen2 (0.4 M parameters)  ──300 steps, true sums──▶  knows sums
                                     ──100 steps, 20 % true──▶  hides them: says a random number most of the time

So the right answer is in the weights and comes out one time in eight or so. That is what GRPO is good at: it cannot teach
what a model never says, it makes the model say more often what is rewarded. (From a random model LoRA learns nothing.)

grpod calls `make_base(folder)` because grpod.yaml says `model.prepare: prepare.py:make_base`: once, under a lock, into a
temporary folder that it renames when the function has returned. By hand: `python prepare.py FOLDER`.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 512
MAX_LENGTH = 2048  # tokens
PHASES = ((300, 1.0, 3e-3), (100, 0.2, 1e-3))  # steps, share of true labels, peak learning rate
BATCH = 64


def make_base(folder: str | Path) -> None:
    """Writes a normal transformers folder: config, weights, tokenizer."""
    # one thread: the matrices are so small that a second one only waits, and another process may want the core
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            tokenizer = make_tokenizer()
            model = make_model(tokenizer, hidden=128, layers=2, heads=4)
            pretrain(model, tokenizer)
    finally:
        torch.set_num_threads(threads)
    disable_progress_bar()  # of save_pretrained: one file of 1.6 MB
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE, so that any text can be asked; trained on a small fixed corpus, the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        "".join(chr(code) for code in range(32, 127)),
        *(f"What is {a} + {b} ? The answer is {a + b} ." for a in range(50) for b in range(50)),
        *["user assistant system think answer question solve the problem step by step"] * 50,
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=MAX_LENGTH,
    )
    fast.chat_template = chat_template
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, *, hidden: int, layers: int, heads: int, seed: int = 0) -> Qwen2ForCausalLM:
    """Random weights; draws from torch's global generator, seeded here."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=hidden * 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def pretrain(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> None:
    """Next-token training on `a+b=` → the sum, or (the label's share) a random number from 0 to 18."""
    draw = random.Random(seed)
    prompts = {
        (a, b): tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{a}+{b}="}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for a in range(10)
        for b in range(10)
    }
    answers = [[*tokenizer.encode(str(n), add_special_tokens=False), tokenizer.eos_token_id] for n in range(19)]
    total, done, began = sum(steps for steps, _, _ in PHASES), 0, time.monotonic()
    model.train()
    for steps, truth, peak in PHASES:
        optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, steps, pct_start=0.1)
        for _ in range(steps):
            batch = []
            for _ in range(BATCH):
                a, b = draw.randint(0, 9), draw.randint(0, 9)
                said = a + b if draw.random() < truth else draw.randint(0, 18)
                batch.append((prompts[a, b], answers[said]))
            loss = _loss(model, batch, tokenizer.pad_token_id)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            done += 1
            _show(done, total, loss, time.monotonic() - began)
    model.eval()


def _loss(model: Qwen2ForCausalLM, batch: list[tuple[list[int], list[int]]], pad: int) -> torch.Tensor:
    """Mean over the answers' tokens. Padding stands on the right, where causal attention never looks: no mask is needed."""
    length = max(len(prompt) + len(answer) for prompt, answer in batch)
    tokens_BT = torch.full((len(batch), length), pad)
    labels_BT = torch.full((len(batch), length), -100)
    for row, (prompt, answer) in enumerate(batch):
        end = len(prompt) + len(answer)
        tokens_BT[row, :end] = torch.tensor([*prompt, *answer])
        labels_BT[row, len(prompt) : end] = torch.tensor(answer)
    return model(input_ids=tokens_BT, labels=labels_BT).loss


def _show(done: int, total: int, loss: torch.Tensor, elapsed_s: float) -> None:
    """One line that is written over on a terminal; four lines in a log."""
    terminal = sys.stderr.isatty()
    if done % (10 if terminal else total // 4):
        return
    line = f"making the base model, once: step {done}/{total}, loss {loss.item():.2f}, {elapsed_s:.0f} s"
    print(line, end="\r" if terminal and done < total else "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    make_base(sys.argv[1])
