"""Test that the pages about Gaudi name only variables, flags and files that exist."""

import re
from dataclasses import fields
from pathlib import Path

from tests.docker.dockerfile import parse, read_stages
from vllm.envs import Envs

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README_GAUDI.md").read_text()
OTHER_PAGES = [ROOT / "docs" / "gaudi_buckets.md", ROOT / "docs" / "tuning_gaudi.md"]


def test_links_lead_somewhere():
    def anchors_of(text):
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}

    targets = re.findall(r"\]\(([^)]+)\)", TEXT)
    local = [target for target in targets if not target.startswith("https://docs.habana.ai/")]
    assert len(local) > 10
    for target in local:
        name, _, anchor = target.partition("#")
        assert (ROOT / name).exists(), target
        if anchor:
            page = (ROOT / name).read_text(encoding="utf-8") if name else TEXT
            assert anchor in anchors_of(page), target


def test_variables_that_are_recommended_have_an_effect():
    """Our variables are declared, and variables of other software are on the page of variables."""
    declared = {field.name for field in fields(Envs)}
    page = (ROOT / "docs" / "env_variables.md").read_text()
    text = "\n".join([TEXT, *(other.read_text() for other in OTHER_PAGES)])
    names = set(re.findall(r"\b(?:VLLM|PT_HPU|FUSER|HABANA|HF)_[A-Z0-9_]*[A-Z0-9]\b(?!_)", text))
    assert {"VLLM_GRAPH_RESERVED_MEM", "PT_HPU_LAZY_MODE"} <= names
    ours = {name for name in names if name.startswith("VLLM_")}
    assert not ours - declared
    assert not [name for name in names - ours if f"`{name}`" not in page]


def test_the_table_of_build_arguments_is_that_of_the_dockerfile():
    table = dict(re.findall(r"^\| `([A-Z_]+)` \| `([^`]+)`", TEXT, re.MULTILINE))
    arguments = dict(
        instruction.text.split("=", 1)
        for instruction in parse((ROOT / "Dockerfile.hpu").read_text())
        if instruction.name == "ARG"
    )
    arguments.pop("BASE_IMAGE")  # the default of BASE_IMAGE is made of other arguments
    assert arguments.items() <= table.items()


def test_the_table_of_versions_is_that_of_the_dockerfiles_and_the_pins():
    systems = {}
    for name in ("Dockerfile.hpu", "Dockerfile.hpu.ubi"):
        for stage in read_stages(parse((ROOT / name).read_text()), {})[:-2]:
            _, _, release, system, _, image = stage.image.removesuffix(":latest").split("/")
            systems.setdefault((release, image), []).append(re.sub("ubuntu|rhel", "", system))
    rows = []
    for (release, image), (ubuntu, red_hat) in systems.items():
        torch = image.rpartition("-")[2]
        pins = (ROOT / "tests" / "vendor" / f"torch-{torch}.txt").read_text()
        (python,) = re.findall(rf"^# Gaudi software {release} on Python (.*):", pins)
        rows.append([release, torch, f"{ubuntu}, {python}", f"`{image}`", red_hat])
    section = TEXT.partition("\n### Versions\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\| (\d.*) \|$", section, re.MULTILINE)
    assert [row.split(" | ")[:5] for row in table] == rows
