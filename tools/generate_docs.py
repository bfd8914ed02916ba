"""Write the reference pages of docs/ from the code that defines what they describe.

python tools/generate_docs.py            write them
python tools/generate_docs.py --check    exit with 1 and name the pages that are out of date
"""

import argparse
import ast
import gc
import inspect
import sys
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

if __name__ == "__main__":
    # Collections would visit millions of nodes of syntax trees and find nothing to free.
    gc.disable()

from tests.seeds.table import compatibility as compatibility_lines  # noqa: E402
from tests.tested_families import architectures_with  # noqa: E402
from tools.check_prose import GLOSSARY, Glossary  # noqa: E402
from tools.layers import Layers, module_name, read_layers  # noqa: E402
from tools.messages_page import messages_page  # noqa: E402
from tools.results import read_machines, result_picture, result_tables  # noqa: E402
from tools.structure import imports_between, parse, read_sources  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.config.fields import ConfigField, config_fields, config_sections  # noqa: E402
from vllm.engine.resolve.compat_args import COMPAT_ARGUMENTS, CompatArgument  # noqa: E402
from vllm.entrypoints.calibration.steps import STEPS  # noqa: E402
from vllm.entrypoints.openai.cli_args import SERVER_COMPAT  # noqa: E402
from vllm.entrypoints.shared.server_args import ServerArgs  # noqa: E402
from vllm.env.bridge import BRIDGE_SETTINGS  # noqa: E402
from vllm.env.compat import COMPAT_VARIABLES, FEATURES  # noqa: E402
from vllm.env.others import OTHER_READERS  # noqa: E402
from vllm.envs import Envs  # noqa: E402
from vllm.model_executor.models.interface import CausalLM, PoolingModel  # noqa: E402
from vllm.model_executor.models.registry import ModelRegistry  # noqa: E402

_NOTE = "<!-- Written by tools/generate_docs.py. Change the code it reads, then run it. -->"


def env_variables() -> Iterator[str]:
    """Write the page about environment variables."""
    yield _NOTE
    yield "# Environment variables"
    yield ""
    yield "The variables are read once, when the package is first used. An empty value means"
    yield '"not set". A wrong value is an error. A `VLLM_` name that is not listed here causes a'
    yield "warning. The values of a switch are `1`, `true`, `t`, `yes`, `y`, `on`, and `0`,"
    yield "`false`, `f`, `no`, `n`, `off`."
    yield ""
    yield "`VLLM_PROMPT_QUERY_BUCKET_*` are the names of the Gaudi plugin for"
    yield "`VLLM_PROMPT_SEQ_BUCKET_*`. If both are set to different values, that is an error."
    types = typing.get_type_hints(Envs)
    for section, variables in groupby(fields(Envs), key=lambda field: field.metadata["section"]):
        yield from _table(section, "variable", "value", "default", "meaning")
        for field in variables:
            value = _one_of(field.metadata["choices"]) or _env_type(types[field.name])
            yield _row(f"`{field.name}`", value, _env_default(field), field.metadata["help"])
    yield from _compat_variables()


def _compat_variables() -> Iterator[str]:
    yield from _table("Refused", "variable", "what is not available")
    yield from _compat_rows(available=False)
    yield ""
    yield "If one of these is set, the engine does not start, because its results would differ"
    yield "from what was requested. A switch may be set to 0."
    yield from _table("Recognised without effect", "variables", "why they have no effect")
    yield from _compat_rows(available=True)
    yield ""
    yield "These are variables of the vLLM 0.9 Gaudi fork, of its plugin, and of vLLM. Setting"
    yield "one causes a warning at the start. There is no warning for a switch if the engine"
    yield "does what it asks for anyway. The warning has the same reasons for names that are not"
    yield "in the table, if they contain one of these words:"
    yield ""
    yield _row("word of the name", "why it has no effect")
    yield "|---|---|"
    for reason, words in FEATURES:
        yield _row(_one_of(tuple(words.split())), reason)
    yield from _table("Set for the Habana bridge", "variable", "value", "modes", "why", "source")
    for setting in BRIDGE_SETTINGS:
        value = f"`{setting.value}`"
        yield _row(f"`{setting.name}`", value, setting.modes, setting.why, setting.source)
    yield ""
    yield "Every process that opens a card sets these variables before it imports the bridge. A"
    yield "variable that depends on the mode is set as soon as the mode is known. A value that"
    yield "you set is not changed. The log and `vllm collect-env` show each value, and who has"
    yield "chosen it. The effect of these variables was not measured on a card."
    yield from _table("Read by others", "reader", "variables", "note")
    for reader in OTHER_READERS:
        yield _row(reader.reader, _one_of(reader.names), reader.note)


