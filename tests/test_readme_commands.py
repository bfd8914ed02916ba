"""Test every command of the READMEs and the pages about Gaudi: it is planned, run, or listed as not
run.

`make test` plans what starts an engine: for a simulated card, with the variables and flags as they
stand there. `make test-exhaustive` runs what can run here, word for word. Counts on the pages are
those of the plans.
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.hpu import captured_log, needs_simulated_device, simulated_hpu
from tests.readme_commands import PAGES, ROOT, Command, read_commands, read_tables
from vllm.assets import BUNDLED_MODEL
from vllm.bucketing import MemoryClass
from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.closure import prove
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import _create_parser
from vllm.entrypoints.openai.cli_args import read_args
from vllm.planning.engine_plan import EnginePlan, make_engine_plan
from vllm.planning.plan import plan_memory
from vllm.worker.hpu.launches.planner import launch_shapes
from vllm.worker.hpu.memory.memory import divide_memory, make_ledger

README, GAUDI, BUCKETS, TUNING = PAGES
pytestmark = pytest.mark.usefixtures("plans_removed")

COMMANDS = [command for page in PAGES for command in read_commands(page)]
TEXT = " ".join(" ".join((ROOT / page).read_text() for page in PAGES[1:]).split())
GIB, MIB = 2**30, 2**20

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "meta-llama/Llama-3.1-70B-Instruct": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "meta-llama/Llama-3.1-405B-Instruct": {
        **_LLAMA,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "mistralai/Mixtral-8x7B-Instruct-v0.1": {
        **_LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **_LLAMA,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}
"""Published shapes of the models that the commands name."""

PLACEHOLDERS = ("path/or/hub-name", "path/to/model")
"""Stand for any model: here the bundled one."""

NOT_RUN = {
    r"docker (build|run) .*": "needs Docker and the vendor's image; tests/docker has what does not",
    r"(hl-smi|apt list .*|ls /dev/accel)": "asks the host of a card",
    r"python3 tools/vendor_packages\.py .*": "tests/docker/test_vendor_packages.py runs it",
    r"VLLM_TARGET_DEVICE=hpu python3 -m pip install .*": "would change the Python of the tests",
    r"make (demo|test)": "sets up an environment, and runs all tests",
    r".*\b(meta-llama|mistralai)/.*": "downloads a model",
    r"ray (start|status)\b.*": "needs several machines; tests/e2e/test_ray.py has two nodes on one",
    r"export .*": "sets variables for the commands that follow",
}
"""Commands that are not run here, as a pattern, and why."""


@dataclass(frozen=True)
class Run:
    """The expected output of a command, and its input."""

    output: str
    """A pattern that its standard output has, or the file that it writes."""
    code: int = 0
    stdin: str = ""
    log: tuple[str, str] | None = None
    """The page and the heading below which its log is."""
    shape: str = ""
    """The model that replaces a placeholder, if not the bundled one."""


GENERATE = r'vllm generate --prompt "def main("'
SIMULATED = "VLLM_HPU_SIM=gaudi2 PT_HPU_LAZY_MODE=1 "
RUNS = {
    (README, "vllm chat --api-key secret"): Run(r"\w", stdin="Hello\n"),
    (
        README,
        "vllm bench serve --api-key secret --num-prompts 200 --request-rate 20",
    ): Run("200 completed, 0 failed"),
    (README, f"{GENERATE} --max-tokens 64"): Run(r"64 output tokens"),
    (
        README,
        'vllm generate --model path/to/model --chat --prompt "Hello" --temperature 0',
    ): Run("tiny language model"),
    (README, f"{SIMULATED}{GENERATE}"): Run(r"1 prompts, 4 prompt tokens"),
    (README, "vllm hpu-check"): Run("^$", code=2),
    (README, "vllm collect-env"): Run(r"(?i)torch"),
    (README, "python examples/offline_inference/basic.py"): Run("class Queue"),
    (GAUDI, "vllm hpu-check"): Run(r"passed, 0 failed"),
    (GAUDI, f"{GENERATE} --max-tokens 32 --max-model-len 1024"): Run("32 output tokens"),
    (
        GAUDI,
        "vllm generate --prompts-file prompts.txt --max-model-len 1024 --json > answers.jsonl",
    ): Run('"prompt": "import os"'),
    (GAUDI, "vllm collect-env"): Run(r"(?i)torch"),
    (GAUDI, "VLLM_HPU_SIM=gaudi2 vllm hpu-check"): Run(r"passed, 0 failed"),
    (GAUDI, f"{SIMULATED}{GENERATE} --max-tokens 16"): Run(
        "16 output tokens", log=(BUCKETS, "## Warm-up and graphs")
    ),
    (
        GAUDI,
        f"VLLM_HPU_SIM=gaudi2 VLLM_BUCKETING_STRATEGY=sparse {GENERATE} "
        "--max-tokens 16 --max-model-len 256 --max-num-seqs 2",
    ): Run("16 output tokens"),
    (
        BUCKETS,
        f"{SIMULATED}VLLM_CONTIGUOUS_PA=0 VLLM_DECODE_BLOCK_BUCKET_MIN=2 "
        f"VLLM_DECODE_BLOCK_BUCKET_STEP=2 VLLM_DECODE_BLOCK_BUCKET_MAX=32 {GENERATE} "
        "--max-tokens 16 --max-num-seqs 4 --max-model-len 1024 "
        "--no-enable-prefix-caching --no-enable-chunked-prefill",
    ): Run("16 output tokens", log=(BUCKETS, "## Buckets")),
    (
        TUNING,
        "vllm plan path/to/model --device gaudi3 --num-cards 8 --max-model-len 16384",
    ): Run("on 8 gaudi3 cards", shape="meta-llama/Llama-3.1-8B-Instruct"),
}
"""Commands that run and end. On the pages about Gaudi they run on a simulated card."""

SERVERS = {
    (README, "vllm serve path/or/hub-name"): (),
    (README, "vllm serve --api-key secret --port 8000"): ("vllm chat", "vllm bench"),
    (GAUDI, "vllm serve --max-model-len 1024"): (),
}
"""Commands that serve on port 8000, and the beginnings of commands that need the server."""

LOGGED_BY_A_PLAN = r"(Prompt|Decode)\\ bucket|Generated|Omitted"
"""Lines of the log about the plan of buckets, as patterns."""

MAX_LAUNCH_SHAPES = 600
"""Maximum of each command of the pages, because each bucket is compiled at every start."""


def key(command: Command) -> tuple[str, str]:
    return command.page, command.text


def name(command: Command) -> str:
    return f"{command.page}: {command.title or command.text[-60:]}"


def unique(commands: list[Command]) -> list[Command]:
    return list({key(command): command for command in commands}.values())


OURS = unique([command for command in COMMANDS if command.arguments])
ENGINES = [command for command in OURS if command.arguments[0] in ("serve", "generate")]
RECIPES = [command for command in ENGINES if command.title]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Make folders with the config.json of the models that are not installed."""
    folders = {}
    for model, shape in SHAPES.items():
        folders[model] = tmp_path_factory.mktemp("model")
        (folders[model] / "config.json").write_text(json.dumps(shape))
    return folders


