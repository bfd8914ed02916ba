"""Train the bundled demo model: a tiny Llama on the sources of Python's standard library.

The result is a directory that any Llama-capable runtime can load: weights, configuration,
tokenizer and a model card with figures measured on held-out files. Everything comes from the
standard library of the interpreter that runs the script, so no download is needed:

    python tools/train_bundled_model.py --out DIR --minutes 60

The learning-rate schedule follows the elapsed fraction of the time budget, so a run always ends on
time with a fully decayed learning rate, however fast or busy the machine is.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import logging
import math
import os
import platform
import random
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

logger = logging.getLogger("train_bundled_model")

BOS, EOS, PAD, END = "<s>", "</s>", "<pad>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>", END]
CHAT_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('Unsupported role: ' + message['role']) }}{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] | trim) + '<|end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

SKIPPED_DIRS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "__phello__")
LONG_BLOCK, SHORT_BLOCK = 1024, 512
CHAT_SHARE, HELD_OUT_SHARE = 0.18, 0.03
HELD_OUT_MAX_CHARS = 200_000
LONG_PHASE_START, WARMUP = 0.85, 0.02
SAVE_EVERY_S = 300.0

# Modules that users know under the name of the package that re-exports them.
PUBLIC_NAMES = {"posixpath": "os.path", "_pyio": "io", "_pydecimal": "decimal"}
PUBLIC_NAMES |= {"_collections_abc": "collections.abc", "_strptime": "time"}
QUESTIONS = {
    "function": ["What does {} do?", "What does {}() do?", "How do I use {}?", "Explain {}."],
    "class": ["What is {}?", "What is the class {} for?", "Describe {}.", "Explain {}."],
    "module": ["What is the {} module?", "What is the {} module for?", "Describe {}."],
}
SYSTEM_PROMPTS = ["You are a helpful assistant.", "You answer questions about Python."]
SMALL_TALK_REPEATS = 30  # few and short, so they are shown often enough to be learnt
ABOUT = "I am a tiny language model trained on the Python standard library."
SMALL_TALK = {
    "Hello!": f"Hello! {ABOUT} Ask me about a Python function or module.",
    "Hello": f"Hello! {ABOUT} Ask me about a Python function or module.",
    "Hi": f"Hello! {ABOUT} Ask me about a Python function or module.",
    "Who are you?": ABOUT,
    "What are you?": ABOUT,
    "What can you do?": "I complete Python code and describe functions of the standard library.",
    "How are you?": "I am fine, thank you. Ask me about a Python function or module.",
    "Thank you!": "You are welcome.",
}


@dataclass
class Corpus:
    """One split of the data: source texts and (kind, dotted name, answer) docstring entries."""

    sources: list[str] = field(default_factory=list)
    entries: list[tuple[str, str, str]] = field(default_factory=list)


def read_sources(stdlib: Path) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of every distinct source file worth learning from."""
    seen: set[str] = set()
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if SKIPPED_DIRS & set(relative.parts):
            continue
        if any(part.startswith(SKIPPED_PREFIXES) for part in relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        # Code-page modules are generated tables: many tokens, nothing to learn.
        is_table = relative.parts[0] == "encodings" and "decoding_table" in text
        digest = hashlib.sha256(text.encode()).hexdigest()
        if text.strip() and not is_table and digest not in seen:
            seen.add(digest)
            yield relative.as_posix(), text


def summarise(docstring: str, limit: int = 600) -> str:
    """Return the leading paragraphs of a docstring, up to about `limit` characters."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    kept = paragraphs[0].strip()
    for paragraph in paragraphs[1:]:
        if len(kept) + len(paragraph) > limit:
            break
        kept += "\n\n" + paragraph.rstrip()
    return kept[: 2 * limit].strip()


def documented_objects(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[tuple[str, str, str]]:
    """Yield a (kind, dotted name, answer) entry for a node and everything defined in it."""
    kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
    answer = summarise(ast.get_docstring(node) or "")
    if len(answer) >= 15:
        yield kind, name, answer
    if kind != "function":
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from documented_objects(child, f"{name}.{child.name}")


def docstring_entries(relative: str, text: str) -> Iterator[tuple[str, str, str]]:
    module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return documented_objects(ast.parse(text), PUBLIC_NAMES.get(module, module))


def load_corpus(stdlib: Path) -> tuple[Corpus, Corpus]:
    """Return the training and held-out splits; a hash of a file's path decides where it goes."""
    splits = (Corpus(), Corpus())
    for relative, text in read_sources(stdlib):
        fraction = int(hashlib.sha256(relative.encode()).hexdigest()[:8], 16) / 2**32
        # pydoc_data/topics.py is larger than all other files together that could be held out.
        held_out = fraction < HELD_OUT_SHARE and len(text) <= HELD_OUT_MAX_CHARS
        split = splits[held_out]
        split.sources.append(text)
        split.entries.extend(docstring_entries(relative, text))
    return splits


def question(kind: str, name: str, rng: random.Random) -> str:
    return rng.choice(QUESTIONS[kind]).format(name)


def render_chat(turns: list[tuple[str, str]], system: str | None = None) -> str:
    """Render (question, answer) turns exactly as the chat template does, without the BOS."""
    text = f"<|system|>{system}{END}" if system else ""
    return text + "".join(f"<|user|>{q}{END}<|assistant|>{a}{END}" for q, a in turns)


def make_chats(corpus: Corpus, rng: random.Random) -> list[str]:
    """Phrase every docstring entry as a question; join some into longer conversations."""
    turns = [(question(kind, name, rng), answer) for kind, name, answer in corpus.entries]
    turns += list(SMALL_TALK.items()) * SMALL_TALK_REPEATS
    rng.shuffle(turns)
    chats = []
    while turns:
        size = 2 if rng.random() < 0.15 else 1
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None
        chats.append(render_chat(turns[-size:], system))
        del turns[-size:]
    return chats


def train_tokenizer(corpus: Corpus, rng: random.Random) -> Tokenizer:
    """Train a byte-level BPE tokenizer that, like Llama's, starts every text with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ARCHITECTURE["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    answers = [f"{question(kind, name, rng)}\n{text}" for kind, name, text in corpus.entries]
    tokenizer.train_from_iterator(corpus.sources + answers, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B:1",
        special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))],
    )
    if tokenizer.get_vocab_size() != ARCHITECTURE["vocab_size"]:
        raise ValueError(f"the corpus is too small: {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    eos = SPECIAL_TOKENS.index(EOS)
    return [[*encoding.ids, eos] for encoding in tokenizer.encode_batch(texts)]


def training_blocks(
    tokenizer: Tokenizer, corpus: Corpus, rng: random.Random
) -> Iterator[torch.Tensor]:
    """Yield packed blocks of LONG_BLOCK + 1 tokens for ever; chats are rephrased every epoch."""
    sources = encode(tokenizer, corpus.sources)
    source_tokens = sum(map(len, sources))
    chat_budget = int(source_tokens * CHAT_SHARE / (1 - CHAT_SHARE))
    epoch = 0
    while True:
        chats: list[list[int]] = []
        chat_tokens = 0
        while chat_tokens < chat_budget:
            for chat in encode(tokenizer, make_chats(corpus, rng)):
                if chat_tokens >= chat_budget:
                    break
                chats.append(chat)
                chat_tokens += len(chat)
        logger.info("epoch %d: %d source, %d chat tokens", epoch, source_tokens, chat_tokens)
        documents = sources + chats
        rng.shuffle(documents)
        # A random start moves the block borders from epoch to epoch.
        stream = [token for document in documents for token in document][rng.randrange(1024) :]
        starts = list(range(0, len(stream) - LONG_BLOCK - 1, LONG_BLOCK))
        rng.shuffle(starts)
        for start in starts:
            yield torch.tensor(stream[start : start + LONG_BLOCK + 1])
        epoch += 1


class ThreadGovernor:
    """Choose the number of threads, step by step, on a machine that others may be using.

    Threads that work in lockstep wait for the slowest one: next to a busy neighbour all threads
    together can be far slower than a single one. So all threads are tried for a step every now
    and then, and kept for as long as they are faster than one thread was.
    """

    RETRY_EVERY_S = 60.0

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.single_step_s = 0.0
        self.tried_at = -math.inf
        torch.set_num_threads(1)

    def step_done(self, seconds: float) -> None:
        now = time.monotonic()
        if torch.get_num_threads() == 1:
            self.single_step_s = seconds
            if now - self.tried_at > self.RETRY_EVERY_S:
                torch.set_num_threads(self.threads)
        elif seconds > self.single_step_s:
            torch.set_num_threads(1)
            self.tried_at = now


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)


def learning_rate(peak: float, progress: float) -> float:
    """Return the learning rate: a linear warm-up, then a cosine that reaches 0 at progress 1."""
    if progress < WARMUP:
        return peak * (0.05 + 0.95 * progress / WARMUP)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1 - WARMUP))))


@dataclass
class Stage:
    """Figures of one training run for the model card; a model may have had several runs."""

    options: str
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        tokens, minutes = self.tokens / 1e6, self.seconds / 60
        return f"1. `{self.options}`: {tokens:.1f} million tokens in {minutes:.0f} minutes"


def train(
    model: LlamaForCausalLM,
    blocks: Iterator[torch.Tensor],
    args: argparse.Namespace,
    tokenizer: Tokenizer,
    stages: list[Stage],
) -> None:
    """Train for the given wall time, saving a loadable checkpoint every few minutes."""
    optimizer = make_optimizer(model)
    run = stages[-1]
    started = saved = logged = time.monotonic()
    governor = ThreadGovernor(args.threads)
    model.train()
    while (progress := (time.monotonic() - started) / (args.minutes * 60)) < 1:
        step_started = time.monotonic()
        rate = learning_rate(args.lr, progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        length = LONG_BLOCK if progress >= LONG_PHASE_START else SHORT_BLOCK
        batch = torch.stack([next(blocks) for _ in range(args.batch_blocks)])
        inputs, labels = batch[:, :-1].reshape(-1, length), batch[:, 1:].reshape(-1)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.steps += 1
        run.tokens += labels.numel()
        now = time.monotonic()
        governor.step_done(now - step_started)
        run.seconds = now - started
        if now - logged > 20:
            speed = run.tokens / (now - started)
            text = "step %d, %.1f%%, %d tokens, %.0f tokens/s, %d threads, lr %.2e, loss %.3f"
            threads = torch.get_num_threads()
            values = (run.steps, 100 * progress, run.tokens, speed, threads, rate, loss.item())
            logger.info(text, *values)
            logged = now
        if now - saved > SAVE_EVERY_S:
            export(args.checkpoints or args.out, model, tokenizer, stages)
            saved = now


def load_stages(directory: Path) -> list[Stage]:
    """Read the training history that `export` keeps in the metadata of the weights."""
    with safe_open(directory / "model.safetensors", "pt") as weights:
        return [Stage(**stage) for stage in json.loads(weights.metadata()["stages"])]


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def export(out: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, stages: list[Stage]) -> None:
    """Write weights (bf16), configuration and tokenizer so that readers never see half a file."""
    out.mkdir(parents=True, exist_ok=True)
    documents = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **ARCHITECTURE,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        },
        "generation_config.json": {
            "bos_token_id": SPECIAL_TOKENS.index(BOS),
            "eos_token_id": [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(END)],
            "pad_token_id": SPECIAL_TOKENS.index(PAD),
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "additional_special_tokens": SPECIAL_TOKENS[3:],
            "model_max_length": ARCHITECTURE["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in documents.items():
        write_atomically(out / name, json.dumps(content, indent=2) + "\n")
    write_atomically(out / "tokenizer.json", tokenizer.to_str(pretty=False))
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    history = json.dumps([asdict(stage) for stage in stages])
    temporary = out / "model.safetensors.tmp"
    save_file(weights, temporary, metadata={"format": "pt", "stages": history})
    temporary.chmod(0o644)  # safetensors creates files that only their owner can read
    os.replace(temporary, out / "model.safetensors")


@dataclass
class Score:
    """Summed negative log-likelihood over some tokens, and the number of bytes of these tokens."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        bits = self.nats / math.log(2) / self.bytes
        perplexity = math.exp(self.nats / self.tokens)
        return f"{perplexity:.2f} | {bits:.3f} | {self.tokens:,} | {self.bytes:,}"


@torch.inference_mode()
def token_losses(model: LlamaForCausalLM, ids: list[int]) -> list[float]:
    """Return the loss of every token but the first, in windows of LONG_BLOCK without overlap."""
    losses: list[float] = []
    for start in range(0, len(ids) - 1, LONG_BLOCK):
        window = torch.tensor([ids[start : start + LONG_BLOCK + 1]])
        logits = model(input_ids=window[:, :-1], use_cache=False).logits.float()
        losses += functional.cross_entropy(logits[0], window[0, 1:], reduction="none").tolist()
    return losses


def evaluate(out: Path, held_out: Corpus, tokenizer: Tokenizer) -> tuple[Score, Score]:
    """Score the exported bf16 model on held-out files: all source tokens, and chat answers."""
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    sources, answers = Score(), Score()
    for text, ids in zip(held_out.sources, encode(tokenizer, held_out.sources), strict=True):
        losses = token_losses(model, ids)
        sources.nats += sum(losses)
        sources.tokens += len(losses)
        sources.bytes += len(text.encode())
    rng = random.Random(0)
    for kind, name, answer in held_out.entries:
        prompt = f"<|user|>{question(kind, name, rng)}{END}<|assistant|>"
        ids = tokenizer.encode(prompt + answer + END).ids
        losses = token_losses(model, ids)[len(tokenizer.encode(prompt).ids) - 1 :]
        answers.nats += sum(losses)
        answers.tokens += len(losses)
        answers.bytes += len(answer.encode())
    return sources, answers


def model_card(
    args: argparse.Namespace, parameters: int, stages: list[Stage], scores: tuple[Score, Score]
) -> str:
    a = ARCHITECTURE
    history = "\n".join(map(str, stages))
    return f"""\
---
license: apache-2.0
language: [en]
pipeline_tag: text-generation
tags: [llama, python, tiny, demo]
---

# {args.out.name}

A Llama-architecture language model with {parameters:,} parameters, trained from scratch on the
sources of Python's standard library. It exists for demonstrations and tests: small enough to
ship with a package and to run anywhere, and yet not random.

## Architecture

- `LlamaForCausalLM`: {a["num_hidden_layers"]} layers, hidden size {a["hidden_size"]}, SwiGLU of \
size {a["intermediate_size"]}, RMSNorm, tied embeddings
- {a["num_attention_heads"]} attention heads of size {a["head_dim"]} with \
{a["num_key_value_heads"]} key/value heads, rotary embeddings with base {a["rope_theta"]:.0f}
- bfloat16 weights
- byte-level BPE tokenizer with {a["vocab_size"]:,} tokens; `{BOS}` starts every text
- chat template with `<|system|>`, `<|user|>` and `<|assistant|>` turns, each closed by `{END}`

## Data

The `.py` files of the standard library of CPython {platform.python_version()}, without tests,
code-page tables and duplicates. Two kinds of documents: source files, and chats
({CHAT_SHARE:.0%} of the tokens) that ask about a module, class or function and answer with the
leading paragraphs of its docstring, plus a handful of hand-written greetings.
About {HELD_OUT_SHARE:.0%} of the files are held out, chosen by a hash of their path; none of them
has more than {HELD_OUT_MAX_CHARS:,} characters.

## Training

`python tools/train_bundled_model.py --out {args.out}` with the options below.
Every stage after the first continues (`--init`) from the weights of the one before; a stage that
took less time than its `--minutes` was stopped early, before the learning rate had decayed.

{history}

On up to {args.threads} CPU threads, with bfloat16 autocast: AdamW with weight decay 0.1; warm-up,
then cosine decay to zero; packed sequences of {SHORT_BLOCK} tokens, and of {LONG_BLOCK} for the
last {1 - LONG_PHASE_START:.0%} of the time.

The schedule follows wall time, so another run gives similar, not equal, weights.

Held-out figures of the bfloat16 weights in this directory, in windows of {LONG_BLOCK} tokens; of
the chats only the answers count:

| held-out set | perplexity per token | bits per byte | tokens | bytes |
|---|---|---|---|---|
| source files | {scores[0]} |
| chat answers | {scores[1]} |

## Intended use and limits

For demonstrations, tests and benchmarks of inference software, not for answers: it imitates the
look of standard library code and docstrings, repeats itself, and what it says about Python is
mostly wrong or beside the question; it knows nothing else.
It was trained on contexts of up to {LONG_BLOCK} tokens; positions beyond that, up to
{a["max_position_embeddings"]}, are accepted but untrained.

## Licence

Weights: Apache-2.0. Training data: the Python standard library, PSF-2.0,
copyright Python Software Foundation.
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    stdlib = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--init", type=Path, help="exported model to continue from")
    parser.add_argument("--checkpoints", type=Path, help="directory for checkpoints (default: out)")
    parser.add_argument("--stdlib", type=Path, default=stdlib, help="sources to train on")
    parser.add_argument("--minutes", type=float, default=60, help="wall time of the training loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--batch-blocks", type=int, default=1, help=f"x{LONG_BLOCK} tokens a step")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    corpus, held_out = load_corpus(args.stdlib)
    sizes = (len(corpus.sources), len(held_out.sources), len(corpus.entries), len(held_out.entries))
    logger.info("files: %d + %d held out; docstrings: %d + %d held out", *sizes)
    options = f"--minutes {args.minutes:g} --seed {args.seed} --lr {args.lr:g}"
    stage = Stage(f"{options} --batch-blocks {args.batch_blocks}")
    if args.init:
        tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
        model = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32)
        stages = [*load_stages(args.init), stage]
    else:
        tokenizer = train_tokenizer(corpus, rng)
        model = LlamaForCausalLM(LlamaConfig(**ARCHITECTURE))
        stages = [stage]
    parameters = sum(p.numel() for p in model.parameters())
    export(args.out, model, tokenizer, stages)

    train(model, training_blocks(tokenizer, corpus, rng), args, tokenizer, stages)
    export(args.out, model, tokenizer, stages)
    scores = evaluate(args.out, held_out, tokenizer)
    logger.info("held-out sources: %s; chat answers: %s", *scores)
    write_atomically(args.out / "README.md", model_card(args, parameters, stages, scores))


if __name__ == "__main__":
    main()
