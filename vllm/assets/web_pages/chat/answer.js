// An answer while it comes: reads the chunks of a stream into a message, and measures its pace.

class Answer {
  // message: of the conversation; onGrowth(): it has changed.
  constructor(message, onGrowth) {
    this.message = message;
    this.onGrowth = onGrowth;
    this.controller = new AbortController();
    this.sent = 0; // when the request was sent, the first token came and the last one
    this.first = null;
    this.last = null;
    this.numFirst = 0; // tokens that came with the first one
  }

  stop() {
    this.controller.abort();
  }

  // Until the answer is complete, stopped or has failed; the message tells which.
  async run(request) {
    this.sent = performance.now();
    try {
      for await (const chunk of streamChunks(request.path, request.body, this.controller.signal)) {
        this.read(chunk);
        this.onGrowth();
      }
    } catch (error) {
      if (this.controller.signal.aborted) this.message.isStopped = true;
      else {
        this.message.error = error.message;
        this.failure = error;
      }
    }
  }

  read(chunk) {
    const message = this.message, choice = chunk.choices?.[0];
    if (choice) {
      // A completion has text, a chat has a delta.
      const delta = choice.delta ?? {content: choice.text};
      const reasoning = delta.reasoning_content ?? delta.reasoning;
      if (delta.content || reasoning || delta.tool_calls?.length) this.note();
      if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
      if (delta.content) {
        if (message.reasoning && !message.content) message.thoughtMs = this.last - this.sent;
        message.content += delta.content;
      }
      for (const call of delta.tool_calls ?? []) this.readToolCall(call);
      if (choice.finish_reason) message.finishReason = choice.finish_reason;
    }
    if (chunk.usage) this.readUsage(chunk.usage);
  }

  // A token has come.
  note() {
    this.last = performance.now();
    if (this.first === null) {
      this.first = this.last;
      this.message.firstTokenMs = this.first - this.sent;
    }
  }

  readToolCall(delta) {
    const calls = this.message.toolCalls ??= [];
    const call = calls[delta.index] ??= {id: "", name: "", arguments: ""};
    if (delta.id) call.id = delta.id;
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
  }

  readUsage(usage) {
    const message = this.message;
    message.promptTokens = usage.prompt_tokens;
    message.outputTokens = usage.completion_tokens ?? 0;
    if (this.first === null) return;
    this.numFirst ||= message.outputTokens;
    const numSince = message.outputTokens - this.numFirst, took = this.last - this.first;
    if (numSince > 0 && took > 0) message.tokensPerSecond = 1000 * numSince / took;
  }
}
