// Which backends own which prefixes.

import { every, get } from './api.js';
import { meter } from './charts.js';
import { h, put, swap } from './dom.js';
import { count, percent, plural, short, time } from './format.js';
import { table } from './table.js';

export const title = 'Ownership';

/** Maximum number of owners to draw; further ones are only counted. */
const COLUMNS_MAX = 16;

export function mount(root, signal) {
  const summary = h('p', { class: 'note', role: 'status' }, 'Reading the owned blocks …');
  const map = h('div', { class: 'flow tall', tabindex: '0', role: 'region', 'aria-label': 'Prefixes that requests share' });
  const about = h('p', { class: 'note' });
  const grid = table({ label: 'Owned blocks by backend', key: (row) => row.backend, sort: { at: 1, down: true }, empty: 'No backend is registered.', columns: [
    { title: 'Backend', head: true, by: (row) => row.backend, text: (row) => row.backend },
    { title: 'Owned blocks', number: true, by: (row) => row.owned_blocks, text: (row) => count(row.owned_blocks) },
    { title: 'Of its cache', number: true, by: (row) => (row.capacity_blocks ? row.owned_blocks / row.capacity_blocks : 0), make: () => {
      const it = meter();
      return { node: it.node, update: (row) => it.set(row.capacity_blocks ? row.owned_blocks / row.capacity_blocks : 0, row.capacity_blocks ? percent(row.owned_blocks / row.capacity_blocks) : 'Unknown') };
    } },
    { title: 'Capacity', number: true, wide: true, by: (row) => row.capacity_blocks ?? 0, text: (row) => (row.capacity_blocks ? short(row.capacity_blocks) : 'Unknown') },
  ] });
  const hash = h('input', { type: 'search', id: 'hash', placeholder: '16 hex digits', pattern: '[0-9a-fA-F]{16}', autocomplete: 'off', spellcheck: 'false' });
  const found = h('p', { class: 'note', role: 'status' });
  const search = h('form', { class: 'row tools', onsubmit: async (it) => {
    it.preventDefault();
    try {
      const answer = await get(`/admin/v1/blocks/${hash.value.trim().toLowerCase()}`, signal);
      put(found, answer.owners.length ? `Owned by ${answer.owners.map((owner) => owner.backend ?? 'a removed backend').join(', ')}.` : 'No backend owns it.');
    } catch (fault) { if (!signal.aborted) put(found, fault.message); }
  } }, h('label', { for: 'hash' }, 'Who owns block'), hash, h('button', { type: 'submit' }, 'Look'), found);
  swap(root, h('section', { class: 'card' }, h('h2', null, 'Prefixes that requests share'), about, map),
    h('section', null, h('h2', null, 'Owned blocks'), summary, search, grid.node));

  every(3000, signal, async () => {
    const counts = await get('/admin/v1/ownership', signal);
    grid.set(counts.backends);
    put(summary, `${count(counts.owned_blocks)} blocks owned in all, ${plural(counts.leases, 'open lease')}. A block counts once for each backend that holds it.`);
  }, (fault) => put(summary, fault.message));
  every(5000, signal, async () => {
    const shared = await get('/admin/v1/ownership/prefixes?limit=40', signal);
    put(about, shared.prefixes.length ? `The last ${count(shared.requests)} requests of replica ${shared.replica}. A filled square: that backend owns the prefix.` : '');
    draw(map, shared.prefixes);
  }, (fault) => put(about, fault.message));
}

function draw(root, prefixes) {
  if (!prefixes.length) { swap(root, h('p', { class: 'empty' }, 'No two of the last requests here began alike.')); return; }
  const owners = new Map();
  prefixes.forEach((it) => it.owners.forEach((owner) => owners.set(owner, (owners.get(owner) ?? 0) + it.requests)));
  const columns = [...owners].sort((a, b) => b[1] - a[1]).slice(0, COLUMNS_MAX).map(([owner]) => owner).sort((a, b) => a.localeCompare(b, 'en', { numeric: true }));
  const most = Math.max(...prefixes.map((it) => it.requests));
  const children = new Map();
  const listed = new Set(prefixes.map((it) => it.hash));
  prefixes.forEach((it) => {
    const parent = listed.has(it.after) ? it.after : '';
    children.set(parent, [...(children.get(parent) ?? []), it]);
  });
  const rows = [];
  const walk = (parent, depth) => (children.get(parent) ?? []).forEach((it) => {
    const bar = meter();
    bar.set(it.requests / most, count(it.requests));
    rows.push(h('tr', null,
      h('th', { scope: 'row', class: `depth-${Math.min(depth, 5)}` }, h('code', { title: `Hash of its last block: ${it.hash}` }, it.hash.slice(0, 8)), h('span', { class: 'note' }, ` ${plural(it.blocks, 'block')}`)),
      h('td', null, bar.node), h('td', { class: 'number num wide' }, count(it.users)), h('td', { class: 'wide' }, it.model), h('td', { class: 'num wide' }, time(it.last_ms)),
      columns.map((owner) => h('td', { class: 'square' }, h('span', { class: it.owners.includes(owner) ? 'own' : 'own not', title: owner }, h('span', { class: 'hidden' }, it.owners.includes(owner) ? 'owns it' : 'does not'))))));
    walk(it.hash, depth + 1);
  });
  walk('', 0);
  const [left, top] = [root.scrollLeft, root.scrollTop];
  swap(root, h('table', { class: 'plain-table map' }, h('caption', { class: 'hidden' }, 'Prefixes and their owners'),
    h('thead', null, h('tr', null, [['Prefix'], ['Requests'], ['Users', 'number wide'], ['Model', 'wide'], ['Last', 'wide']].map(([it, name]) => h('th', { scope: 'col', class: name }, it)), columns.map((it) => h('th', { scope: 'col', class: 'square' }, h('span', null, it))))),
    h('tbody', null, rows)), owners.size > columns.length && h('p', { class: 'note' }, `and ${count(owners.size - columns.length)} owners more.`));
  root.scrollTo(left, top);
}
