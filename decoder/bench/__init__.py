"""The bench: what speculation is worth on this machine, measured against the plain engine, transformers and peers.

``suites`` are the prompts, ``plan`` what to measure, ``measure`` the interleaved loop, ``ours``, ``hugging_face`` and
``peers`` the competitors, ``summary`` the ratios; ``floor``, ``widths``, ``batches``, ``memory`` and ``synthetic`` are
measurements of their own; ``run`` puts them together and ``tables`` prints them. Importing this is cheap.
"""
