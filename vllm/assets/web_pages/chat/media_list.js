// Pictures and recordings as they are shown: in a message, or in a list whose items can be removed.

// A picture or a player. item: {kind, label, and url or key}; media: the store; onLoad(): it is higher now.
function mediaNode(item, media, onLoad = () => {}) {
  const caption = element("figcaption", {className: "note", dir: "auto"}, visible(item.label));
  const shown = item.kind === "image" ? element("img", {alt: visible(item.label), onload: onLoad})
    : element("audio", {controls: true, ariaLabel: visible(item.label)});
  const node = element("figure", {className: `media ${item.kind}`}, shown, caption);
  const show = (url) => {
    if (url) shown.src = url;
    else shown.replaceWith(element("p", {className: "problem"}, "no longer kept by this browser"));
  };
  const url = item.url ?? media.get(item.key);
  if (url) show(url);
  else media.load([item.key]).then(() => show(media.get(item.key)));
  return node;
}

class MediaList {
  // onChange(): an item was added or removed.
  constructor(label, media, onChange = () => {}) {
    this.media = media;
    this.onChange = onChange;
    this.items = [];
    this.node = element("ul", {className: "media-list", ariaLabel: label, hidden: true});
  }

  add(...items) {
    this.items.push(...items);
    this.draw();
  }

  remove(item) {
    const at = this.items.indexOf(item);
    this.items.splice(at, 1);
    this.draw();
    // The focus stays in the list while it has items.
    this.node.querySelectorAll("button")[Math.min(at, this.items.length - 1)]?.focus();
  }

  clear() {
    this.items = [];
    this.draw();
  }

  draw() {
    this.node.hidden = !this.items.length;
    this.node.replaceChildren(...this.items.map((item) => element("li", {}, mediaNode(item, this.media),
      item.again ? element("button", {type: "button", className: "quiet", onclick: item.again}, "Try again") : "",
      element("button", {
        type: "button", className: "quiet", ariaLabel: `Remove ${visible(item.label)}`, onclick: () => this.remove(item),
      }, "×"))));
    this.onChange();
  }
}