def _compat_rows(*, available: bool) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for variable in COMPAT_VARIABLES.values():
        if variable.available is available:
            names.setdefault(variable.reason, []).append(variable.name)
    for reason, alike in names.items():
        yield _row(_one_of(tuple(alike)), reason)


def _table(title: str, *columns: str) -> Iterator[str]:
    yield ""
    yield f"## {title}"
    yield ""
    yield _row(*columns)
    yield "|---" * len(columns) + "|"


def _env_default(field: "Field[object]") -> str:
    if isinstance(field.default, bool):
        return f"`{field.default:d}`"
    return _default(field.default)


def engine_arguments() -> Iterator[str]:
    """Write the page about engine arguments."""
    yield _NOTE
    yield "# Engine arguments"
    yield ""
    yield "These arguments are keywords of `LLM()` and `EngineArgs()`, and flags of the"
    yield "commands: `max_model_len` is `--max-model-len`. Underscores are accepted in flags as"
    yield "well. A switch also has a `--no-` form. If an argument is left out, or is `None`, its"
    yield "default is used. In a shell, put JSON in quotes: `--hf-overrides"
    yield "'{\"max_position_embeddings\": 8192}'`."
    for section in config_sections(VllmConfig).values():
        if not list(config_fields(section)):
            continue  # its values come from environment variables
        yield ""
        yield f"## {section.__name__}"
        yield ""
        yield " ".join((section.__doc__ or "").split())
        yield ""
        yield "| flag | value | default | meaning |"
        yield "|---|---|---|---|"
        for field in config_fields(section):
            names = ", ".join(f"`{name}`" for name in (field.flag, *field.aliases))
            yield _row(names, _value(field), _default(field.default), field.help)
    yield from _compat_section()


def server_arguments() -> Iterator[str]:
    """Write the page about flags of the server."""
    yield _NOTE
    yield "# Server arguments"
    yield ""
    yield "These are flags of `vllm serve [MODEL]` and of `python -m"
    yield "vllm.entrypoints.openai.api_server`, in addition to the flags of [the"
    yield "engine](engine_arguments.md). A switch also has a `--no-` form. For a list, write"
    yield "several values after one flag, or repeat the flag."
    yield ""
    yield "`--config FILE` names a YAML file with flags of the server and the engine, without"
    yield "their dashes. Flags on the command line have priority. An unknown name in the file is"
    yield "an error. Example:"
    yield ""
    yield from ("```yaml", "model: /models/Llama-3.1-8B", "max-model-len: 16k", "port: 9000", "```")
    yield from _table("Flags", "flag", "value", "default", "meaning")
    for field in config_fields(ServerArgs):
        yield _row(f"`{field.flag}`", _value(field), _default(field.default), field.help)
    yield from _table("Flags of the fork", "flag", "default", "why it has no effect")
    for argument in SERVER_COMPAT.values():
        reason = argument.reason if argument.available else f"refused: {argument.reason}"
        yield _row(f"`{argument.flag}`", _default(argument.off), reason)


def compatibility() -> Iterator[str]:
    """Write the page about the documented features of vLLM on Gaudi."""
    yield _NOTE
    yield from compatibility_lines()


