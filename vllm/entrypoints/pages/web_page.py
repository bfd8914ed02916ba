"""A page as one document: styles and scripts are inlined, and its headers allow only these.

A page lies in a folder of `vllm/assets/web_pages`. Its `page.html` names the files it is made of:
`<script>/* include: shared/a.js chat/b.js */</script>`. The browser loads nothing else, so a page
works without a network, and text that a model or a client wrote can never run.

Uses no framework, because pages are also served before the application is imported.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from vllm import assets

_INCLUDE = re.compile(r"<(style|script)( [^>]*)?>/\* include: ([^*]+) \*/</\1>")


@dataclass(frozen=True)
class WebPage:
    """One document.

    Attributes:
        body: HTML in UTF-8.
        headers: of its response; names in lower case. The etag changes with the body.
    """

    body: bytes
    headers: Mapping[str, str]


@cache
def load_page(name: str) -> WebPage:
    """The page in the folder of this name."""
    sources: dict[str, list[str]] = {"style": [], "script": []}

    def include(match: re.Match[str]) -> str:
        kind, attributes, paths = match.groups(default="")
        text = "\n".join(_read(path) for path in paths.split())
        assert f"</{kind}" not in text, f"{name}: the {kind} would end before its end"
        sources[kind].append(_hash(text))
        return f"<{kind}{attributes}>{text}</{kind}>"

    body = _INCLUDE.sub(include, _read(f"{name}/page.html")).encode()
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": _policy(sources["style"], sources["script"]),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "x-dns-prefetch-control": "off",  # showing a link must not cause a DNS look-up
        "cache-control": "no-cache",  # the browser asks each time; the etag makes the answer short
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return WebPage(body, headers)


def _policy(styles: list[str], scripts: list[str]) -> str:
    """Own styles and scripts run, requests go to this server alone, and no text becomes HTML."""
    return (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src {' '.join(styles)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _read(path: str) -> str:
    return (files(assets) / "web_pages" / path).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