@contextmanager
def engine_of(command: Command, models: dict[str, Path]) -> Iterator[EngineArgs]:
    """Return the engine arguments of a command, in a context with its variables and a simulated
    card.
    """
    variables = dict(command.variables)
    if "QUANT_CONFIG" in variables:
        variables["QUANT_CONFIG"] = str(ROOT / "tests" / "seeds" / "maxabs_quant_g3.json")
    with simulated_hpu(**variables), captured_log():
        args = _create_parser(command.arguments).parse_args(command.arguments)
        if args.command == "serve":
            del args.command, args.run
            engine, _ = read_args(args)
        else:
            engine = EngineArgs.from_cli_args(args)
        if engine.model in models:
            engine.model, engine.skip_tokenizer_init = str(models[engine.model]), True
        elif engine.model in PLACEHOLDERS:
            engine.model = str(BUNDLED_MODEL)
        yield engine


def planned(command: Command, models: dict[str, Path]) -> EnginePlan:
    """Return the plan of a command's engine, made as `vllm plan` does."""
    with engine_of(command, models) as args:
        return make_engine_plan(args, "gaudi2", args.tensor_parallel_size)


def buckets(catalog: Catalog) -> str:
    """Return the buckets as the pages write them."""
    return f"{len(catalog.prefill)} + {len(catalog.decode)}"


