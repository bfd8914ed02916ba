"""Write the reference pages of docs/ from the code that defines what they describe.

python tools/generate_docs.py            write them
python tools/generate_docs.py --check    exit with 1 and name the pages that are out of date
"""

import argparse
import ast
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
from vllm.env.compat import COMPAT_VARIABLES  # noqa: E402
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
    yield 'Read once, when the package is first used. An empty value means "not set"; a value that'
    yield "does not parse is an error; a `VLLM_` name that is not listed is a warning. A switch is"
    yield "`1`, `true`, `t`, `yes`, `y`, `on` or `0`, `false`, `f`, `no`, `n`, `off`."
    yield ""
    yield "`VLLM_PROMPT_QUERY_BUCKET_*`, the names of the plugin, are read as"
    yield "`VLLM_PROMPT_SEQ_BUCKET_*`; both with different values are an error."
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
    yield "An engine does not start while one of these is set: its results would differ from"
    yield "what was requested. (A switch may be set to 0.)"
    yield from _table("Recognised without effect", "variables", "why they have no effect")
    yield from _compat_rows(available=True)
    yield ""
    yield "Variables of the vLLM 0.9 Gaudi fork, of its plugin, and of the vLLM they build on. One"
    yield "that is set is a warning at the start, unless it is a switch that asks for what happens"
    yield "anyway."
    yield from _table("Set for the Habana bridge", "variable", "value", "modes", "why", "source")
    for setting in BRIDGE_SETTINGS:
        value = f"`{setting.value}`"
        yield _row(f"`{setting.name}`", value, setting.modes, setting.why, setting.source)
    yield ""
    yield "Every process that opens a card sets them before the bridge is imported, or once the"
    yield "bridge says in which mode it is. A value of your own stays. The log and the command"
    yield "`collect-env` show values, and whose choice each is. What they bring was not measured"
    yield "on a card."
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
    yield "Keywords of `LLM()` and `EngineArgs()`, and flags of the commands: `max_model_len` is"
    yield "`--max-model-len` (underscores are accepted too), and a switch has a `--no-` form."
    yield "Leaving an argument out, or `None`, gives the default. JSON needs quotes in a shell:"
    yield "`--hf-overrides '{\"max_position_embeddings\": 8192}'`."
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
    yield "Flags of `vllm serve [MODEL]` and of `python -m vllm.entrypoints.openai.api_server`,"
    yield "besides those of [the engine](engine_arguments.md). A switch has a `--no-` form. A list"
    yield "takes several words after one flag, or the flag several times."
    yield ""
    yield "`--config FILE` names a YAML file of flags without their dashes, of server and engine."
    yield "The command line has priority, and a name that is not a flag is an error:"
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
    yield "## Arguments of the vLLM 0.9 Gaudi fork"
    yield ""
    yield "`rope_scaling` and `rope_theta` are taken as `hf_overrides`; `speculative_model`,"
    yield "`num_speculative_tokens`, `ngram_prompt_lookup_max`, `ngram_prompt_lookup_min` and"
    yield "`speculative_disable_by_batch_size` as `speculative_config`."
    accepted = [a for a in COMPAT_ARGUMENTS.values() if a.available]
    missing = [a for a in COMPAT_ARGUMENTS.values() if not a.available]
    yield ""
    yield "Accepted with a warning, without effect:"
    yield from _compat_table(accepted, "why it has no effect")
    yield ""
    yield "Not available in this version; anything but the value given here is an error:"
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
    return {bool: "`0` or `1`", int: "integer", float: "number", str: "text"}[type_]


def _value(field: ConfigField) -> str:
    words = {
        "bool": "switch",
        "int": "integer",
        "size": "integer; also with k (1000), K (1024), m, M, g, G",
        "float": "number",
        "str": "text",
        "str_or_bool": "text, or a switch",
        "strings": "one or more texts",
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
    "modules": "run module by module on the CPU, tokens and log-probabilities are those of "
    "transformers",
    "program": "run as one call of C++, log-probabilities are those of transformers. So is a "
    "forward pass on the CPU where weights are packed (bf16 and quantized)",
    "bf16": "in bf16, by modules and by the program, log-probabilities are as near to those of "
    "float32 as transformers in bf16 is",
    "HPU graphs": "tokens and log-probabilities on the simulated card with HPU graphs are those of "
    "transformers, and nothing compiles after the warm-up",
    "torch.compile": "the same with torch.compile",
    "2 ranks": "the parts that 2 ranks load of a checkpoint together give the results of one",
    "4 ranks": "the same of 4 ranks",
    "pipeline": "2 stages on the CPU give the tokens of one process",
    "LoRA": "adapters give the outputs of peft",
    "GGUF": "a GGUF file gives the logits of the same weights in transformers",
}


