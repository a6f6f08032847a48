"use strict";
// Markdown as DOM nodes. The text is a model's, so it is untrusted: marked only splits it into tokens, and each node below is made
// by name, with text that is never parsed as HTML. HTML in the text is shown as it is written, an image as a link to it.

const DEEPEST = 20;  // levels of nested blocks; text that is deeper is shown as it is written
const SIMPLE = { paragraph: "p", blockquote: "blockquote", strong: "strong", em: "em", del: "s", br: "br", hr: "hr" };
const CHARACTERS = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

function element(tag, children = [], properties = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function unescaped(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]+));/gi, (whole, decimal, hex, name) => {
    if (name) return CHARACTERS[name] ?? whole;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}

function link(address, children) {
  const href = unescaped(address);
  if (!/^(https?|mailto):/i.test(href)) return element("span", [...children, ` (${href})`]);
  return element("a", children, { href, title: href, target: "_blank", rel: "noopener noreferrer" });
}

function table({ header, rows }, depth) {
  const row = (cells, tag) => element("tr", cells.map(cell => {
    const made = element(tag, nodes(cell.tokens, depth));
    made.style.textAlign = cell.align ?? "";
    return made;
  }));
  return element("table", [element("thead", [row(header, "th")]), element("tbody", rows.map(cells => row(cells, "td")))]);
}

function node(token, depth) {
  const inside = () => nodes(token.tokens ?? [], depth + 1);
  if (depth > DEEPEST) return document.createTextNode(token.raw);
  if (/^<br\s*\/?>$/i.test(token.raw)) return element("br");  // models break lines so in tables
  if (token.type in SIMPLE) return element(SIMPLE[token.type], inside());
  switch (token.type) {
    case "space": case "def": return document.createTextNode("");
    case "escape": return document.createTextNode(token.text);
    case "text": return token.tokens ? element("span", inside()) : document.createTextNode(unescaped(token.text));
    case "heading": return element(`h${token.depth}`, inside());
    case "codespan": return element("code", [token.text]);
    case "code": return element("pre", [element("code", [token.text])]);
    case "link": return link(token.href, inside());
    case "image": return link(token.href, [token.text || token.href]);
    case "checkbox": return element("input", [], { type: "checkbox", checked: token.checked, disabled: true });
    case "list_item": return element("li", inside());
    case "list": return element(token.ordered ? "ol" : "ul", nodes(token.items, depth), token.ordered ? { start: token.start } : {});
    case "table": return table(token, depth + 1);
    default: return element(token.block ? "p" : "span", [token.raw.trimEnd()], { className: "plain" });
  }
}

function nodes(tokens, depth) { return tokens.map(token => node(token, depth)); }

// Shows a growing text in a box.
class Markdown {
  #box; #shown = [];

  constructor(box) { this.#box = box; }

  // Draws the blocks that differ from what is shown: a reader may be selecting text of the others.
  draw(text) {
    let tokens;
    try {
      tokens = marked.lexer(text, { gfm: true, breaks: true });
    } catch {  // nested too deep
      tokens = [{ type: "html", block: true, raw: text }];
    }
    let same = 0;
    while (same < this.#shown.length && tokens[same]?.raw === this.#shown[same]) same++;
    while (this.#box.childNodes.length > same) this.#box.lastChild.remove();
    this.#box.append(...nodes(tokens.slice(same), 0));
    this.#shown = tokens.map(token => token.raw);
  }

  // Draws all of it: links that are defined at the end of a text belong to its beginning.
  finish(text) {
    this.#shown = [];
    this.draw(text);
  }
}