def _compat_section() -> Iterator[str]:
    yield ""
    yield "## Arguments of the vLLM 0.9 Gaudi fork and of newer releases"
    yield ""
    yield "`rope_scaling` and `rope_theta` are accepted as parts of `hf_overrides`. These are"
    yield "accepted as parts of `speculative_config`: `speculative_model`,"
    yield "`num_speculative_tokens`, `ngram_prompt_lookup_max`, `ngram_prompt_lookup_min` and"
    yield "`speculative_disable_by_batch_size`. The keys of `structured_outputs_config` are"
    yield "accepted as arguments of their own, `pooler_config` as `override_pooler_config`, and"
    yield "`language_model_only` as a limit of no images, sounds and videos."
    yield "`--flag.key value` is one key of a flag that takes a JSON object."
    accepted = [a for a in COMPAT_ARGUMENTS.values() if a.available]
    missing = [a for a in COMPAT_ARGUMENTS.values() if not a.available]
    yield ""
    yield "These arguments are accepted, but have no effect. A warning says so:"
    yield from _compat_table(accepted, "why it has no effect")
    yield ""
    yield "These features are not available. Any value other than the default is an error:"
    yield from _compat_table(missing, "what is not available")


def _compat_table(arguments: list[CompatArgument], reason: str) -> Iterator[str]:
    yield ""
    yield f"| argument | default | {reason} |"
    yield "|---|---|---|"
    for argument in arguments:
        yield _row(f"`{argument.name}`", _default(argument.off), argument.reason)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _one_of(choices: tuple[str, ...]) -> str:
    return ", ".join(f"`{choice}`" for choice in choices)


def _env_type(annotation: object) -> str:
    options = [a for a in typing.get_args(annotation) if a is not type(None)]
    type_: typing.Any = options[0] if options else annotation
    return {bool: "`0` or `1`", int: "integer", float: "number", str: "string"}[type_]


def _value(field: ConfigField) -> str:
    words = {
        "bool": "switch",
        "int": "integer",
        "size": "integer; also with k (1000), K (1024), m, M, g, G",
        "float": "number",
        "str": "string",
        "str_or_bool": "string, or a switch",
        "strings": "one or more strings",
        "mapping": "JSON object, or a dict",
        "counts": "numbers by name, JSON object, or a dict",
    }
    return _one_of(field.choices) or words[field.kind]


def _default(value: object) -> str:
    if value is None or value in ("", {}, ()):
        return ""
    return f"`{' '.join(value) if isinstance(value, tuple) and _all_text(value) else value}`"


def _all_text(values: tuple[object, ...]) -> "typing.TypeGuard[tuple[str, ...]]":
    return all(isinstance(value, str) for value in values)


_TESTED = {
    "modules": "the model runs module by module on the CPU. Tokens and log-probabilities are the "
    "same as with transformers",
    "program": "the model runs as one call of C++. Log-probabilities are the same as with "
    "transformers, also with packed weights (bf16 and quantized)",
    "bf16": "the model runs in bf16, by modules and as a program. Log-probabilities differ from "
    "float32 by no more than those of transformers in bf16",
    "HPU graphs": "the model runs on the simulated card with HPU graphs. Tokens and "
    "log-probabilities are the same as with transformers, and nothing compiles after the warm-up",
    "torch.compile": "as `HPU graphs`, but with torch.compile",
    "2 ranks": "two ranks each load their part of the weights. Their combined results are the same "
    "as with one rank",
    "4 ranks": "as `2 ranks`, but with four",
    "pipeline": "two pipeline stages on the CPU generate the same tokens as one process",
    "LoRA": "outputs with adapters are the same as with peft",
    "GGUF": "the model is loaded from a GGUF file. Its logits are the same as with transformers",
}


