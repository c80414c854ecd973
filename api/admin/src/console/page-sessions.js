// The trees of agents' sessions: where they are, what they cost, and how much of it engines had cached.

import { every, get } from './api.js';
import { endTree } from './actions.js';
import { attr, h, icon, keyed, put, swap } from './dom.js';
import { NONE, count, duration, percent, plural, short } from './format.js';
import { may, watch } from './live.js';
import { table } from './table.js';

export const title = 'Sessions';

const SHOWN = 200;

const input = (usage) => usage.input_uncached + usage.input_cached;
const tokens = (usage) => input(usage) + usage.output;
const hits = (usage) => (input(usage) ? usage.input_cached / input(usage) : null);
const ago = (ms) => `${duration(ms / 1000)} ago`;
const user = (it) => it.user || it.user_key;

const HOMES_SHOWN = 2;

/** A tree's backends, those with the most sessions first. */
function homes(tree) {
  const named = tree.homes.slice(0, HOMES_SHOWN).map((it) => `${it.backend ?? 'removed'}${it.sessions > 1 ? ` ×${count(it.sessions)}` : ''}`);
  const more = tree.homes_total - named.length;
  return `${named.join(', ')}${more > 0 ? `, ${count(more)} more` : ''}`;
}

export function mount(root, signal, [given = '']) {
  const query = given instanceof URLSearchParams ? given : new URLSearchParams();
  let open = given === query ? '' : given;
  const summary = h('p', { class: 'note', role: 'status' }, 'Reading the trees …');
  const name = h('input', { type: 'search', 'aria-label': 'User', placeholder: 'User', value: query.get('user') ?? '', autocomplete: 'off', onchange: () => lookNow() });
  const order = h('select', { 'aria-label': 'Which trees', onchange: () => lookNow() }, h('option', { value: 'used' }, 'Used last'), h('option', { value: 'tokens' }, 'Most tokens'));
  const show = (id) => { open = id; history.replaceState(null, '', `#/sessions/${id}`); showTree(true).catch(() => {}); };
  const grid = table({ label: 'Trees of sessions', key: (row) => row.root, sort: { at: 7, down: false }, empty: 'No session is known, or none of this user.', columns: [
    { title: 'Tree', head: true, by: (row) => row.root, make: () => {
      const node = h('button', { type: 'button', class: 'link num', onclick: () => show(node.row) });
      return { node, update: (row) => { node.row = row.root; node.title = row.root; put(node, row.root.slice(0, 8)); } };
    } },
    { title: 'User', by: user, text: user },
    { title: 'Engines', wide: true, by: homes, text: homes },
    { title: 'Sessions', wide: true, number: true, by: (row) => row.sessions, text: (row) => count(row.sessions) },
    { title: 'Turns', wide: true, number: true, by: (row) => row.turns, text: (row) => count(row.turns) },
    { title: 'Hit rate', number: true, by: (row) => hits(row.usage), text: (row) => percent(hits(row.usage)) },
    { title: 'Tokens', wide: true, number: true, by: (row) => tokens(row.usage), text: (row) => short(tokens(row.usage)) },
    { title: 'Last turn', wide: true, number: true, by: (row) => row.idle_ms, down: false, text: (row) => ago(row.idle_ms) },
  ] });
  const picture = h('section', { class: 'card picture', 'aria-label': 'Tree', hidden: true, tabindex: '-1' });
  swap(root, h('div', { class: 'row tools' }, name, order, summary), picture, grid.node);

  async function look() {
    const wanted = new URLSearchParams({ limit: SHOWN, order: order.value });
    if (name.value.trim()) wanted.set('user', name.value.trim());
    const list = await get(`/admin/v1/session-trees?${wanted}`, signal);
    grid.set(list.trees);
    const more = list.trees_found - list.trees.length;
    put(summary, `${plural(list.sessions_total, 'session')} in ${plural(list.trees_total, 'tree')}${wanted.has('user') ? `, ${count(list.trees_found)} of them of this user` : ''}.${more > 0 ? ` ${count(more)} more are not shown.` : ''}`);
  }

  const lookNow = () => {
    grid.sortBy(order.value === 'used' ? 7 : 6, order.value === 'tokens');
    look().catch((fault) => { if (!signal.aborted) put(summary, fault.message); });
  };

  async function showTree(isAsked = false) {
    if (!open) return;
    const id = open;
    const close = h('button', { type: 'button', class: 'plain', 'aria-label': 'Close', onclick: () => { open = ''; picture.hidden = true; history.replaceState(null, '', '#/sessions'); } }, icon('close'));
    try {
      const tree = await get(`/admin/v1/session-trees/${encodeURIComponent(id)}`, signal);
      if (id !== open) return;
      draw(picture, tree, close);
    } catch (fault) {
      if (signal.aborted || id !== open) return;
      swap(picture, h('div', { class: 'row' }, h('h2', null, fault.status === 404 ? 'This tree has ended' : 'Not found'), h('span', { class: 'grow' }), close), h('p', null, fault.message));
    }
    picture.hidden = false;
    if (!isAsked) return;
    picture.scrollIntoView({ block: 'nearest' });
    picture.focus({ preventScroll: true });
  }

  every(2000, signal, async () => { await look(); await showTree(); }, (fault) => put(summary, fault.message));
  watch(signal, (what) => { if (what === 'written') lookNow(); });
}