def supported_models() -> Iterator[str]:
    """Write the page about supported architectures."""
    yield _NOTE
    yield "# Supported models"
    yield ""
    yield "A model runs if `architectures` in its config.json names one of these. Other models can"
    yield "be added by a plug-in: `ModelRegistry.register_model(name, class)` in a program, or in a"
    yield "function that an installed package names as an entry point of the group"
    yield "`vllm.general_plugins`. Such functions run once at the start of every process of an"
    yield "engine; `VLLM_PLUGINS` chooses among them. In the package's pyproject.toml:"
    yield ""
    yield '    [project.entry-points."vllm.general_plugins"]'
    yield '    my_models = "my_package:register"'
    yield ""
    yield "Any other model is refused with one line that says so, names the nearest architecture"
    yield "and lists all of them, whatever its config.json has or lacks. Older names of an"
    yield "architecture and of keys are read (RWForCausalLM, InternLMForCausalLM, ...)."
    yield "`python -m benchmarks.check_model_configs` starts models with 395 configs, most of them"
    yield "written from memory of published ones, with small sizes and random weights, and says"
    yield "which of them run."
    yield ""
    yield "Each decoder is compared with transformers on small random models, in float32: logits"
    yield "of whole prompts, and 14 prompts with 16 tokens each, in chunks, with preemption and"
    yield "prefix hits. A log-probability may differ by 0.0001 (Gemma 3: 0.0002). The columns are"
    yield "read from the parameters of the tests: `yes` means that a small random model of the"
    yield "architecture is tested so, an empty cell that it is not."
    yield ""
    for capability, meaning in _TESTED.items():
        yield f"- {capability}: {meaning}."
    yield "- lines: of the family's file in vllm/model_executor/models, which may have others too."
    yield ""
    yield "The simulated card computes on the CPU: these tests run nothing on a real card."
    yield ""
    yield "DeepSeek-MoE 16B and Ling, which transformers does not have, are compared on the CPU"
    yield "with a Qwen 2 MoE or a GLM 4.5 of transformers with the same weights."
    yield ""
    yield "Every family with marks runs on the simulated card. Empty rows are other names of a"
    yield "family, or these: Baichuan, ChatGLM and InternLM, which transformers does not have,"
    yield "are compared on the CPU (Baichuan also on the simulated card) with what their own code"
    yield "computes. Models with a part for images are their language models with other names of"
    yield "tensors, and are compared with transformers on the CPU. They, ChatGLM and InternLM are"
    yield "not run on the simulated card: what they compute there is what a GLM, a Llama or the"
    yield "language model does. `TransformersForCausalLM` runs modules of transformers, and is"
    yield "compared with them on the CPU and on the simulated card. Phi 3 with a context so long"
    yield "that its rotations change is compared with transformers for whole prompts only,"
    yield "because transformers changes them while a request grows."
    yield "`TransformersForCausalLM` refuses models with `num_kv_shared_layers` above 0, because"
    yield "layers of these models read the keys and values of earlier layers. Gemma 3n and Gemma 4"
    yield "run with the modules of this package, which is the default."
    yield ""
    yield "Models with states (Mamba layers: Bamba, GraniteMoeHybrid, Mamba, Mamba2, Zamba2;"
    yield "DeltaNet layers: Qwen3-Next, Qwen 3.5 and 3.6; short convolutions: LFM2) run without"
    yield "programs and merged prefill. The prefix cache"
    yield "keeps up to `num_kept_states` states: where prompts part, at the last full block"
    yield "of a prompt, and at the newest full block of an output. `max_num_seqs` is 32 by default"
    yield "for these models: the states of all requests are allocated at the start, and the log"
    yield "says how large they are."
    for kind, title in ((CausalLM, "Text generation"), (PoolingModel, "Embeddings and scores")):
        yield ""
        yield f"## {title}"
        yield ""
        tested = tuple(_TESTED) if kind is CausalLM else ()
        yield _row("architecture", "what it is", "lines", *tested)
        yield _row("---", "---", "---", *("---" for _ in tested))
        for name in ModelRegistry.supported():
            model = ModelRegistry.resolve(name)
            if issubclass(model, kind):
                text = " ".join((inspect.getdoc(model) or "").split("\n\n")[0].split())
                if model.__name__ != name:
                    text = f"Another name of `{model.__name__}`."
                marks = ("yes" * (name in architectures_with(column)) for column in tested)
                lines = len(inspect.getsource(sys.modules[model.__module__]).splitlines())
                yield _row(f"`{name}`", text, f"{lines}", *marks)


def glossary() -> Iterator[str]:
    """Write the glossary."""
    yield _NOTE
    yield "# Glossary"
    yield ""
    yield "Messages, pages, docstrings and comments use the words of the field. `make lint` finds"
    yield "the others with `tools/check_prose.py` ([CONTRIBUTING](../CONTRIBUTING.md))."
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
    yield "Inside `entrypoints`, the highest first; modules of one line do not import each other:"
    yield ""
    for layer in entrypoints.layers:
        yield "    " + ", ".join(m.removeprefix("vllm.entrypoints.") for m in layer.modules)


def _imported_folders(package: Layers) -> dict[str, set[str]]:
    """Return the modules of the layers that each of them imports."""
    # Keep no other nodes: garbage collections of so many objects take half of the time.
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
