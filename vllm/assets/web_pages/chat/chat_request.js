// From a conversation and its settings to a request of the API.

const DEFAULT_COMPLETION_TOKENS = 256; // the API would stop after 16

// How a model is talked to: "chat" or "completion".
function modeOf(settings, server) {
  if (!server.has_chat_template) return "completion";
  return settings.mode === "completion" ? "completion" : "chat";
}

// Kinds of pictures and recordings that a request may have: "image" and "audio".
function kindsOf(settings, server) {
  return modeOf(settings, server) === "chat" ? (server.modalities ?? []).filter((each) => each !== "text") : [];
}

// {path, body, isJson}: the request for an answer behind the messages of a path. `media` has loaded
// what the messages have. Throws an Error that says which setting is wrong.
function makeRequest(path, settings, server, media) {
  const isChat = modeOf(settings, server) === "chat", schema = Settings.schema(settings);
  const body = {model: settings.model, stream: true,
    stream_options: {include_usage: true, continuous_usage_stats: true}};
  for (const name of Settings.NUMBERS) {
    if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (Settings.stop(settings).length) body.stop = Settings.stop(settings);
  if (schema) {
    body.response_format = Object.keys(schema).length === 0 ? {type: "json_object"}
      : {type: "json_schema", json_schema: {name: "answer", schema, strict: true}};
  }
  if (isChat) {
    body.messages = messagesOf(path, settings, server, media);
    addTools(body, settings, server);
  } else {
    body.prompt = path.map((message) => message.content).join("");
    body.max_tokens ??= DEFAULT_COMPLETION_TOKENS;
  }
  Object.assign(body, Settings.extra(settings));
  return {path: isChat ? "v1/chat/completions" : "v1/completions", body, isJson: Boolean(schema)};
}

function messagesOf(path, settings, server, media) {
  const messages = [], kinds = kindsOf(settings, server);
  if (settings.system) messages.push({role: "system", content: settings.system});
  for (const message of path) {
    if (message.role === "assistant") {
      if (!message.content && !message.toolCalls?.length) continue; // it failed before its first token
      const said = {role: "assistant", content: message.content};
      if (message.toolCalls?.length) {
        said.tool_calls = message.toolCalls.map((call) => ({
          id: call.id, type: "function", function: {name: call.name, arguments: call.arguments},
        }));
      }
      messages.push(said);
    } else if (message.role === "tool") {
      messages.push({role: "tool", tool_call_id: message.toolCallId, name: message.name, content: message.content});
    } else messages.push({role: "user", content: contentOf(message, kinds, media)});
  }
  return messages;
}

// The text of a message, or a list of parts if it has something that the model reads.
function contentOf(message, kinds, media) {
  const parts = (message.media ?? []).filter((item) => kinds.includes(item.kind)).map((item) => {
    const url = media.get(item.key);
    if (url === undefined) {
      throw new Error(`${item.label} is no longer kept by this browser: edit the message, and remove it there.`);
    }
    if (item.kind === "audio") return {type: "input_audio", input_audio: {data: url.split(",")[1], format: "wav"}};
    return {type: "image_url", image_url: {url}};
  });
  if (!parts.length) return message.content;
  return message.content ? [...parts, {type: "text", text: message.content}] : parts;
}

function addTools(body, settings, server) {
  const tools = Settings.tools(settings), choice = settings.tool_choice || "";
  if (!tools.length) return;
  const hasResult = body.messages.at(-1)?.role === "tool";
  body.tools = tools;
  if (choice.startsWith("=")) body.tool_choice = {type: "function", function: {name: choice.slice(1)}};
  else body.tool_choice = choice || (server.has_auto_tool_choice ? "auto" : "required");
  // A call that is asked for has been made: the model shall speak now.
  if (hasResult && body.tool_choice !== "auto") body.tool_choice = "none";
}