def supported_models() -> Iterator[str]:
    """Write the page about supported architectures."""
    yield _NOTE
    yield "# Supported models"
    yield ""
    yield "A model runs if `architectures` in its config.json names an architecture of this"
    yield "page. If it names none, the class follows from `model_type`, where only one class"
    yield "generates. Older names of architectures and of keys are accepted (RWForCausalLM,"
    yield "InternLMForCausalLM, ...). Any other model is refused, and the error names the most"
    yield "similar architecture."
    yield ""
    yield "`python -m benchmarks.check_model_configs` shows which published models run. It"
    yield "starts models with 395 configs, with small sizes and random weights. Most of these"
    yield "configs were written from memory of the published ones."
    yield ""
    yield "Programs and plug-ins can add other models. A program calls"
    yield "`ModelRegistry.register_model(name, class)`. A plug-in is an installed package with a"
    yield "function that makes this call. The function is an entry point of the group"
    yield "`vllm.general_plugins` in the package's pyproject.toml:"
    yield ""
    yield '    [project.entry-points."vllm.general_plugins"]'
    yield '    my_models = "my_package:register"'
    yield ""
    yield "These functions run once at the start of every process of an engine. `VLLM_PLUGINS`"
    yield "chooses the plug-ins to load."
    yield ""
    yield "## Tests"
    yield ""
    yield "For each decoder, small random models are compared with transformers in float32. The"
    yield "tests compare the logits of whole prompts. They also run 14 prompts that generate 16"
    yield "tokens each, in chunks, with preemption and prefix hits. A log-probability may differ"
    yield "by 0.0001 (Gemma 3: 0.0002)."
    yield ""
    yield "In the table below, `yes` means that a small random model of the architecture is"
    yield "tested in this way. An empty cell means that it is not. The columns:"
    yield ""
    for capability, meaning in _TESTED.items():
        yield f"- {capability}: {meaning}."
    yield ""
    yield "The simulated card computes on the CPU. None of these tests has run on a real card."
    yield ""
    yield "A line without any `yes` is another name of a family, or one of these:"
    yield ""
    yield "- **Baichuan, ChatGLM and InternLM**: transformers does not have them. They are"
    yield "compared with the models' own code on the CPU, Baichuan also on the simulated card."
    yield "- **DeepSeek-MoE 16B and Ling**: transformers does not have them. They are compared"
    yield "on the CPU with a Qwen 2 MoE or a GLM 4.5 of transformers with the same weights."
    yield "- **Models that read images**: their language models are compared with transformers"
    yield "on the CPU. [Multimodal input](multimodal.md) describes the tests with images."
    yield ""
    yield "ChatGLM and InternLM are not run on the simulated card. Their layers are the same as"
    yield "in GLM and in Llama."
    yield ""
    yield "Three special cases:"
    yield ""
    yield "- `TransformersForCausalLM` runs the modules of transformers. It is compared with"
    yield "transformers on the CPU and on the simulated card. It refuses models with"
    yield "`num_kv_shared_layers` above 0, such as Gemma 3n and Gemma 4. These run with the"
    yield "model classes of this package by default."
    yield "- Phi 3 has different rotary frequencies for long contexts. For these, only whole"
    yield "prompts are compared, because transformers changes the frequencies while a request"
    yield "grows."
    yield "- Models with a recurrent state run module by module and without merged prefill. They"
    yield "have Mamba layers (Bamba, GraniteMoeHybrid, Mamba, Mamba2, Zamba2), DeltaNet layers"
    yield "(Qwen3-Next, Qwen 3.5 and 3.6) or short convolutions (LFM2). `max_num_seqs` is 32 by"
    yield "default, because the recurrent states of all requests are allocated at the start. The"
    yield "prefix cache keeps up to `num_kept_states` recurrent states."
    for kind, title in ((CausalLM, "Text generation"), (PoolingModel, "Embeddings and scores")):
        yield ""
        yield f"## {title}"
        yield ""
        tested = tuple(_TESTED) if kind is CausalLM else ()
        yield _row("architecture", "what it is", *tested)
        yield _row("---", "---", *("---" for _ in tested))
        for name in ModelRegistry.supported():
            model = ModelRegistry.resolve(name)
            if issubclass(model, kind):
                text = " ".join((inspect.getdoc(model) or "").split("\n\n")[0].split())
                if model.__name__ != name:
                    text = f"Another name of `{model.__name__}`."
                marks = ("yes" * (name in architectures_with(column)) for column in tested)
                yield _row(f"`{name}`", text, *marks)


def glossary() -> Iterator[str]:
    """Write the glossary."""
    yield _NOTE
    yield "# Glossary"
    yield ""
    yield "Messages, pages, docstrings and comments use the usual words of the field. `make"
    yield "lint` runs `tools/check_prose.py`, which finds the words that only this project uses"
    yield "([CONTRIBUTING](../CONTRIBUTING.md#english))."
    yield from _table("Words", "write", "instead of", "meaning", "counts in")
    for term in Glossary.load(ROOT / GLOSSARY).terms:
        kinds = ", ".join(f"{kind}s" for kind in term["in"])
        yield _row(term["use"], term["private"], term.get("means", ""), kinds)


def layers() -> Iterator[str]:
    """Write the page about folders as it is, with the layers of pyproject.toml."""
    yield from _page_with_part("design/layers.md", "layers", _layers_of_package())


