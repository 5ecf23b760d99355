"""Prints prompts.jsonl: 81 sums, as messages, each with its answer. usage: python make_prompts.py > prompts.jsonl"""

import json

for a in range(1, 10):
    for b in range(1, 10):
        question = f"What is {a} + {b}? Answer with just the number."
        print(json.dumps({"prompt": [{"role": "user", "content": question}], "answer": str(a + b)}))