def command_of(text: str) -> Command:
    return Command(GAUDI, text)


# ---- the list of commands ------------------------------------------------------------------------


def test_every_command_is_run_or_has_a_reason():
    """Each command has exactly one entry, and no entry is left of a command that was removed."""
    ways = {key(command): [] for command in COMMANDS}
    for command in unique(COMMANDS):
        for pattern in NOT_RUN:
            if re.fullmatch(pattern, command.text):
                ways[key(command)].append(pattern)
    for each in (*RUNS, *SERVERS):
        ways.setdefault(each, ["is no more"]).append("runs")
    assert {each: found for each, found in ways.items() if len(found) != 1} == {}
    used = {found[0] for found in ways.values()}
    assert used == {*NOT_RUN, "runs"}


@pytest.mark.parametrize("command", OURS, ids=name)
def test_a_command_has_flags_that_exist(command):
    arguments = command.arguments
    assert _create_parser(arguments).parse_args(arguments).command == arguments[0]


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ENGINES, ids=name)
def test_a_command_starts_with_few_buckets_that_hold_every_step(command, models):
    with engine_of(command, models) as args:
        config = args.create_engine_config()
        assert config.device.device == "hpu"
        catalog = plan_buckets(config, num_blocks_of(command))
        assert prove(catalog.catalog, catalog.limits).is_covered
        assert catalog.warnings == ()
    every = (*catalog.catalog.prefill, *catalog.catalog.decode)
    num_shapes = sum(len(launch_shapes(bucket, catalog.limits)) for bucket in every)
    assert 0 < num_shapes <= MAX_LAUNCH_SHAPES


@pytest.mark.parametrize(
    "command",
    [
        # The other plans are exhaustive. They take longer: FP8 converts a layer of each shape, and
        # the 405B model has 126 layers.
        pytest.param(each, id=name(each))
        if each.title in ("8B", "32K, in one forward pass")
        else pytest.param(each, id=name(each), marks=pytest.mark.exhaustive)
        for each in RECIPES
    ],
)
def test_the_table_of_recipes_has_what_is_planned(command, models):
    assert recipe_row(planned(command, models)) == table_of_recipes()[command.title]


def test_every_recipe_is_in_the_table():
    assert list(table_of_recipes()) == [command.title for command in RECIPES]


def table_of_recipes() -> dict[str, list[str]]:
    """Return the cells of each recipe by its name."""
    rows = read_tables(TUNING, "## Recipes")
    assert rows[0][3] == "forward passes, GiB"
    return {row[0]: row[1:] for row in rows[2:] if len(row) == len(rows[0])}


def num_blocks_of(command: Command) -> int:
    """Return the KV blocks of a command's engine: from the table of recipes, or of the bundled
    model.
    """
    if command.title:
        return int(table_of_recipes()[command.title][5].replace(",", ""))
    (blocks,) = re.findall(r"# HPU blocks: (\d+)", (ROOT / BUCKETS).read_text())
    return int(blocks)


def recipe_row(plan: EnginePlan) -> list[str]:
    memory = plan_memory(plan)
    return [
        str(plan.config.parallel.world_size),
        f"{plan.ledger.budget(MemoryClass.WEIGHTS) / GIB:.2f}",
        f"{plan.report.launch_bytes / GIB:.2f}",
        f"{plan.report.warm_up_bytes / GIB:.2f}",
        f"{memory.block_bytes / MIB:.2f}",
        f"{memory.num_blocks:,}",
        f"{memory.num_sequences:.0f} of {plan.config.scheduler.max_num_seqs}",
        buckets(plan.catalog),
        str(len(plan.shapes)),
    ]


