"""GET /docs: the routes of this server, from its own OpenAPI description, without other hosts."""

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """A page that lists routes and fields."""
    root_path = request.scope.get("root_path", "")
    return HTMLResponse(_PAGE.replace("ROOT_PATH", root_path.replace('"', "")))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>vllm: API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="root-path" content="ROOT_PATH">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .3rem 0 } code { font-family: ui-monospace, monospace }
b { display: inline-block; width: 4rem } table { border-collapse: collapse; margin: .5rem 0 }
td, th { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top }
details { border-bottom: 1px solid #8884 } :root { color-scheme: light dark }
</style></head><body><h1>API of this server</h1>
<p>The same as JSON: <a href="openapi.json">openapi.json</a></p><main>Loading...</main>
<script>
const el = (tag, text, ...children) => {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  node.append(...children);
  return node;
};
const type = s => s.$ref ? s.$ref.split("/").pop()
  : (s.anyOf || s.oneOf) ? (s.anyOf || s.oneOf).map(type).join(" | ")
  : s.enum ? s.enum.map(v => JSON.stringify(v)).join(" | ")
  : s.type === "array" ? "list of " + type(s.items || {}) : s.type || "any";
const fields = (schema, all) => {
  const target = schema.$ref ? all[schema.$ref.split("/").pop()] : schema;
  const rows = Object.entries((target || {}).properties || {}).map(([name, field]) => {
    const needed = (target.required || []).includes(name) ? "required"
      : field.default === undefined ? "" : JSON.stringify(field.default);
    return el("tr", "", el("td", "", el("code", name)), el("td", type(field)), el("td", needed),
      el("td", field.description || ""));
  });
  const head = el("tr", "", ...["field", "type", "default", ""].map(h => el("th", h)));
  return rows.length ? el("table", "", head, ...rows) : el("p", type(schema));
};
const root = document.querySelector("meta[name=root-path]").content;
fetch(root + "/openapi.json").then(r => r.json()).then(api => {
  const all = (api.components || {}).schemas || {};
  const main = document.querySelector("main");
  main.textContent = "";
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, route] of Object.entries(methods)) {
      const body = ((route.requestBody || {}).content || {})["application/json"];
      const line = el("summary", "", el("b", method.toUpperCase()), el("code", path));
      main.append(el("details", "", line, el("p", route.description || route.summary || ""),
        ...(body ? [fields(body.schema, all)] : [])));
    }
}).catch(error => { document.querySelector("main").textContent = String(error); });
</script></body></html>
"""
