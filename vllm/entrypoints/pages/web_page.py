"""Build each page as one document: styles and scripts are inlined, and its headers allow only
these.

The files of a page are in a folder of `vllm/assets/web_pages`. Its `page.html` names the files to
include: `<script>/* include: shared/a.js chat/b.js */</script>`. The browser loads nothing else, so
a page works without a network, and text that a model or a client wrote can never run.

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
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.sampling_params import Interface, NumberRange, numbers_of

_NUMBERS = "<!-- sampling numbers -->"
_LARGEST_LIMIT = 2**53
"""Browsers compute with floats: larger limits would refuse numbers."""
_INCLUDE = re.compile(r"<(style|script)( [^>]*)?>/\* include: ([^*]+) \*/</\1>")


@dataclass(frozen=True)
class WebPage:
    """A page as one document.

    Attributes:
        body: HTML in UTF-8.
        headers: headers of its response, with lower-case names. The etag changes with the body.
        file_policy: the content security policy of a page that is a file and needs no server.
    """

    body: bytes
    headers: Mapping[str, str]
    file_policy: str


def page_paths(args: ServerArgs) -> dict[str, str]:
    """Return path -> page name for the pages of this server."""
    paths: dict[str, str] = {}
    if args.status_page:
        paths |= {"/": "status", "/status": "status"}
    if not args.disable_web_ui:
        paths["/"] = "chat"
    if not args.disable_fastapi_docs:
        paths["/docs"] = "docs"
    return paths


@cache
def load_page(name: str) -> WebPage:
    """Load the page from the folder of this name."""
    sources: dict[str, list[str]] = {"style": [], "script": []}

    def include(match: re.Match[str]) -> str:
        kind, attributes, paths = match.groups(default="")
        text = "\n".join(_read(path) for path in paths.split())
        assert f"</{kind}" not in text, f"{name}: the {kind} would end before its end"
        sources[kind].append(_hash(text))
        return f"<{kind}{attributes}>{text}</{kind}>"

    html = _read(f"{name}/page.html").replace(_NUMBERS, _number_fields())
    body = _INCLUDE.sub(include, html).encode()
    policy = _policy(sources["style"], sources["script"])
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": f"{policy}; connect-src 'self'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "x-dns-prefetch-control": "off",  # prevents DNS look-ups for links that the page only shows
        # The browser revalidates each time; thanks to the ETag the answer is short.
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return WebPage(body, headers, policy)


def _number_fields() -> str:
    """Return the HTML fields of the sampling parameters on the chat page."""
    numbers = numbers_of(Interface.PAGE)
    # Penalties last, because they are rarely used.
    names = sorted(numbers, key=lambda name: name.endswith("_penalty"))
    return "\n".join(_number_field(name, numbers[name]) for name in names)


def _number_field(name: str, number: NumberRange) -> str:
    is_integer = number.kind is int
    least = number.at_least if number.above is None else number.above
    limits = "".join(
        f' {attribute}="{limit}"'
        for attribute, limit in (("min", least), ("max", number.at_most))
        if limit is not None and abs(limit) < _LARGEST_LIMIT
    )
    keys = "" if least is None or least < 0 else "numeric" if is_integer else "decimal"
    return (
        f'<label for="{name}">{name.replace("_", " ").capitalize()}</label>\n'
        f'<input id="{name}" data-setting="{name}" type="number"{limits} '
        f'step="{1 if is_integer else "any"}"' + (f' inputmode="{keys}">' if keys else ">")
    )


def _policy(styles: list[str], scripts: list[str]) -> str:
    """Return a content security policy: only the page's own styles and scripts run, nothing is
    requested, and no text becomes HTML.
    """
    return (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src {' '.join(styles)}; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _read(path: str) -> str:
    return (files(assets) / "web_pages" / path).read_text(encoding="utf-8-sig")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
