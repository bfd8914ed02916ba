// Requests to the API, and the events of a stream.

// What the server, or the way to it, has answered in place of what was asked for.
class ApiError extends Error {
  // status: of HTTP; 0 when there was no answer.
  constructor(message, status) {
    super(message);
    this.status = status;
  }

  static async of(response) {
    const text = await response.text();
    const named = {401: "The server asks for an API key, or did not take the one it got",
      404: "Not found", 413: "The request is larger than the server takes",
      429: "Too many requests", 503: "The server cannot take this request now"};
    const wait = response.headers.get("retry-after");
    const what = named[response.status] ?? `The server answered with status ${response.status}`;
    const reason = ApiError.messageIn(text).replace(/\.$/, "");
    const told = reason && response.status !== 401 ? `${what}: ${reason}.` : `${what}.`;
    return new ApiError(wait ? `${told} Try again in ${wait} s.` : told, response.status);
  }

  // The message in the body of an error, which has several forms.
  static messageIn(text) {
    try {
      const body = JSON.parse(text), found = body.error?.message ?? body.message ?? body.error;
      return typeof found === "string" ? found : "";
    } catch {
      return text.startsWith("<") ? "" : text.slice(0, 500);
    }
  }
}

async function getJson(path, timeoutMs = 5000) {
  let response;
  try {
    response = await fetch(path, {headers: ApiKey.headers(), cache: "no-store", signal: AbortSignal.timeout(timeoutMs)});
  } catch {
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (!response.ok) throw await ApiError.of(response);
  return response.json();
}

// The text of a sound, which is a data: URL. Throws ApiError.
async function transcribe(url, model) {
  const form = new FormData(), bytes = Uint8Array.from(atob(url.split(",")[1]), (letter) => letter.charCodeAt(0));
  form.append("file", new Blob([bytes], {type: "audio/wav"}), "sound.wav");
  form.append("model", model);
  let response;
  try {
    response = await fetch("v1/audio/transcriptions", {method: "POST", body: form, headers: ApiKey.headers(), cache: "no-store"});
  } catch {
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (!response.ok) throw await ApiError.of(response);
  return (await response.json()).text.trim();
}

// The chunks of a stream as objects. Ends with [DONE]; throws ApiError when it ends otherwise.
async function* streamChunks(path, body, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST", body: JSON.stringify(body), signal, cache: "no-store",
      headers: {"Content-Type": "application/json", ...ApiKey.headers()},
    });
  } catch (error) {
    throw unlessStopped(error, signal, "The server cannot be reached: it may be down, or the network is.");
  }
  if (!response.ok) throw await ApiError.of(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw unlessStopped(error, signal, "The connection to the server was lost.");
    }
    if (part.done) throw new ApiError("The answer broke off: the server closed the connection before its end.", 0);
    text += part.value.replaceAll("\r\n", "\n");
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const lines = event.split("\n").filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error || chunk.object === "error") {
        throw new ApiError(`The server ended the answer: ${ApiError.messageIn(data) || "it did not say why"}`, 500);
      }
      yield chunk;
    }
  }
}

function unlessStopped(error, signal, message) {
  return signal.aborted ? error : new ApiError(message, 0);
}
