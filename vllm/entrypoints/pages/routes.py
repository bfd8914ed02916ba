"""Serve the pages and their data."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.pages import chat_page, status_page
from vllm.entrypoints.pages.web_page import load_page, page_paths
from vllm.entrypoints.shared.server_args import ServerArgs


def page_routers(args: ServerArgs) -> list[APIRouter]:
    """Return the routers of the pages that this server shows."""
    pages = APIRouter(include_in_schema=False)
    for path, name in page_paths(args).items():
        pages.add_api_route(path, _show(name), methods=["GET", "HEAD"])
    routers = [pages]
    if not args.disable_web_ui:
        routers.append(chat_page.router)
    if args.status_page:
        routers.append(status_page.router)
    return routers


def _show(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def show(request: Request) -> Response:
        """Return the page; 304 without a body if the browser has it cached."""
        page = load_page(name)
        if request.headers.get("if-none-match") == page.headers["etag"]:
            return Response(status_code=304, headers=page.headers)
        return Response(page.body, headers=page.headers)

    return show
