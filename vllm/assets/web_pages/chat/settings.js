// Settings of a conversation: texts as they were typed, by name; what is empty is left to the server.

// The settings of the fields that a selector finds.
const settingsOf = (selector) => [...document.querySelectorAll(selector)].map((field) => field.dataset.setting);

const Settings = {
  NUMBERS: settingsOf("#settings [data-setting][type=number]"),
  NAMES: ["model", ...settingsOf("#settings [data-setting]")],

  // JSON of a setting; undefined when it is empty. Throws an Error that names the setting.
  json(settings, name, label) {
    const text = (settings[name] || "").trim();
    if (!text) return undefined;
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`${label}: this is not JSON (${error.message})`);
    }
  },

  schema(settings) {
    const schema = Settings.json(settings, "schema", "JSON schema");
    if (schema !== undefined && (typeof schema !== "object" || schema === null || Array.isArray(schema))) {
      throw new Error("JSON schema: it must be a JSON object");
    }
    return schema;
  },

  // A list of tools; a single one and bare functions are taken too.
  tools(settings) {
    const given = Settings.json(settings, "tools", "Tools");
    if (given === undefined) return [];
    return [given].flat().map((tool) => {
      const whole = tool?.function ? tool : {type: "function", function: tool};
      if (typeof whole.function?.name !== "string") {
        throw new Error("Tools: each tool needs a name, as in {\"type\": \"function\", \"function\": {\"name\": ...}}");
      }
      return whole;
    });
  },

  extra(settings) {
    const extra = Settings.json(settings, "extra", "Further fields");
    if (extra !== undefined && (typeof extra !== "object" || extra === null || Array.isArray(extra))) {
      throw new Error("Further fields: they must be a JSON object");
    }
    return extra ?? {};
  },

  // One per line; \n and \t stand for what they mean.
  stop(settings) {
    const escapes = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"};
    return (settings.stop || "").split("\n").filter((line) => line)
      .map((line) => line.replace(/\\[nt\\]/g, (found) => escapes[found]));
  },
};

// The dialog with the settings of the conversation that is shown.
class SettingsDialog {
  // onChange(settings): they have changed.
  constructor(onChange) {
    this.dialog = byId("settings");
    this.fields = [...this.dialog.querySelectorAll("[data-setting]")];
    this.settings = {};
    this.server = {};
    this.onChange = onChange;
    for (const field of this.fields) field.addEventListener("change", () => this.take(field));
    byId("open-settings").addEventListener("click", () => this.open());
    byId("settings-form").addEventListener("submit", (event) => {
      if (this.fields.some((field) => field.ariaInvalid === "true")) event.preventDefault();
    });
    byId("reset-settings").addEventListener("click", () => {
      for (const name of Object.keys(this.settings)) if (name !== "model") delete this.settings[name];
      this.fill();
      this.onChange();
    });
  }

  open() {
    this.fill();
    this.dialog.showModal();
  }

  // What the server says of its model, for the defaults that are shown.
  describe(server) {
    this.server = server;
    for (const [name, value] of Object.entries(server.sampling_defaults ?? {})) {
      byId(name).placeholder = String(value ?? "random");
    }
    byId("max_tokens").placeholder = "all that fit";
    showText("mode-note", server.has_chat_template ? ""
      : "This model has no chat template: the text of the conversation is continued as it stands.");
    showText("tool-note", server.has_auto_tool_choice ? ""
      : "The model may decide itself (auto) when the server is started with --enable-auto-tool-choice and --tool-call-parser.");
    byId("mode").querySelector("[value=chat]").disabled = !server.has_chat_template;
  }

  fill() {
    this.fillToolChoice();
    for (const field of this.fields) {
      const value = this.settings[field.dataset.setting] ?? "";
      field.value = field.tagName === "SELECT" && !value ? field.options[0].value : value;
      this.complain(field, "");
    }
  }

  fillToolChoice() {
    const isAuto = this.server.has_auto_tool_choice, choices = [["", isAuto ? "auto" : "required"]];
    if (isAuto) choices.push(["required", "required"]);
    choices.push(["none", "none"]);
    try {
      for (const tool of Settings.tools(this.settings)) choices.push([`=${tool.function.name}`, tool.function.name]);
    } catch {
      // Its own field tells what is wrong.
    }
    byId("tool_choice").replaceChildren(...choices.map(([value, label]) => element("option", {value}, label)));
    byId("tool_choice").value = this.settings.tool_choice ?? "";
    if (byId("tool_choice").selectedIndex < 0) byId("tool_choice").value = "";
  }

  take(field) {
    const name = field.dataset.setting, before = this.settings[name];
    let problem = field.validity.valid ? "" : field.validationMessage;
    if (!problem) {
      if (field.value) this.settings[name] = field.value;
      else delete this.settings[name];
      try {
        if (name in Settings && typeof Settings[name] === "function") Settings[name](this.settings);
      } catch (error) {
        problem = error.message;
        if (before === undefined) delete this.settings[name];
        else this.settings[name] = before;
      }
    }
    this.complain(field, problem);
    if (name === "tools") this.fillToolChoice();
    if (!problem) this.onChange();
  }

  complain(field, problem) {
    const id = `${field.id}-problem`;
    byId(id)?.remove();
    field.ariaInvalid = problem ? "true" : null;
    if (problem) {
      field.after(element("p", {id, className: "problem wide", role: "alert"}, problem));
      field.setAttribute("aria-describedby", id);
    } else field.removeAttribute("aria-describedby");
  }
}
