// A text that grows, shown as Markdown. Blocks that are complete stay; only the last one is drawn
// again, so a long answer costs no more per token than a short one.

class MarkdownView {
  static UNDECIDED = /\n[ \t]{0,20}[-*+#>`~_|\d.) ]{0,12}$/;

  constructor(parent) {
    this.parent = parent;
    this.rest = ""; // from the beginning of the last block on
    this.openNode = null; // of the last block
    this.openCode = null; // the last block when it is code: {language, length, append}
  }

  append(text) {
    this.rest += text;
  }

  // isComplete: no more text will come. Before, the first signs of a line are held back until it is
  // known what they begin.
  draw(isComplete) {
    const text = isComplete ? this.rest : this.rest.replace(MarkdownView.UNDECIDED, "");
    const blocks = splitBlocks(text), last = blocks.pop();
    for (const block of blocks) {
      this.place(block);
      this.openNode = this.openCode = null;
    }
    if (!last) return;
    this.place(last);
    this.rest = (last.prefix ?? "") + this.rest.slice(last.start);
  }

  // Shows a block in the place of the open one.
  place(block) {
    if (block.kind === "code" && this.openCode?.language === block.language) {
      const text = block.lines.join("\n");
      this.openCode.append(text.slice(this.openCode.length));
      this.openCode.length = text.length;
      return;
    }
    let node;
    this.openCode = null;
    if (block.kind === "code") {
      const text = block.lines.join("\n");
      const code = codeNode(block.language, text);
      this.openCode = {language: block.language, length: text.length, append: code.append};
      node = code.node;
    } else node = blockNode(block);
    if (this.openNode) this.openNode.replaceWith(node);
    else this.parent.append(node);
    this.openNode = node;
  }
}

// Draws at most once per frame, and leaves most of the time to everything else.
class Pacer {
  static IDLE_SHARE = 6; // a drawing that took 50 ms is followed by 300 ms without one

  constructor(draw) {
    this.drawNow = draw;
    this.isPlanned = false;
    this.earliest = 0;
  }

  request() {
    if (this.isPlanned) return;
    this.isPlanned = true;
    setTimeout(() => requestAnimationFrame(() => this.flush()), Math.max(0, this.earliest - performance.now()));
  }

  flush() {
    this.isPlanned = false;
    const begin = performance.now();
    this.drawNow();
    // What the browser does after this function counts too: styles and layout.
    setTimeout(() => {
      const end = performance.now();
      this.earliest = end + Pacer.IDLE_SHARE * (end - begin);
    });
  }
}
