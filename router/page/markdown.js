// Markdown to elements, the little that answers have: paragraphs, headings, lists, code, bold, italics.
// Text becomes text nodes and nothing else, so that no answer can bring an element, an address or a script.

/** Show `text` in `target`. Blocks that are as before are left alone, so that a long answer streams cheaply. */
export function show(target, text) {
  const blocks = cut(text);
  blocks.forEach((block, at) => {
    const source = `${block.kind}\n${block.lines.join("\n")}`;
    const there = target.children[at];
    if (there?.dataset.source === source) return;
    const made = element(block);
    made.dataset.source = source;
    there ? there.replaceWith(made) : target.append(made);
  });
  while (target.children.length > blocks.length) target.lastElementChild.remove();
}

function cut(text) {
  const blocks = [];
  let open = null;
  for (const line of text.split("\n")) {
    if (open?.kind === "code") {
      if (/^\s*```\s*$/.test(line)) open = null;
      else open.lines.push(line);
      continue;
    }
    const kind = /^\s*```/.test(line) ? "code"
      : /^#{1,6}\s/.test(line) ? "heading"
      : /^\s*[-*+]\s/.test(line) ? "ul"
      : /^\s*\d+[.)]\s/.test(line) ? "ol"
      : line.trim() === "" ? null : "p";
    if (kind === null) open = null;
    else if (kind === "code") blocks.push((open = { kind, lines: [] }));
    else if (open && open.kind === kind && kind !== "heading") open.lines.push(line);
    else if (open && kind === "p" && open.kind !== "heading") open.lines[open.lines.length - 1] += `\n${line}`; // of the list's last item
    else blocks.push((open = { kind, lines: [line] }));
  }
  return blocks;
}

function element({ kind, lines }) {
  if (kind === "code") {
    const made = document.createElement("pre");
    made.tabIndex = 0; // it scrolls
    made.append(within("code", [lines.join("\n")]));
    return made;
  }
  if (kind === "heading") return within("h4", inline(lines[0].replace(/^#+\s+/, "")));
  if (kind === "p") return within("p", inline(lines.join("\n")));
  return within(kind, lines.map((line) => within("li", inline(line.replace(/^\s*([-*+]|\d+[.)])\s+/, "")))));
}

function inline(text) {
  const made = [];
  let from = 0;
  for (const found of text.matchAll(/`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g)) {
    made.push(text.slice(from, found.index));
    made.push(within(found[1] ? "code" : found[2] ? "strong" : "em", [found[1] ?? found[2] ?? found[3]]));
    from = found.index + found[0].length;
  }
  return [...made, text.slice(from)];
}

function within(name, children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
