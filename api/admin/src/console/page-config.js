// All settings: their values in this replica's file, in the cluster, and in effect.

import { every, get } from './api.js';
import { h, put, swap } from './dom.js';
import { count, value } from './format.js';
import { table } from './table.js';

export const title = 'Config';

export function mount(root, signal) {
  let rows = [];
  const summary = h('p', { class: 'note', role: 'status' }, 'Reading the config …');
  const filter = h('input', { type: 'search', id: 'filter', placeholder: 'Key or value', autocomplete: 'off', oninput: () => show() });
  const onlyDifferent = h('input', { type: 'checkbox', id: 'different', onchange: () => show() });
  const text = (name) => () => { const node = h('code'); return { node, update: (row) => { put(node, value(row[name])); node.title = value(row[name]); } }; };
  const grid = table({ label: 'Settings', key: (row) => row.key, sort: { at: 0, down: false }, empty: 'No setting fits.', columns: [
    { title: 'Key', head: true, by: (row) => row.key, make: () => { const node = h('code'); return { node, update: (row) => put(node, row.key) }; } },
    { title: 'In effect', make: text('in_effect') },
    { title: 'File', wide: true, make: text('file') },
    { title: 'Cluster', wide: true, make: text('cluster') },
    { title: 'Counts for', wide: true, by: (row) => row.scope, text: (row) => (row.isDifferent ? 'Cluster; the file differs' : row.scope === 'cluster' ? 'Cluster' : 'This replica') },
  ] });
  swap(root, h('div', { class: 'row tools' }, h('label', { for: 'filter', class: 'hidden' }, 'Search'), filter, h('label', { class: 'check' }, onlyDifferent, 'Only where file and cluster differ'), summary), grid.node);
  function show() {
    const wanted = filter.value.trim().toLowerCase();
    const shown = rows.filter((row) => (!onlyDifferent.checked || row.isDifferent) && (!wanted || `${row.key} ${value(row.in_effect)} ${value(row.file)}`.toLowerCase().includes(wanted)));
    grid.set(shown);
    const different = rows.filter((row) => row.isDifferent).length;
    put(summary, `${count(rows.length)} settings. ${different ? `The file sets ${count(different)} otherwise than the cluster; quorate config diff shows them.` : 'The file and the cluster agree.'}`);
  }
  every(5000, signal, async () => {
    const answer = await get('/admin/v1/config', signal);
    const different = new Set(answer.differences);
    rows = Object.entries(answer.keys).map(([key, it]) => ({ key, ...it, isDifferent: different.has(key) }));
    show();
  }, (fault) => { if (!rows.length) put(summary, fault.message); });
}
