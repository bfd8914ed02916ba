"""Make a draft model: keep a few layers of a model, and train them to predict what it predicts.

    python tools/make_draft_model.py --model MODEL --layers 0 --text FOLDER --out DIR --minutes 8

Embeddings, norms and the kept layers begin as copies of the model's. Training minimises the
Kullback-Leibler divergence from the model's distribution to the draft's (Hinton, Vinyals and Dean,
"Distilling the Knowledge in a Neural Network", 2015), on texts that resemble later outputs.
The result is a checkpoint with the tokenizer of the model. It is an example for models of a few
hundred million parameters on a CPU; larger ones need a card and more text.

Prints the fraction of tokens at which both models have the same top-1 token, on text that was not
trained on, every minute and at the end.
"""

import argparse
import hashlib
import random
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from torch.nn import ModuleList
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from vllm.assets import BUNDLED_MODEL

BLOCK = 256
"""Tokens of one piece of text."""
FOR_CHECKS = 16
"""Pieces of text that are not trained on."""


def read_blocks(folder: Path, pattern: str, tokenizer_file: Path) -> torch.Tensor:
    """Read the tokens of texts as pieces [n, BLOCK], in the same order on every machine."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file))
    token_ids: list[int] = []
    paths = [path for path in folder.rglob(pattern) if "test" not in str(path)]
    paths.sort(key=lambda path: hashlib.sha256(path.name.encode()).digest())
    for path in paths[:400]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        token_ids += tokenizer(text[:200_000], add_special_tokens=False)["input_ids"]
    num_blocks = len(token_ids) // BLOCK
    if num_blocks <= FOR_CHECKS:
        raise SystemExit(
            f"{folder} has {num_blocks} pieces of {BLOCK} tokens in {pattern}: too few"
        )
    return torch.tensor(token_ids[: num_blocks * BLOCK]).view(num_blocks, BLOCK)


def keep_layers(model: PreTrainedModel, layers: list[int], folder: str) -> PreTrainedModel:
    """Load a copy of a model that has only these layers, in this order."""
    num_layers = len(model.model.layers)
    if not layers or not all(0 <= layer < num_layers for layer in layers):
        raise SystemExit(f"--layers {layers}: the model has the layers 0 to {num_layers - 1}")
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draft.model.layers = ModuleList([draft.model.layers[layer] for layer in layers])
    for index, layer in enumerate(draft.model.layers):
        layer.self_attn.layer_idx = index
    draft.config.num_hidden_layers = len(layers)
    return draft


@torch.no_grad()
def agreement(model: PreTrainedModel, draft: PreTrainedModel, blocks: torch.Tensor) -> float:
    """Return how often both models have the same top-1 next token, from 0 to 1."""
    theirs, ours = model(blocks).logits.argmax(-1), draft(blocks).logits.argmax(-1)
    return (theirs == ours).float().mean().item()


def train(
    model: PreTrainedModel, draft: PreTrainedModel, blocks: torch.Tensor, args: argparse.Namespace
) -> None:
    """Train the draft for the given time; the learning rate falls to 0 at its end."""
    held_out, blocks = blocks[:FOR_CHECKS], blocks[FOR_CHECKS:]
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, betas=(0.9, 0.95))
    rng, started, num_tokens, reported = random.Random(args.seed), time.monotonic(), 0, 0.0
    while (share := (time.monotonic() - started) / (60 * args.minutes)) < 1:
        optimizer.param_groups[0]["lr"] = args.lr * (1 - share)
        batch = blocks[rng.sample(range(len(blocks)), min(args.batch, len(blocks)))]
        with torch.no_grad():
            wanted = F.log_softmax(model(batch).logits, -1)
        found = F.log_softmax(draft(batch).logits, -1)
        loss = F.kl_div(
            found.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean"
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        num_tokens += batch.numel()
        if time.monotonic() - reported > 60:
            reported = time.monotonic()
            same = agreement(model, draft, held_out)
            print(
                f"{share:4.0%}  {num_tokens} tokens  loss {loss.item():.3f}  same token {same:.3f}"
            )
    print(f"100%  {num_tokens} tokens  same token {agreement(model, draft, held_out):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(BUNDLED_MODEL), help="folder of the model")
    parser.add_argument("--layers", type=int, nargs="+", default=[0], help="layers to keep")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--pattern", default="*.py", help="files of --text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8, help="of training; 0: only keep layers")
    parser.add_argument("--batch", type=int, default=4, help=f"pieces of {BLOCK} tokens")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(args.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draft = keep_layers(model, args.layers, args.model)
    if args.minutes:
        blocks = read_blocks(args.text, args.pattern, folder / "tokenizer.json")
        train(model, draft, blocks, args)
    draft.to(torch.bfloat16).save_pretrained(args.out)
    for path in folder.glob("tokenizer*"):
        shutil.copy(path, args.out)


if __name__ == "__main__":
    main()
