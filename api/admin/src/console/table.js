// A table of any length: only visible rows are in the page, and only changes are rendered.

import { attr, h, put } from './dom.js';

const names = new Intl.Collator('en', { numeric: true });
const ROW = 40;
const SPARE = 6;

/**
 * Columns: `{ title, make() -> node with update(row) | text(row), by(row), number, wide, wider }`.
 * `by` makes the column sortable; `wide` hides it on phones, `wider` on all but wide screens. Rows that are equal are ordered by
 * `tie(row)`, else by their key.
 */
export function table({ label, columns, key, sort, empty, tie = key }) {
  let rows = [];
  let shown = [];
  let order = { ...sort };
  let drawn = -1;
  const pool = [];
  const heads = columns.map((column, at) => {
    const title = column.by
      ? h('button', { type: 'button', onclick: () => { order = { at, down: order.at === at ? !order.down : Boolean(column.down ?? column.number) }; arrange(true); } }, column.title)
      : column.title;
    return h('th', { scope: 'col', class: cell(column) }, title);
  });
  const above = h('tr', { 'aria-hidden': 'true', class: 'space' }, h('td', { colspan: columns.length }));
  const below = h('tr', { 'aria-hidden': 'true', class: 'space' }, h('td', { colspan: columns.length }));
  const body = h('tbody', null, above, below);
  const caption = h('caption', { class: 'hidden' }, label);
  const grid = h('table', { class: 'grid' }, caption, h('thead', null, h('tr', null, heads)), body);
  const nothing = h('p', { class: 'empty', hidden: true }, empty ?? 'Nothing to show.');
  const box = h('div', { class: 'scroller', tabindex: '0', role: 'region', 'aria-label': label, onscroll: () => paint() }, grid);
  const node = h('div', { class: 'table' }, box, nothing);

  function cell(column) {
    return [column.number && 'number', column.wide && 'wide', column.wider && 'wider'].filter(Boolean).join(' ') || undefined;
  }

  function makeRow() {
    const cells = columns.map((column) => {
      const made = column.make?.();
      const td = h(column.head ? 'th' : 'td', { class: cell(column), scope: column.head && 'row' }, made?.node);
      return { td, update: made ? made.update : (row) => put(td, column.text(row)) };
    });
    return { tr: h('tr', null, cells.map((it) => it.td)), cells };
  }

  /** Keeps the order while the pointer or focus is in the table, so that rows do not move away. */
  function arrange(isAsked = false) {
    const column = columns[order.at];
    const isHeld = !isAsked && shown.length > 0 && node.matches(':hover, :focus-within');
    if (isHeld) {
      const now = new Map(rows.map((row) => [key(row), row]));
      const kept = shown.map((row) => now.get(key(row))).filter(Boolean);
      const seen = new Set(kept.map(key));
      shown = [...kept, ...rows.filter((row) => !seen.has(key(row)))];
    } else {
      const sign = order.down ? -1 : 1;
      const keyed = rows.map((row) => [column.by(row), row]);
      const compare = (a, b) => (typeof a === 'string' ? names.compare(a, b) : (a ?? -1) - (b ?? -1));
      keyed.sort(([a, first], [b, second]) => sign * compare(a, b) || names.compare(tie(first), tie(second)));
      shown = keyed.map(([, row]) => row);
    }
    heads.forEach((head, at) => attr(head, 'aria-sort', at === order.at ? (order.down ? 'descending' : 'ascending') : false));
    attr(grid, 'aria-rowcount', shown.length + 1);
    nothing.hidden = shown.length > 0;
    paint();
  }

  function paint() {
    // The box is at most as tall as the window, and grows with its rows.
    const height = innerHeight;
    const first = Math.max(0, Math.min(Math.floor(box.scrollTop / ROW) - SPARE, shown.length));
    const last = Math.min(shown.length, first + Math.ceil(height / ROW) + 2 * SPARE);
    while (pool.length < last - first) {
      const row = makeRow();
      pool.push(row);
      body.insertBefore(row.tr, below);
    }
    pool.forEach((row, at) => {
      const item = shown[first + at];
      const isUsed = first + at < last;
      row.tr.hidden = !isUsed;
      if (!isUsed) return;
      attr(row.tr, 'aria-rowindex', first + at + 2);
      row.cells.forEach((it) => it.update(item));
    });
    const space = (tr, count) => {
      tr.hidden = count === 0;
      const wanted = `${count * ROW}px`;
      if (tr.firstChild.style.height !== wanted) tr.firstChild.style.setProperty('height', wanted);
    };
    space(above, first);
    space(below, shown.length - last);
    drawn = first;
  }

  return { node, set(next) { rows = next; arrange(); }, sortBy(at, down) { order = { at, down }; arrange(true); }, rowsInPage: () => pool.length, first: () => drawn };
}
