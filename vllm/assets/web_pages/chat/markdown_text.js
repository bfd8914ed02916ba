// Markdown inside a line: bold, italic, struck out, code, links. Everything becomes DOM nodes whose
// texts are set as text; what is not understood is shown as it was written.
//
// Each search looks a bounded way ahead, so that the time grows with the length of a text and not
// with its square.

const MARK = /[\\`*_~[!]|https?:\/\//g;
const MAX_SPAN_CHARS = 2000, MAX_DEPTH = 6;
const LINK = /!?\[([^[\]\n]{0,500})\]\(<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,200})?)>?(?: +"[^"\n]{0,200}")?\)/y;
const BARE_URL = /https?:\/\/[^\s<>"'`|\\^{}[\]]{1,2000}/y;
const WORD = /[\p{L}\p{N}_]/u;
// Characters that turn the direction of all text behind them: they could show a text or an address
// as another one.
const DIRECTION_CONTROL = /[\u202a-\u202e\u2066-\u2069]/g;

// The text with characters made visible that would turn its direction.
function visible(text) {
  return text.replace(DIRECTION_CONTROL, (c) => `[U+${c.codePointAt(0).toString(16).toUpperCase()}]`);
}

// Appends the nodes of a line, or of some lines, to an element.
function appendMarkdownText(parent, text, depth = 0) {
  const missing = new Set(); // marks that have no end: not to be looked for again
  let from = 0, at = 0;
  for (;;) {
    MARK.lastIndex = at;
    const found = MARK.exec(text);
    if (!found) break;
    const span = readSpan(text, found.index, depth, missing);
    if (span.nodes) {
      if (found.index > from) parent.append(visible(text.slice(from, found.index)));
      parent.append(...span.nodes);
      from = span.end;
    }
    at = span.end;
  }
  if (from < text.length) parent.append(visible(text.slice(from)));
}

// What begins at a mark: its nodes (none when it is plain text), and where it ends.
function readSpan(text, at, depth, missing) {
  const c = text[at];
  if (c === "\\") {
    const escaped = /[!-/:-@[-`{-~]/.test(text[at + 1] || "");
    return escaped ? {nodes: [text[at + 1]], end: at + 2} : {end: at + 1};
  }
  if (c === "`") return readCode(text, at, missing);
  if (c === "h") return readBareUrl(text, at);
  if (c === "[" || c === "!") return readLink(text, at);
  return readEmphasis(text, at, depth, missing);
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function readCode(text, at, missing) {
  const length = runLength(text, at), mark = "`".repeat(length), begin = at + length;
  const plain = {end: begin};
  if (missing.has(mark)) return plain;
  for (let end = text.indexOf(mark, begin); end !== -1 && end - begin < MAX_SPAN_CHARS;) {
    const found = runLength(text, end);
    if (found === length) {
      const code = text.slice(begin, end).replace(/\n/g, " ");
      return {nodes: [element("code", {}, visible(code))], end: end + length};
    }
    end = text.indexOf(mark, end + found);
  }
  missing.add(mark);
  return plain;
}

function readEmphasis(text, at, depth, missing) {
  const c = text[at], length = runLength(text, at), plain = {end: at + length};
  const mark = c.repeat(Math.min(length, 2)), begin = at + mark.length;
  if (length > 3 || depth >= MAX_DEPTH || (c === "~" && length !== 2)) return plain;
  if (missing.has(mark) || !/\S/.test(text[at + length] || "")) return plain;
  if (c === "_" && WORD.test(text[at - 1] || "")) return plain;
  const end = findEmphasisEnd(text, begin + length - mark.length, mark);
  if (end === -1) {
    missing.add(mark);
    return plain;
  }
  const tag = c === "~" ? "del" : mark.length === 2 ? "strong" : "em";
  const made = element(tag);
  appendMarkdownText(made, text.slice(begin, end), depth + 1);
  return {nodes: [made], end: end + mark.length};
}

function findEmphasisEnd(text, begin, mark) {
  const c = mark[0], last = begin + MAX_SPAN_CHARS;
  for (let end = text.indexOf(mark, begin + 1); end !== -1 && end < last;) {
    const length = runLength(text, end), behind = end + length;
    const isEnd = /\S/.test(text[end - 1]) && (length === mark.length || length === 3)
      && !(c === "_" && WORD.test(text[behind] || ""));
    if (isEnd) return behind - mark.length;
    end = text.indexOf(mark, behind);
  }
  return -1;
}

function readLink(text, at) {
  LINK.lastIndex = at;
  const found = LINK.exec(text);
  if (!found) return {end: at + 1};
  const label = found[1] || found[2], end = at + found[0].length;
  const nodes = linkNodes(found[2], text[at] === "!" ? `image: ${label}` : label);
  return nodes ? {nodes, end} : {end};
}

function readBareUrl(text, at) {
  BARE_URL.lastIndex = at;
  const found = BARE_URL.exec(text);
  if (!found || WORD.test(text[at - 1] || "")) return {end: at + 4};
  let url = found[0].replace(/[.,:;!?*_~]+$/, "");
  if (url.endsWith(")") && !url.includes("(")) url = url.slice(0, -1);
  const nodes = linkNodes(url, url);
  return nodes ? {nodes, end: at + url.length} : {end: at + 4};
}

// A link, with its address behind it where the label is another text; null for any address but
// those of the web.
function linkNodes(address, label) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:"].includes(url.protocol) || url.username || url.password) return null;
  const link = element("a", {href: url.href, target: "_blank", rel: "noopener noreferrer"});
  const plain = (text) => text.replace(/\/$/, "");
  if (label === address && plain(url.href) === plain(address)) {
    link.append(address);
    return [link];
  }
  link.append(visible(label.replace(/[`*]/g, "")));
  const shown = url.href.length > 80 ? `${url.href.slice(0, 80)}…` : url.href;
  return [link, element("span", {className: "address"}, ` (${visible(shown)})`)];
}
