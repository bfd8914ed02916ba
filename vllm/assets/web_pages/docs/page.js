// Lists the routes of the server and the fields of their bodies, from its OpenAPI description.

const nameOf = (schema) => schema.$ref.split("/").pop();

function typeOf(schema) {
  if (schema.$ref) return nameOf(schema);
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return choices.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  return schema.type === "array" ? `list of ${typeOf(schema.items || {})}` : schema.type || "any";
}

// The fields of a body; `all` are the named schemas.
function fieldsOf(schema, all) {
  const target = schema.$ref ? all[nameOf(schema)] : schema;
  const rows = Object.entries(target?.properties ?? {}).map(([name, field]) => {
    const isNeeded = (target.required || []).includes(name);
    const preset = isNeeded ? "required" : field.default === undefined ? "" : JSON.stringify(field.default);
    return element("tr", {}, element("td", {}, element("code", {}, name)), element("td", {}, typeOf(field)),
      element("td", {}, preset), element("td", {}, field.description || ""));
  });
  if (!rows.length) return element("p", {}, typeOf(schema));
  const head = ["field", "type", "default", ""].map((title) => element("th", {scope: "col"}, title));
  const table = element("table", {}, element("tr", {}, ...head), ...rows);
  return element("div", {className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Fields"}, table);
}

function showRoutes(api) {
  const all = api.components?.schemas ?? {};
  const routes = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, route]) => {
      const body = route.requestBody?.content?.["application/json"];
      return element("details", {},
        element("summary", {}, element("b", {}, method.toUpperCase()), element("code", {}, path)),
        element("p", {}, route.description || route.summary || ""),
        ...(body ? [fieldsOf(body.schema, all)] : []));
    }));
  byId("routes").role = null;
  byId("routes").replaceChildren(...routes);
}

async function load() {
  try {
    const response = await fetch("openapi.json", {headers: ApiKey.headers()});
    if (response.status === 401) {
      showText("routes", "");
      keyForm.ask();
      return;
    }
    if (!response.ok) throw new Error(`The server answered with status ${response.status}.`);
    keyForm.hide();
    showRoutes(await response.json());
  } catch (error) {
    showText("routes", error.message);
  }
}

const keyForm = new KeyForm(load);
load();
