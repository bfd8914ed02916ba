"""The page of `vllm plan --html`: one file that has its data in it, and asks no server.

Knows the object that `vllm plan --json` prints, and nothing of how a plan is made.
"""

import json
from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.pages.web_page import load_page

_POLICY, _PLAN = "<!-- policy -->", "<!-- plan -->"


def plan_page(plan: Mapping[str, Any]) -> str:
    """Return the document.

    Args:
        plan: the object of `vllm plan --json`.
    """
    page = load_page("plan")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{page.file_policy}">'
    # Escaped, so that no string can close the script element.
    data = json.dumps(plan, allow_nan=False).replace("<", "\\u003c")
    return page.body.decode().replace(_POLICY, policy).replace(_PLAN, data)
