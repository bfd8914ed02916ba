"""Create the page of `vllm plan --html`: one file that contains its data and needs no server.

It only reads the object that `vllm plan --json` prints, independent of how a plan is made.
"""

import json
from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.pages.web_page import load_page

_POLICY, _PLAN = "<!-- policy -->", "<!-- plan -->"


def plan_page(plan: Mapping[str, Any]) -> str:
    """Return the HTML document of a plan.

    Args:
        plan: object of `vllm plan --json`.
    """
    page = load_page("plan")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{page.file_policy}">'
    # Escaped, so that no string can close the script element.
    data = json.dumps(plan, allow_nan=False).replace("<", "\\u003c")
    return page.body.decode().replace(_POLICY, policy).replace(_PLAN, data)
