"""A replica for CPUs and tests: `python -m grpod.replica.embedded`, transformers behind vLLM's HTTP.

    app (HTTP, the event loop) ──jobs──▶ engine (one thread: the only one that computes)
      protocol: body -> Ask,                batch: rows that decode together, each with its own adapter and sampling
      job -> answer                         model: one forward pass, caches   lora: adapters   sampling: logits -> tokens

Adapters are PEFT's files, computed by `lora.py`: rows of several adapters share one forward pass.
"""
