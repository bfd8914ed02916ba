"""Define the paths of the pages. Uses no framework, because they are needed before the application
is imported.
"""

from vllm.entrypoints.shared.server_args import ServerArgs


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
