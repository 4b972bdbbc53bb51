"""Training of draft models from a target's own conversations: rows, the target's labels, models, evaluation, export."""