def test_counts_in_the_text_are_those_of_the_plans(models):
    eight = RECIPES[0].text

    def catalog_of(text: str) -> Catalog:
        with engine_of(command_of(text), models) as args:
            return plan_buckets(args.create_engine_config(), num_blocks_of(RECIPES[0])).catalog

    usual = buckets(catalog_of(eight))
    few = buckets(catalog_of(f"{eight} --max-num-seqs 16"))
    fine = buckets(catalog_of(f"VLLM_DECODE_BS_BUCKET_STEP=8 {eight}"))
    assert f"with 16 instead of 128: {few} buckets instead of {usual}" in TEXT
    assert f"8 instead of 32, the 8B recipe has {fine} buckets instead of {usual}" in TEXT
    dense, fp8 = (table_of_recipes()[title][6].split()[0] for title in ("8B", "8B, FP8"))
    assert f"{fp8} of the longest instead of {dense}" in TEXT
    long = catalog_of(eight.replace("8192", "131072"))
    more = len(long.prefill) - int(usual.split()[0])
    assert f"a model of 131,072 tokens has only {more} more than a model of 8192" in TEXT

    default, sparse = (
        next(command for command in ENGINES if command.page == GAUDI and end in command.text)
        for end in (f"{SIMULATED}{GENERATE} --max-tokens 16", "VLLM_BUCKETING_STRATEGY=sparse")
    )
    found = planned(default, models)
    catalog = found.catalog
    says = f"{len(catalog.prefill)} for prompts and {len(catalog.decode)} for decodes"
    assert f"has the default buckets, {says}" in TEXT
    assert f"third command has {buckets(planned(sparse, models).catalog)} buckets" in TEXT
    mib = found.ledger.budget(MemoryClass.WEIGHTS) / MIB
    assert f"model weights took in total {mib:.4g} MiB of device memory" in TEXT


def test_the_table_of_strategies_is_generated():
    tables = read_tables(BUCKETS, "## Strategies and variables")
    rows = [row for row in tables if re.fullmatch(r"\d+ \+ \d+", row[-1])]
    assert len(rows) == 4
    for strategy, _, stated in rows:
        variables = {"VLLM_BUCKETING_STRATEGY": strategy.split("`")[0]}
        with simulated_hpu(**variables), captured_log():
            config = EngineArgs(max_model_len=2048, max_num_seqs=128).create_engine_config()
            catalog = plan_buckets(config, 4000).catalog
        assert f"{len(catalog.prefill)} + {len(catalog.decode)}" == stated, strategy


def test_the_example_of_memory_is_computed(models):
    """Llama-3.1-8B takes 15.4 GiB of the card before the cache is allocated."""
    rows = {row[0]: row for row in reversed(read_tables(GAUDI, "## Memory"))}
    with engine_of(RECIPES[0], models) as args:
        config = args.create_engine_config()
        free = 94.62 - 15.4
        report = divide_memory(
            config, free_bytes=int(free * GIB), launch_bytes=0, block_bytes=16 * MIB
        )
        ledger = make_ledger(config, report, int(94.62 * GIB), report.num_blocks)
    tokens = report.num_blocks * 128
    graphs = {
        cls: f"{ledger.budget(cls) / GIB:.4g}"
        for cls in (MemoryClass.PREFILL_GRAPHS, MemoryClass.DECODE_GRAPHS)
    }
    assert rows["free"][1:] == ["94.62 - 15.4", f"{free:.4g}"]
    assert rows["usable"][1:] == ["0.9 of it", f"{free * 0.9:.4g}"]
    assert rows["HPU graphs"][1:] == [
        f"0.1 of that: {graphs[MemoryClass.PREFILL_GRAPHS]} for prompts, "
        f"{graphs[MemoryClass.DECODE_GRAPHS]} for decodes",
        f"{report.warm_up_bytes / GIB:.4g}",
    ]
    assert rows["KV cache"][1] == (
        f"the rest: {report.num_blocks} blocks of 16 MiB, {tokens:,} tokens"
    )


# ---- logs ----------------------------------------------------------------------------------------


