// Builds nodes. Text stays text: nothing here turns strings into markup.

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'style') Object.entries(value).forEach(([key, it]) => node.style.setProperty(key, it));
    else if (name === 'value') node.value = value;
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(9).filter((it) => it !== undefined && it !== null && it !== false));
  return node;
}

/** An HTML element: `h('p', { class: 'note' }, 'text')`. */
export const h = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);

/** An SVG element. */
export const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

/** Sets a node's text if it changed: untouched text keeps its selection, and costs no layout. */
export function put(node, text) {
  const wanted = text === undefined || text === null ? '' : String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Sets an attribute if it changed; `false` removes it. */
export function attr(node, name, value) {
  if (value === false || value === undefined || value === null) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Replaces the children of a node. */
export const swap = (node, ...children) => node.replaceChildren(...children.flat(9).filter((it) => it || it === 0));

/** Keeps one child per key, in the order of `items`: `make(item)` builds, `update(node, item)` refreshes. */
export function keyed(parent, items, key, make, update) {
  const known = parent.known ?? (parent.known = new Map());
  const wanted = new Map(items.map((item) => [key(item), item]));
  for (const [name, node] of known) {
    if (!wanted.has(name)) { node.remove(); known.delete(name); }
  }
  let place = parent.firstElementChild;
  for (const [name, item] of wanted) {
    let node = known.get(name);
    if (!node) { node = make(item); known.set(name, node); }
    update?.(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
}

const PATHS = {
  overview: 'M3 3h8v8H3zM13 3h8v5h-8zM13 10h8v11h-8zM3 13h8v8H3z',
  backends: 'M4 4h16v6H4zM4 14h16v6H4zM7 7h.01M7 17h.01',
  ownership: 'M4 4h6v6H4zM14 4h6v6h-6zM14 14h6v6h-6zM10 7h4M17 10v4',
  users: 'M9 11a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM2 21a7 7 0 0 1 14 0M16 4a4 4 0 0 1 0 7M18 14a7 7 0 0 1 4 7',
  sessions: 'M9 3h6v5H9zM3 16h6v5H3zM15 16h6v5h-6zM12 8v4M6 16v-4h12v4',
  decisions: 'M6 3v6a4 4 0 0 0 4 4h4a4 4 0 0 1 4 4v4M6 3 3 6M6 3l3 3M18 21l-3-3M18 21l3-3',
  policy: 'M4 6h10M18 6h2M4 12h2M10 12h10M4 18h8M16 18h4M14 4v4M6 10v4M12 16v4',
  log: 'M5 4h14M5 9h14M5 14h9M5 19h9',
  config: 'M4 5h16v14H4zM4 9h16M8 13h4M8 16h8',
  sun: 'M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M4 12H2M22 12h-2M5 5l1.5 1.5M17.5 17.5 19 19M19 5l-1.5 1.5M6.5 17.5 5 19',
  close: 'M6 6l12 12M18 6 6 18',
};

/** One of the console's icons, for decoration only. */
export const icon = (name) => svg('svg', { class: 'icon', viewBox: '0 0 24 24', 'aria-hidden': 'true' }, svg('path', { d: PATHS[name] }));
