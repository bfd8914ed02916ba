// Markdown in lines: paragraphs, headings, lists, quotes, tables and code. A text is cut into blocks,
// and a block becomes DOM nodes.

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`\n]{0,200})$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TABLE_RULE = /^ *\|?(?: *:?-+:? *\|)* *:?-+:? *\|? *$/;
const MAX_NESTING = 6, MAX_LINE_CHARS = 2000, MAX_PARAGRAPH_CHARS = 8000, MAX_COLUMNS = 40,
  MAX_LIST_LINES = 200, MAX_ROWS = 200; // then another list or table begins, so that not all is drawn again

// Cuts a text into blocks {kind, start, lines, ...}; `start` is where a block begins in the text.
// All blocks but the last stay as they are, whatever text comes behind. A block may have a `prefix`:
// lines from before its start that it needs.
function splitBlocks(text) {
  const lines = text.split("\n"), starts = [], blocks = [];
  let start = 0;
  for (const line of lines) {
    starts.push(start);
    start += line.length + 1;
  }
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = readBlock(lines, at);
    if (block.kind === "paragraph") blocks.push(...splitParagraph(block, starts[at]));
    else if (block.kind === "table") blocks.push(...splitTable(block, starts.slice(at, block.end)));
    else blocks.push({...block, start: starts[at]});
    at = block.end;
  }
  return blocks;
}

function readBlock(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return readFence(lines, at, fence);
  if (HEADING.test(line)) return {kind: "heading", lines: [line], end: at + 1};
  if (isRule(line)) return {kind: "rule", lines: [line], end: at + 1};
  if (QUOTE.test(line)) return readWhile(lines, at, "quote", (next) => QUOTE.test(next));
  if (ITEM.test(line)) return readList(lines, at);
  if (isTable(lines, at)) return readWhile(lines, at, "table", (next) => next.includes("|"));
  return readWhile(lines, at, "paragraph", (next, i) => next.trim() && !beginsBlock(lines, i));
}

function readWhile(lines, at, kind, goesOn) {
  let end = at + 1;
  while (end < lines.length && goesOn(lines[end], end)) end += 1;
  return {kind, lines: lines.slice(at, end), end};
}

function beginsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line)
    || isRule(line) || isTable(lines, at);
}

// At least three of one of these signs, and spaces.
function isRule(line) {
  if (line.length >= MAX_LINE_CHARS) return false;
  const signs = line.replaceAll(" ", "");
  return signs.length >= 3 && "-*_".includes(signs[0]) && signs === signs[0].repeat(signs.length);
}

function isTable(lines, at) {
  const rule = lines[at + 1];
  return lines[at].includes("|") && rule !== undefined && rule.includes("-")
    && rule.length < MAX_LINE_CHARS && TABLE_RULE.test(rule)
    && cellsOf(rule).length === cellsOf(lines[at]).length;
}

function readFence(lines, at, fence) {
  const [, mark, language] = fence;
  const isEnd = (line) => line.trim().length >= mark.length && line.length < MAX_LINE_CHARS
    && line.trim() === mark[0].repeat(line.trim().length);
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  return {kind: "code", language: language.trim(), lines: lines.slice(at + 1, end), end: end + 1};
}

// A list goes on over blank lines while items of its kind or indented lines follow.
function readList(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOther = (item) => item[1].length <= indent.length + 1 && item[2].at(-1) !== mark.at(-1);
  let end = at + 1, wasBlank = false;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (!line.trim()) {
      wasBlank = true;
      continue;
    }
    const item = isRule(line) ? null : ITEM.exec(line);
    if (item && isOther(item)) break;
    const isTop = item && item[1].length <= indent.length;
    if (isTop && end - at >= MAX_LIST_LINES) break;
    const isPart = item || /^ {2}/.test(line);
    if (!isPart && (wasBlank || beginsBlock(lines, end))) break;
    wasBlank = false;
  }
  return {kind: "list", lines: lines.slice(at, end), end};
}

// A paragraph without end would be drawn again and again while it grows: it is cut at a space.
function splitParagraph(block, start) {
  let text = block.lines.join("\n");
  const parts = [];
  while (text.length > MAX_PARAGRAPH_CHARS) {
    const space = text.lastIndexOf(" ", MAX_PARAGRAPH_CHARS);
    const isPair = /[\ud800-\udbff]/.test(text[MAX_PARAGRAPH_CHARS - 1]);
    const cut = space > MAX_PARAGRAPH_CHARS / 2 ? space + 1 : MAX_PARAGRAPH_CHARS - isPair;
    parts.push({kind: "paragraph", start, lines: [text.slice(0, cut)]});
    text = text.slice(cut);
    start += cut;
  }
  parts.push({kind: "paragraph", start, lines: [text]});
  return parts;
}

// A table without end is cut too; each part has the head.
function splitTable(block, starts) {
  const [head, rule] = block.lines, parts = [];
  for (let row = 2; row === 2 || row < block.lines.length; row += MAX_ROWS) {
    const lines = [head, rule, ...block.lines.slice(row, row + MAX_ROWS)];
    if (row === 2) parts.push({kind: "table", start: starts[0], lines});
    else parts.push({kind: "table", start: starts[row], lines, prefix: `${head}\n${rule}\n`});
  }
  return parts;
}

// The element of a block.
function blockNode(block, depth = 0) {
  const makers = {
    code: () => codeNode(block.language, block.lines.join("\n")).node,
    heading: () => {
      const [, marks, text] = HEADING.exec(block.lines[0]);
      return textNode(`h${Math.min(marks.length + 2, 6)}`, text);
    },
    rule: () => element("hr"),
    quote: () => nestedNode("blockquote", block.lines.map((line) => line.replace(QUOTE, "")), depth),
    list: () => listNode(block.lines, depth),
    table: () => tableNode(block.lines),
    paragraph: () => textNode("p", block.lines.join("\n")),
  };
  return makers[block.kind]();
}

function textNode(tag, text) {
  const made = element(tag, {dir: "auto"});
  appendMarkdownText(made, text);
  return made;
}

// An element with blocks inside; what is nested too deeply is text.
function nestedNode(tag, lines, depth) {
  const made = element(tag, {dir: "auto"}), text = lines.join("\n");
  if (depth >= MAX_NESTING) {
    made.append(visible(text));
    return made;
  }
  const blocks = splitBlocks(text);
  const isLine = tag === "li" && blocks[0]?.kind === "paragraph"; // "- text", without a paragraph
  if (isLine) appendMarkdownText(made, blocks.shift().lines.join("\n"));
  made.append(...blocks.map((block) => blockNode(block, depth + 1)));
  return made;
}

function listNode(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]), items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) {
      items.push({width: item[0].trimEnd().length + 1, lines: [line.slice(item[0].length)]});
    } else {
      const {width, lines: own} = items.at(-1);
      own.push(line.slice(Math.min(width, /^ */.exec(line)[0].length)));
    }
  }
  const isOrdered = /\d/.test(mark);
  const list = element(isOrdered ? "ol" : "ul", isOrdered ? {start: parseInt(mark, 10)} : {});
  list.append(...items.map((item) => nestedNode("li", item.lines, depth)));
  return list;
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/, MAX_COLUMNS).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function tableNode(lines) {
  const [head, , ...rows] = lines.map(cellsOf);
  const row = (cells, tag) =>
    element("tr", {}, ...head.map((_, i) => textNode(tag, cells[i] || "")));
  const table = element("table", {}, element("thead", {}, row(head, "th")),
    element("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
  return element("div", {className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Table"}, table);
}

// A block of code with a button that copies it: {node, append}; `append` lets it grow.
function codeNode(language, text) {
  const PART_CHARS = 4000; // a browser lays out a part again when it grows, not the whole
  const code = element("code"), copy = element("button", {className: "quiet", type: "button"}, "Copy");
  let source = "", part = null, numChars = 0;
  const append = (more) => {
    source += more;
    for (const line of more.split(/(?<=\n)/)) {
      if (part === null || numChars > PART_CHARS && part.data.endsWith("\n")) {
        part = document.createTextNode("");
        code.append(element("span", {}, part));
        numChars = 0;
      }
      part.appendData(visible(line));
      numChars += line.length;
    }
  };
  append(text);
  copy.addEventListener("click", () => copyText(source, copy));
  const head = element("figcaption", {}, element("span", {}, visible(language) || "code"), copy);
  const pre = element("pre", {tabIndex: 0, dir: "ltr"}, code);
  return {node: element("figure", {className: "code"}, head, pre), append};
}

// Copies a text, and says so on the button. Pages without TLS have no clipboard API.
async function copyText(text, button) {
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", {value: text, className: "hidden", ariaHidden: "true"});
    (button.closest("dialog") || document.body).append(field);
    field.select();
    isCopied = document.execCommand("copy");
    field.remove();
    button.focus();
  }
  const before = button.textContent;
  button.textContent = isCopied ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = before; }, 1500);
}