def log_block(page: str, heading: str) -> list[str]:
    """Return the lines of the first log below a heading as patterns; omitted lines are left out."""
    text = (ROOT / page).read_text().partition(f"\n{heading}\n")[2]
    (block,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[:1]
    lines = [line for line in block.splitlines() if line != "..."]
    return [re.escape(line).replace(r"\.\.\.", ".*") for line in lines]


def assert_in_order(patterns: list[str], lines: list[str]) -> None:
    rest = iter(lines)
    for pattern in patterns:
        assert any(re.fullmatch(pattern, line) for line in rest), f"{pattern}\n{lines}"


@pytest.mark.parametrize("each", [each for each, run in RUNS.items() if run.log], ids=str)
def test_the_buckets_of_a_log_are_those_that_are_planned(each, models):
    log = RUNS[each].log
    assert log is not None
    patterns = [line for line in log_block(*log) if re.match(LOGGED_BY_A_PLAN, line)]
    assert len(patterns) >= 4
    (blocks,) = re.findall(r"# HPU blocks: (\d+)", (ROOT / BUCKETS).read_text())
    command = Command(*each)
    num_blocks = 33 if "--no-enable-prefix-caching" in command.text else int(blocks)
    with engine_of(command, models) as args:
        config = args.create_engine_config()
        assert_in_order(patterns, list(plan_buckets(config, num_blocks).info))


# ---- running the commands ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    """Make a folder with the files that the commands of the pages expect."""
    for part in ("examples", "tools"):
        (tmp_path / part).symlink_to(ROOT / part)
    for placeholder in PLACEHOLDERS:
        (tmp_path / placeholder).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / placeholder).symlink_to(BUNDLED_MODEL)
    (tmp_path / "prompts.txt").write_text("import os\ndef main(\n")
    return tmp_path


def environment(command: Command, folder: Path) -> dict[str, str]:
    """Return the environment of a new machine; for the pages about Gaudi, with a simulated card."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("VLLM_", "PT_HPU"))}
    kept["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), kept["PATH"]))
    kept["PYTHONPATH"] = str(ROOT)
    kept["TMPDIR"] = str(folder)
    if command.page != README and "VLLM_HPU_SIM" not in command.variables:
        kept |= {"VLLM_HPU_SIM": "gaudi2", "PT_HPU_LAZY_MODE": "1"}
    return kept


def check_run(command: Command, run: Run, folder: Path, models: dict[str, Path]) -> None:
    if run.shape:
        for placeholder in PLACEHOLDERS:
            (folder / placeholder).unlink()
            (folder / placeholder).symlink_to(models[run.shape])
    result = subprocess.run(
        ["bash", "-c", command.text],
        cwd=folder,
        env=environment(command, folder),
        input=run.stdin,
        capture_output=True,
        text=True,
    )
    assert result.returncode == run.code, result.stderr
    target = re.search(r" > (\S+)$", command.text)
    output = (folder / target[1]).read_text() if target else result.stdout
    assert re.search(run.output, output), f"{output}\n{result.stderr}"
    if run.log:
        lines = [re.sub(r"^INFO \S+ \S+ \S+\] ", "", line) for line in result.stderr.splitlines()]
        assert_in_order(log_block(*run.log), lines)


def needs_a_server(each: tuple[str, str]) -> bool:
    return any(each[1].startswith(tuple(clients)) for clients in SERVERS.values() if clients)


@pytest.mark.exhaustive
@needs_simulated_device
@pytest.mark.parametrize("each", [each for each in RUNS if not needs_a_server(each)], ids=str)
def test_a_command_runs(each, folder, models):
    check_run(Command(*each), RUNS[each], folder, models)


@pytest.mark.exhaustive
@needs_simulated_device
def test_the_servers_answer_and_end(folder, models):
    """They run one after another, because all of them listen on port 8000."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.skip("another program listens on port 8000")
    for each, clients in SERVERS.items():
        command = Command(*each)
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command.words,
                cwd=folder,
                env={**environment(command, folder), **command.variables},
                stdout=output,
                stderr=output,
            )
        server = Server(process, 8000, log, folder)
        try:
            server.wait_for()
            for other in RUNS:
                if clients and other[1].startswith(clients):
                    check_run(Command(*other), RUNS[other], folder, models)
            server.send_signal()
            assert server.wait_for_exit() == 0, server.log_text()
        finally:
            process.kill()
            process.wait()
        server.assert_nothing_is_left()