def messages() -> Iterator[str]:
    """Write the page of all errors and log lines."""
    yield _NOTE
    yield from messages_page(ROOT)


def performance() -> Iterator[str]:
    """Write the page about speed as it is, with the tables of benchmarks/results.json."""
    yield from _page_with_part("performance.md", "results", result_tables(read_machines(ROOT)))


def performance_picture() -> Iterator[str]:
    """Draw the results of benchmarks/results.json."""
    yield from result_picture(read_machines(ROOT))


def quantization() -> Iterator[str]:
    """Write the page about quantization as it is, with the steps of a calibration."""
    yield from _page_with_part("quantization.md", "steps", _steps_of_calibration())


def _page_with_part(name: str, part: str, lines: Iterator[str]) -> Iterator[str]:
    """Write a page as it is, with other lines between the comments about a part."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    before, begin, rest = page.partition(f"<!-- {part}, by tools/generate_docs.py -->\n")
    _, end, after = rest.partition(f"<!-- end of {part} -->\n")
    assert begin and end, f"docs/{name} has no comments about its {part}"
    yield before + begin.rstrip()
    yield from lines
    yield end + after.rstrip("\n")


def _steps_of_calibration() -> Iterator[str]:
    yield _row("`--step`", "what it does", "needs", "writes")
    yield "|---|---|---|---|"
    for name, step in STEPS.items():
        names = f"`{name}`" if step.script_number is None else f"`{name}`, `{step.script_number}`"
        only_with = "" if step.flag is None else f"; only with `{step.flag} N`"
        yield _row(names, f"{step.does}{only_with}", step.needs, step.writes)


def _layers_of_package() -> Iterator[str]:
    contracts = read_layers(ROOT)
    package, entrypoints = contracts["vllm"], contracts["vllm.entrypoints"]
    *folders, leaves = package.layers
    imported = _imported_folders(package)
    yield "| folder | imports (without leaf modules) | what it is |"
    yield "| --- | --- | --- |"
    for layer in folders:
        for module in layer.modules:
            found = imported[module] - {*leaves.modules}
            names = ", ".join(sorted(_short(name) for name in found))
            yield _row(f"`{_short(module)}`", names or "nothing", _first_sentence(module))
    yield ""
    yield "Leaf modules, which may import each other: " + (
        ", ".join(f"`{_short(module)}`" for module in leaves.modules) + "."
    )
    yield ""
    yield "The packages inside `entrypoints` have an order as well. A package may import only"
    yield "packages of lower lines:"
    yield ""
    for layer in entrypoints.layers:
        yield "    " + ", ".join(m.removeprefix("vllm.entrypoints.") for m in layer.modules)


def _imported_folders(package: Layers) -> dict[str, set[str]]:
    """Return the modules of the layers that each of them imports."""
    # Keep no other nodes: in a test, garbage collections of so many take half of the time.
    trees = {
        name: [node for node in parse(source) if isinstance(node, ast.Import | ast.ImportFrom)]
        for name, source in read_sources(ROOT).items()
    }
    found: dict[str, set[str]] = defaultdict(set)
    for name, targets in imports_between(trees).items():
        module = package.module_of(module_name(name))
        others = {package.module_of(module_name(target)) for target in targets}
        if module is not None:
            found[module] |= {other for other in others if other not in (None, module)}
    return found


def _short(module: str) -> str:
    return module.removeprefix("vllm.")


def _first_sentence(module: str) -> str:
    source = (ROOT / module.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
    paragraph = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "compatibility.md": compatibility,
    "design/layers.md": layers,
    "env_variables.md": env_variables,
    "engine_arguments.md": engine_arguments,
    "glossary.md": glossary,
    "messages.md": messages,
    "performance.md": performance,
    "performance.svg": performance_picture,
    "quantization.md": quantization,
    "server_arguments.md": server_arguments,
    "supported_models.md": supported_models,
}


def main() -> int:
    """Write or check every page, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="default: docs")
    args = parser.parse_args()
    stale = []
    for name, lines in PAGES.items():
        path, text = args.folder / name, "\n".join(lines()) + "\n"
        if args.check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"out of date, run tools/generate_docs.py: {', '.join(stale)}\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
