"""Logits processors that requests of tests name; the engine core imports this module itself."""

import torch

NUMBER = 5


def only_five(output_ids, logits):
    return Only(5)(output_ids, logits)


def failing(output_ids, logits):
    raise KeyError("my own bug")


def leaving(output_ids, logits):
    raise SystemExit(3)


class Only:
    """Allow only one token to be sampled."""

    def __init__(self, token_id, *, after=0):
        self.token_id = token_id + 0  # raises a TypeError if token_id is not a number
        self.after = after

    def __call__(self, output_ids, logits):
        if len(output_ids) < self.after:
            return logits
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([self.token_id]), 0.0)


def make_nothing():
    return None


def exit_at_once():
    raise SystemExit(3)