/** Columns of a tree's sessions besides their ids: title, class, text. */
const COLUMNS = [
  ['Engine', '', (it) => it.home ?? 'Removed'], ['Model', 'wide', (it) => it.model ?? NONE],
  ['Turns', 'number num', (it) => count(it.turns)], ['Context', 'number num wide', (it) => short(it.tokens)],
  ['Hit rate', 'number num', (it) => percent(hits(it.usage))], ['Output', 'number num wide', (it) => short(it.usage.output)],
  ['Begun', 'number num wide', (it) => ago(it.age_ms)], ['Last turn', 'number num', (it) => ago(it.idle_ms)],
];

/** Draws a tree: its figures, and its sessions, children below their parents. */
function draw(root, tree, close) {
  const facts = [['User', user(tree)], ['Turns', count(tree.turns)], ['Begun', ago(tree.age_ms)],
    ['Prompt tokens', `${count(tree.usage.input_uncached)} computed, ${count(tree.usage.input_cached)} cached`],
    ['Output tokens', count(tree.usage.output)], ['Hit rate', percent(hits(tree.usage), 1)]];
  const known = root.tree === tree.root;
  if (!known) {
    root.tree = tree.root;
    root.cells = facts.map(() => h('dd'));
    root.rows = h('tbody');
    root.more = h('p', { class: 'note' });
    root.flow = h('div', { class: 'flow tall', tabindex: '0', role: 'region', 'aria-label': 'Sessions of the tree' }, h('table', { class: 'plain-table' }, h('caption', { class: 'hidden' }, 'Sessions of the tree'),
      h('thead', null, h('tr', null, [['Session'], ...COLUMNS].map(([it, kind]) => h('th', { scope: 'col', class: kind }, it)))), root.rows));
  }
  if (!known || !root.contains(root.flow)) {
    const end = may('operator') && h('button', { type: 'button', onclick: () => endTree(tree) }, 'End …');
    swap(root, h('header', { class: 'row' }, h('h2', null, 'Tree ', h('code', null, tree.root)), h('span', { class: 'grow' }), close),
      h('div', { class: 'row' }, end, tree.user && h('a', { class: 'button', href: `#/users/${encodeURIComponent(tree.user)}` }, 'Its user')),
      h('dl', { class: 'figures wide-figures' }, facts.map(([name], at) => h('div', null, h('dt', null, name), root.cells[at]))), root.flow, root.more);
  }
  facts.forEach(([, text], at) => put(root.cells[at], text));
  const depths = new Map();
  tree.sessions.forEach((it) => depths.set(it.id, Math.min((depths.get(it.parent) ?? -1) + 1, 5)));
  keyed(root.rows, tree.sessions, (it) => it.id, (it) => h('tr', null, h('th', { scope: 'row' }, h('code', { title: it.id }, it.id.slice(0, 8))), COLUMNS.map(([, kind]) => h('td', { class: kind }))), (row, it) => {
    const [first, ...cells] = row.children;
    attr(first, 'class', `depth-${depths.get(it.id)}`);
    cells.forEach((cell, at) => put(cell, COLUMNS[at][2](it)));
  });
  const more = tree.sessions_total - tree.sessions.length;
  put(root.more, `${plural(tree.sessions_total, 'session')} now${more > 0 ? `, ${count(more)} more than shown` : ''}; the figures above include those that have ended.`);
}
